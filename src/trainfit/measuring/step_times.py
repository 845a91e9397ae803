"""Child process that times a job's step on the CPU in each precision, and then serves estimates.

The step is cut down to about a tenth of a second: fewer layers, then fewer tokens. Both precisions
take turns, and the best time of each counts, so that other processes disturb little.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from trainfit.core.libraries import hide_unused, unhide
from trainfit.core.plan_records import Precision, RuntimeSettings, TaskSpec
from trainfit.hardware.detection import try_bf16
from trainfit.hardware.host import load, memory_left
from trainfit.planning.cpu_choice import StepRequest, StepTime, StepTimes
from trainfit.planning.estimator.estimate import PROBES, was_handed_over
from trainfit.runtime import applied

Step = Callable[[], object]
_FLOPS = 1e10
"""Operations of a step to time: about a tenth of a second on two cores."""
_LEAST_TOKENS = 64
"""Minimum tokens of the timed step; products of fewer are unlike a real step's."""
_SAMPLE_TOKENS = 16
_SECONDS, _FEWER_SECONDS = 0.4, 0.1
_MOST_SAMPLES = 30
_SHORT = 0.05
"""Seconds from which on a step has work for every thread."""
_IDLE = 0.5
"""Load per core up to which several threads are timed.

On a busier machine they wait for one another, so one thread is timed, by its CPU seconds.
"""
_COPIES = 12
"""Weights, gradients and two moments in each precision, and half as much for activations."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


def main() -> None:
    """Answer the request in the first line of standard input, and then those of the estimator.

    Nothing else may print to standard output.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    try_bf16()
    _import_ahead(sys.argv[1:])
    line = sys.stdin.readline()
    if was_handed_over(line):
        return
    request = StepRequest.from_json(line)
    if request.factory.startswith(PROBES) and request.arguments.get("quantization") == "none":
        hide_unused()
    else:
        unhide()
    gc.freeze()  # what was imported is no garbage
    gc.enable()
    print(time_steps(request).to_json(indent=None), file=answers, flush=True)
    from trainfit.planning.estimator import child  # the answer waits for no import

    child.main(answers)


def _import_ahead(modules: Sequence[str]) -> None:
    """Import the libraries that a request needs, before it comes."""
    hide_unused()
    for name in modules:
        import_module(name)


def time_steps(request: StepRequest) -> StepTimes:
    """Find the best time in each precision, also with fewer threads for a short step."""
    if not _has_room(request):
        return StepTimes(error="a layer is too large for the memory that is free")
    usual, *fewer = request.threads
    idle = load() <= _IDLE * usual
    depth, rows, width = _cut_down(request)
    steps = {p: _build(request, p, depth, rows, width) for p in _PRECISIONS}
    times = _best(steps, usual if idle else 1, _SECONDS)
    if idle and min(t.seconds for t in times) < _SHORT:
        for count in fewer:
            times += _best(steps, count, _FEWER_SECONDS)
    return StepTimes(times=tuple(times))


def _has_room(request: StepRequest) -> bool:
    """Check that a layer fits in each precision, with gradients and optimizer state."""
    with torch.device("meta"):
        model, _ = _model(request, "fp32", 1, 1, 1)
    nbytes = 4 * sum(weight.numel() for weight in model.parameters())
    return bool(_COPIES * nbytes < memory_left())


def _cut_down(request: StepRequest) -> tuple[int, int, int]:
    """Choose layers, rows and width for about _FLOPS operations."""
    sample = min(_SAMPLE_TOKENS, request.width)
    with FlopCounterMode(display=False) as counter:
        _build(request, "fp32", 1, 1, sample)()
    per_token = max(1.0, counter.get_total_flops() / sample)
    tokens = request.rows * request.width
    depth = int(_FLOPS / (per_token * tokens))
    if depth >= 1:
        return min(depth, request.layers), request.rows, request.width
    tokens = max(_LEAST_TOKENS, int(_FLOPS / per_token))
    width = min(request.width, tokens)
    return 1, max(1, min(request.rows, tokens // width)), width


def _build(request: StepRequest, precision: Precision, depth: int, rows: int, width: int) -> Step:
    model, make_step = _model(request, precision, depth, rows, width)
    model.train()
    step: Step = make_step(model)
    return step


def _model(
    request: StepRequest, precision: Precision, depth: int, rows: int, width: int
) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], Step]]:
    """Build the model, and the function that makes its step."""
    arguments: dict[str, Any] = request.arguments | {
        "precision": precision,
        "depth": depth,
        "rows": rows,
        "width": width,
        "micro_batches": 1,
        "checkpointing": "none",
        "slots": None,
        "lengths": None,
    }
    if request.half_weights:
        arguments["dtype"] = _DTYPES[precision]
    task = TaskSpec(factory=request.factory, arguments=arguments)
    made: tuple[torch.nn.Module, Callable[[torch.nn.Module], Step]] = task.function()(**arguments)
    return made


def _best(steps: Mapping[Precision, Step], threads: int, seconds: float) -> list[StepTime]:
    clock = time.process_time if threads == 1 else time.perf_counter
    best = dict.fromkeys(steps, float("inf"))
    with applied(RuntimeSettings(num_threads=threads)):
        for step in steps.values():
            step()  # kernels are made, and the optimizer's state
        deadline = time.perf_counter() + seconds
        for _ in range(_MOST_SAMPLES):
            for precision, step in steps.items():
                started = clock()
                step()
                best[precision] = min(best[precision], clock() - started)
            if time.perf_counter() > deadline:
                break
    return [StepTime(precision=p, threads=threads, seconds=s) for p, s in best.items()]


if __name__ == "__main__":
    main()
