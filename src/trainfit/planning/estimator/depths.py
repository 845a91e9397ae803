"""Estimates of a step at several shapes, depths and GPUs, with a cache.

Each of a model's like layers adds the same memory and work. So candidates are compared by two small
depths and a line through them, and only the chosen one is run in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainfit.core import caches, codec
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import TaskSpec
from trainfit.planning.estimator import estimate
from trainfit.planning.estimator.estimate import Answer, Request, Target, ask, is_started, told
from trainfit.planning.estimator.step_time import Done

DEPTHS = (2, 3)
_HELD = ("weights", "adapters", "parameters", "gradients", "optimizer")
"""Counts of an answer that are the same on all GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Memory of a step on one GPU in bytes, and its operations; extrapolated values are floats."""

    weights: float
    adapters: float = 0.0
    parameters: float = 0.0
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    peak_allocated: float
    peak_reserved: float
    fits: bool | None
    """True if the allocator serves the step within the capacity; None if that was not replayed."""
    done: tuple[tuple[float, tuple[Done, ...]], ...]
    """Weighted lists of operations, whose times add up."""
    family: str = ""
    """Architecture of the model."""
    bound: bool = False
    """True where the bytes are upper bounds, and no step was run."""


def take(
    factory: str, shapes: Sequence[dict[str, Any]], targets: tuple[Target, ...], layers: int
) -> list[list[Taken]]:
    """Estimate each shape on each target, extrapolated from small depths.

    Where every second block is checkpointed, two depths that differ by one give no line.
    """
    if layers <= DEPTHS[1] or any(s["checkpointing"] == "selective" for s in shapes):
        return [exactly(factory, shape, targets) for shape in shapes]
    asked = [shape | {"depth": depth} for shape in shapes for depth in DEPTHS]
    answers = _ask(factory, asked, targets)
    pairs = zip(answers[::2], answers[1::2], strict=True)
    return [
        [_extrapolated(small, large, at, layers) for at in range(len(targets))]
        for small, large in pairs
    ]


def exactly(factory: str, shape: dict[str, Any], targets: tuple[Target, ...]) -> list[Taken]:
    """Estimate a shape with all its layers."""
    return _whole(_ask(factory, [shape], targets)[0])


def _whole(answer: Answer) -> list[Taken]:
    return [
        Taken(
            **{name: getattr(answer, name) for name in _HELD},
            activations=room.activations,
            workspace=room.workspace,
            peak_allocated=room.peak_allocated,
            peak_reserved=room.peak_reserved,
            fits=room.fits,
            done=((1.0, answer.done),),
            family=answer.family,
        )
        for room in answer.rooms
    ]


def _extrapolated(small: Answer, large: Answer, at: int, layers: int) -> Taken:
    share = (layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

    def line(first: float, second: float) -> float:
        return first + share * (second - first)

    few, many = small.rooms[at], large.rooms[at]
    allocated = line(few.peak_allocated, many.peak_allocated)
    held: Any = {name: line(getattr(small, name), getattr(large, name)) for name in _HELD}
    return Taken(
        **held,
        activations=line(few.activations, many.activations),
        workspace=few.workspace,
        peak_allocated=allocated,
        # Segments of 20 MiB make this a staircase, whose line through small depths is too flat.
        peak_reserved=max(line(few.peak_reserved, many.peak_reserved), allocated),
        fits=None,
        done=((1 - share, small.done), (share, large.done)),
        family=small.family,
    )


def _ask(
    factory: str, shapes: Sequence[dict[str, Any]], targets: tuple[Target, ...]
) -> list[Answer]:
    """Answer from the cache where possible, and ask the children for the rest."""
    requests = [
        Request(task=TaskSpec(factory=factory, arguments=shape), targets=targets)
        for shape in shapes
    ]
    asked = [codec.dumps(request, indent=None) for request in requests]
    contents = [folder_content(shape) for shape in shapes]
    places = list(map(partial(estimate.place, "estimates"), asked, contents))
    answers = [caches.read(Answer, place) for place in places]
    missing = [at for at, answer in enumerate(answers) if answer is None]
    for at, answer in zip(missing, _ask_all([requests[at] for at in missing]), strict=True):
        answers[at] = told(answer)
        caches.write(places[at], answer)
    return [answer for answer in answers if answer is not None]


def _ask_all(requests: list[Request]) -> list[Answer]:
    """Share requests between two children, where a second one was started."""
    if len(requests) < 2 or not is_started(1):
        return ask(requests) if requests else []
    half = (len(requests) + 1) // 2
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(ask, (requests[:half], requests[half:]), (0, 1))
    return [*first, *second]


def folder_content(arguments: dict[str, Any]) -> str:
    """Config of a local model as text, since it may change under the same name."""
    name = arguments.get("name")
    if not isinstance(name, str) or not Path(name).is_dir():
        return ""
    try:
        return (Path(name) / "config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = "give a folder with a config.json"
        raise BadInput(f"cannot read the model in {name} ({error})", fix) from None
