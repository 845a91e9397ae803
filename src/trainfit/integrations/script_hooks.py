"""`trainfit run`: the trainers of a script that is not changed are made faster as they start.

`hook` is called inside of the script's process, when a library with a trainer is imported.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from trainfit.core.errors import BadInput
from trainfit.integrations.speedups import COMPILED, GRAPHS, SpeedUp

_NAMES = "TRAINFIT_SPEED_UP_NAMES"
_DRY = "TRAINFIT_SPEED_UP_DRY"
_METHODS = {
    "transformers.trainer": ("Trainer", "train"),
    "accelerate.accelerator": ("Accelerator", "prepare"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "fit"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "fit"),
}
"""Class and method of each library that a training passes through, by its module."""


def run_sped_up(
    command: Sequence[str], names: Sequence[str], *, dry_run: bool
) -> tuple[int, SpeedUp | None]:
    """Run a command with the named changes; return its exit code and what was done.

    A dry run ends where the training would begin. None: no known trainer was seen.
    """
    from trainfit.measuring.observe import run_injected

    with tempfile.TemporaryDirectory(prefix="trainfit-run-") as folder:
        variables = {"TRAINFIT_SPEED_UP": folder, _NAMES: ",".join(names), _DRY: str(int(dry_run))}
        code = run_injected(command, variables)
        found = []
        for path in sorted(Path(folder).glob("*.json")):
            with suppress(BadInput):
                found.append(SpeedUp.load(path))
    return code, max(found, key=lambda one: (one.packed, len(one.done)), default=None)


def hook(module: Any, folder: Path) -> None:
    """Make trainings that begin in a class of `module` faster, and report them in `folder`."""
    place = _METHODS.get(module.__name__)
    kind = getattr(module, place[0], None) if place else None
    if place is None or kind is None or not hasattr(kind, place[1]):
        return
    method = getattr(kind, place[1])
    direct = module.__name__ == "transformers.trainer"

    @wraps(method)
    def begun(self: Any, *args: Any, **kwargs: Any) -> Any:
        for one in [self] if direct else [*args, *kwargs.values()]:
            _take(one, folder, self)
        if os.environ.get(_DRY) == "1" and _reports:
            sys.exit(0)
        return method(self, *args, **kwargs)

    setattr(kind, place[1], begun)


_reports: list[tuple[Any, SpeedUp]] = []
"""Models that were made faster in this process, and what was done."""
_turns: Any = None
"""The `Turns` of this process; it imports torch."""


def _take(trainer: Any, folder: Path, loop: Any) -> None:
    """Make one trainer or model faster; an error of trainfit never ends the script."""
    from torch import nn

    from trainfit.integrations.speeding import apply_speedups
    from trainfit.integrations.unpadding import facts_in

    model = trainer if isinstance(trainer, nn.Module) else getattr(trainer, "model", None)
    if not isinstance(model, nn.Module) or any(one is model for one, _ in _reports):
        return
    names = [name for name in os.environ.get(_NAMES, "").split(",") if name]
    try:
        found = apply_speedups(trainer, names)
    except Exception as error:  # noqa: BLE001 the script goes on as it is
        found = SpeedUp(left=(f"faster ({type(error).__name__}: {error})",))
    if not _reports:
        atexit.register(_report, folder / f"{os.getpid()}.json")
    _reports.append((model, found))
    _begin_turns(facts_in(model), loop)


def _begin_turns(facts: Any, loop: Any) -> None:
    global _turns
    from trainfit.integrations.turns import Turns

    _turns = _turns or Turns()
    _turns.begin(facts, lambda: steps_left(loop))


def steps_left(loop: Any) -> int | None:
    """Return the optimizer steps that a trainer of transformers or Lightning has still to go."""
    try:
        if hasattr(loop, "estimated_stepping_batches"):
            return max(0, int(loop.estimated_stepping_batches) - int(loop.global_step))
        total = int(loop.state.max_steps)
        return max(0, total - int(loop.state.global_step)) if total > 0 else None
    except Exception:  # noqa: BLE001 loops without an end, and those that do not say
        return None


def _report(path: Path) -> None:
    """Write down what was done, with the batches of all models."""
    from trainfit.integrations.unpadding import facts_in

    facts = [one for model, _ in _reports for one in facts_in(model)]
    graphs = [one.graphs for one in facts if one.graphs is not None]
    first = max((found for _, found in _reports), key=lambda one: len(one.done))
    replayed = sum(one.replayed for one in graphs)
    done, left = first.done, first.left
    if graphs and not replayed:
        why = {reason for one in graphs for reason in one.said} or {"no size came twice"}
        done = tuple(one for one in done if one != GRAPHS)
        left = (*left, f"{GRAPHS} ({'; '.join(sorted(why))})")
    blocks = [one.blocks for one in graphs if one.blocks is not None]
    if blocks and _turns and not any(one.on for one in blocks):
        done = tuple(one for one in done if one != COMPILED)
        if _turns.compiled is None:
            left = (*left, f"{COMPILED} ({_turns.uncompiled})")
    times = {
        name: gain.times if _turns and (gain := getattr(_turns, name)) else None
        for name in ("alone", "added", "compiled")
    }
    gain = _turns.gain if _turns else None
    with suppress(OSError):  # the folder goes with the command
        replace(
            first,
            done=done,
            left=left,
            packed=sum(one.packed for one in facts),
            own=sum(one.own_way for one in facts),
            real=sum(one.real for one in facts),
            padded=sum(one.padded for one in facts),
            replayed=replayed,
            times=gain.times if gain else None,
            error=gain.error if gain else 0.0,
            **times,
        ).save(path)
