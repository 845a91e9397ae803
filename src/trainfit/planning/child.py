"""The process in which a step runs on fake tensors: questions on standard input, one line each."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from trainfit import codec
from trainfit.errors import BadInput, TrainfitError
from trainfit.planning import fake_cuda
from trainfit.planning.allocator import replay
from trainfit.planning.fakes import make_fake
from trainfit.planning.memory import Answer, Request
from trainfit.planning.recorder import Recorder
from trainfit.planning.temporaries import Device

Step = Callable[[], Any]
_NO_META = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def main() -> None:
    """Answer every question on standard input; nothing else may print to standard output."""
    answers, sys.stdout = sys.stdout, sys.stderr
    fake_cuda.install()
    for line in sys.stdin:
        print(
            codec.dumps(answer(codec.loads(Request, line)), indent=None), file=answers, flush=True
        )


def answer(request: Request) -> Answer:
    """Run the task's step on fakes and replay what it allocated."""
    try:
        return _run(request)
    except _NO_META as error:
        return Answer(error=f"{error.func} gives no shape without values")
    except TrainfitError as error:
        return Answer(error=str(error))
    except Exception as error:
        if os.environ.get("TRAINFIT_TRACEBACK"):
            raise
        return Answer(
            error=f"the step fails on fake tensors, {type(error).__name__}: {_first_line(error)}"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _run(request: Request) -> Answer:
    build = _load(request.task.factory)
    with torch.device("meta"), _no_initialisation():
        model, make_step = build(**request.task.arguments)
    tie = getattr(model, "tie_weights", None)  # transformers leaves it to the initialisation
    if callable(tie):
        tie()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    make_fake(model, mode)
    recorder = Recorder(Device(request.sm_count, request.compute_capability))
    with mode, recorder:
        weights = recorder.follow([*model.parameters(), *model.buffers()])
        recorder.watch_gradients(model.parameters())
        step: Step = make_step(model)
        inputs = recorder.live_bytes - weights
        step()
        step()
    return _answer(request, recorder, weights, inputs)


def _answer(request: Request, recorder: Recorder, weights: int, inputs: int) -> Answer:
    free = replay(recorder.events)
    capped = replay(recorder.events, capacity=request.capacity)
    workspace = recorder.workspace_bytes
    optimizer = recorder.live_bytes - weights - inputs - workspace
    held = weights + inputs + workspace + optimizer + recorder.gradients_at_peak
    return Answer(
        weights=weights,
        gradients=recorder.gradient_bytes,
        optimizer=optimizer,
        inputs=inputs,
        workspace=workspace,
        activations=max(0, free.peak_allocated - held),
        peak_allocated=free.peak_allocated,
        peak_reserved=free.peak_reserved,
        fits=capped.fits,
        unknown=dict(recorder.unknown),
    )


def _load(path: str) -> Callable[..., tuple[torch.nn.Module, Callable[[torch.nn.Module], Step]]]:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(f"cannot load {path!r} ({error})", "give it as module:function") from None
    return found  # type: ignore[no-any-return]


def _no_initialisation() -> Any:
    """Weights need no values here, and some ways to make them up fail on fakes."""
    from transformers.initialization import no_init_weights

    return no_init_weights()


if __name__ == "__main__":
    main()
