"""What a training step takes of a GPU's memory, found without the GPU.

The task's own step runs twice on fake tensors (the optimizer's state exists only in the second)
and the log of its allocations is replayed through the allocator. This changes torch for the whole
process, so it happens in a child: `estimate` starts one, gives it the task by its import path,
and reads the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from trainfit import codec
from trainfit.catalogue import GpuSpec, find
from trainfit.errors import BadInput, RunFailed, TrainfitWarning
from trainfit.records import MemoryEstimate, TaskSpec

GIB = 1024**3
_SECONDS = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One question for the child."""

    task: TaskSpec
    sm_count: int
    compute_capability: str
    capacity: int
    """Bytes that may be reserved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the child found, in bytes, or why it could not."""

    weights: int = 0
    gradients: int = 0
    """Of all that is trained; they are all there at the end of the backward pass."""
    optimizer: int = 0
    inputs: int = 0
    workspace: int = 0
    activations: int = 0
    """At the peak, beside everything above that is there then."""
    peak_allocated: int = 0
    peak_reserved: int = 0
    fits: bool = False
    unknown: dict[str, int] | None = None
    """Values that the step asked of a tensor and that were not known, by operation."""
    error: str | None = None


def estimate(
    task: TaskSpec | str,
    gpu: GpuSpec | str,
    capacity_gib: float | None = None,
    **arguments: Any,
) -> MemoryEstimate:
    """The memory of a step on a GPU of the catalogue, which need not be here.

    `task` names a function, as module:function, that takes `arguments` and returns a model, built
    on torch's default device, and a function that makes the step from it: `build(**arguments) ->
    (model, make_step)`. `make_step(model)` returns a callable that does one whole optimizer step
    on CPU tensors, as the real one does on the GPU's.
    """
    if isinstance(task, str):
        task = TaskSpec(factory=task, arguments=arguments)
    elif arguments:
        names = ", ".join(arguments)
        raise BadInput(f"{names} beside a TaskSpec would be ignored", "put them into its arguments")
    return estimate_all([task], find(gpu) if isinstance(gpu, str) else gpu, capacity_gib)[0]


def estimate_all(
    tasks: Sequence[TaskSpec], gpu: GpuSpec, capacity_gib: float | None = None
) -> list[MemoryEstimate]:
    """The memory of several tasks, in one child process."""
    capacity = gpu.memory_gib if capacity_gib is None else capacity_gib
    if not capacity > 0:
        raise BadInput(
            f"capacity_gib is {capacity_gib}", "give the memory that may be used, in GiB"
        )
    requests = [
        Request(
            task=task,
            sm_count=gpu.sm_count,
            compute_capability=gpu.compute_capability,
            capacity=int(capacity * GIB),
        )
        for task in tasks
    ]
    return [_estimate(answer, gpu, capacity) for answer in ask(requests)]


def ask(requests: Sequence[Request]) -> list[Answer]:
    """Have a child answer; its answers come in the order of the requests."""
    lines = "".join(codec.dumps(request, indent=None) + "\n" for request in requests)
    # What the parent can import, the child must find too.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    child = subprocess.run(
        [sys.executable, "-m", "trainfit.planning.child"],
        input=lines,
        capture_output=True,
        text=True,
        timeout=_SECONDS * len(requests),
        env=environment,
        check=False,
    )
    answers = [codec.loads(Answer, line, "the estimator") for line in child.stdout.splitlines()]
    if len(answers) != len(requests):
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise RunFailed(f"the estimator died ({last})", "estimate a smaller batch, and report it")
    return answers


def _estimate(answer: Answer, gpu: GpuSpec, capacity: float) -> MemoryEstimate:
    if answer.error is not None:
        raise RunFailed(f"cannot estimate: {answer.error}", "measure a real step instead")
    if answer.unknown:
        asked = ", ".join(f"{name} ({count})" for name, count in answer.unknown.items())
        text = f"the step asked for values that are not known, and zero was taken: {asked}"
        warnings.warn(text, TrainfitWarning, stacklevel=4)
    return MemoryEstimate(
        weights_gib=answer.weights / GIB,
        gradients_gib=answer.gradients / GIB,
        optimizer_gib=answer.optimizer / GIB,
        activations_gib=answer.activations / GIB,
        workspace_gib=answer.workspace / GIB,
        peak_allocated_gib=answer.peak_allocated / GIB,
        peak_reserved_gib=answer.peak_reserved / GIB,
        capacity_gib=capacity,
        fits=answer.fits,
        error_percent=recorded_error(gpu.compute_capability),
    )


def recorded_error(compute_capability: str) -> float | None:
    """The largest error of peak allocated memory seen on that architecture, in percent.

    None where nothing was recorded on it.
    """
    text = resources.files("trainfit.planning").joinpath("recorded.json").read_text()
    recorded: dict[str, Any] = json.loads(text)
    row = recorded["memory"].get(compute_capability)
    return None if row is None else float(row["peak_allocated_percent"])
