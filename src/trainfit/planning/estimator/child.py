"""Child process that runs a step on fake tensors: one request per line of standard input."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TextIO

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_iter

from trainfit.core import codec
from trainfit.core.errors import BadInput, TrainfitError, in_one_line, user_line
from trainfit.core.libraries import hide_unused, unhide
from trainfit.kernels.quantized import count_weights
from trainfit.planning.estimator import compiled_steps, fake_cuda
from trainfit.planning.estimator.allocator import Event, replay
from trainfit.planning.estimator.estimate import PROBES, Answer, Request, Room, was_handed_over
from trainfit.planning.estimator.kernel_buffers import Device
from trainfit.planning.estimator.meta_device import on_meta, pretrained_by_config
from trainfit.planning.estimator.quick_fakes import QuickFakes
from trainfit.planning.estimator.recorder import HANDLES, Recorder
from trainfit.planning.estimator.step_time import Done
from trainfit.planning.estimator.step_work import make_fake

Step = Callable[[], Any]
_SPARSE = "or measure a real step: what they take depends on values"
_REFUSED = {
    "devices, meta and": (
        "the step uses a tensor that was made beside the model",
        "make it inside of make_step",
    ),
    "SparseTensorImpl": (
        "the step makes sparse tensors",
        f"use dense ones, as by sparse=False, {_SPARSE}",
    ),
    "self.shape_env must": (
        "the step makes nested tensors",
        f"use padded ones, {_SPARSE}",
    ),
    "item() cannot be called on meta": (
        "the constructor reads a value of a tensor that has none",
        "compute it without tensors of random values, or measure a real step",
    ),
}
"""What is refused with a fix, by a sign in torch's message."""
_CRUMBS, _FEW = 1 << 16, 8
"""Bytes and storages too small to matter, such as the factor on an fp16 loss."""
_NO_META = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def main(answers: TextIO | None = None) -> None:
    """Answer every request; nothing else may print to standard output.

    In place of the first request, a task may take over the process, whose torch is as it was.
    """
    if answers is None:
        answers, sys.stdout = sys.stdout, sys.stderr
    for number, line in enumerate(iter(sys.stdin.readline, "")):
        if number == 0:
            if was_handed_over(line):
                return
            fake_cuda.install()
            compiled_steps.install()
            gc.disable()  # a step frees by counting references
        told = answer(codec.loads(Request, line))
        print(codec.dumps(told, indent=None), file=answers, flush=True)
        if number:
            gc.collect()
        gc.freeze()  # modules and caches: to look for garbage among them takes longer than a step


def answer(request: Request) -> Answer:
    """Run the task's step on fakes and replay its allocations."""
    try:
        with pretrained_by_config():
            return _run(request)
    except _NO_META as error:
        return Answer(error=f"{error.func} gives no shape without values")
    except BadInput as error:
        return Answer(refused=(error.what, error.fix))
    except TrainfitError as error:
        return Answer(error=str(error))
    except (Exception, SystemExit) as error:
        if os.environ.get("TRAINFIT_TRACEBACK"):
            raise
        at = user_line(error)
        told = f"the step fails on fake tensors, {in_one_line(error)}"
        for sign, (what, fix) in _REFUSED.items():
            if sign in told:
                return Answer(refused=(what, f"{fix} ({at})" if at else fix))
        return Answer(error=f"{told} (at {at})" if at else told)


def _check_arguments(build: Callable[..., Any], given: dict[str, Any], factory: str) -> None:
    """Raise BadInput for arguments that the function does not take."""
    try:
        inspect.signature(build).bind(**given)
    except TypeError as error:
        raise BadInput(f"{factory} does not take what was given: {error}", "see its def") from None


def _run(request: Request) -> Answer:
    if request.task.factory.startswith(PROBES):
        hide_unused()
    else:
        unhide()
    build = request.task.function()
    compiled_steps.traced_blocks.clear()
    _check_arguments(build, request.task.arguments, request.task.factory)
    with on_meta(), fake_cuda.OnOneDevice("meta"):
        built = build(**request.task.arguments)
        model, make_step = checked_pair(built, request.task.factory)
    _check_sizes(model)
    fake_cuda.hide_tracing()
    tie = getattr(model, "tie_weights", None)  # transformers leaves it to the initialisation
    if callable(tie):
        tie()
    mode = QuickFakes()
    beside = make_fake(model, mode)
    devices = [Device(t.sm_count, t.compute_capability) for t in request.targets]
    recorder = Recorder(devices, mode)
    watched = _watched_updates(recorder)
    with mode, recorder, watched, _optimizers() as optimizers, fake_cuda.OnOneDevice("cpu"):
        recorder.follow([*model.parameters(), *model.buffers(), *beside])
        recorder.watch_gradients(model.parameters())
        step = _callable(make_step(model))
        before = recorder.length
        recorder.work.clear()  # making the optimizer's state is not part of a step
        step()
        repeated = _repeated(recorder.events(since=before))
        if repeated is None:  # the first step made something that stays, the second does not
            recorder.work.clear()
            step()
    kept = [*model.parameters(), *model.buffers()]
    weights = sum(_storages(kept).values())
    state = _state_bytes(optimizers, kept, recorder)
    found = _answer(request, recorder, weights, state, repeated or set())
    # The weights that peft added, by the names that it gives them.
    adapters = [weight for name, weight in model.named_parameters() if "lora_" in name]
    added = sum(weight.nbytes for weight in adapters)
    return replace(
        found,
        weights=weights - added,
        adapters=added,
        parameters=count_weights(model) - sum(weight.numel() for weight in adapters),
        family=_family(model),
        compiled=dict(compiled_steps.traced_blocks),
    )


def checked_pair(built: Any, factory: str) -> tuple[torch.nn.Module, Callable[..., Any]]:
    """Return the model and make_step, or raise BadInput if the factory returned anything else."""
    pair = isinstance(built, tuple) and len(built) == 2
    if not pair or not isinstance(built[0], torch.nn.Module) or not callable(built[1]):
        raise BadInput(
            f"{factory} returned {_kind(built)}, not a model and a function that makes its step",
            "return model, make_step, where make_step(model) returns a function of one whole step",
        )
    model, make_step = built
    return model, make_step


def _check_sizes(model: torch.nn.Module) -> None:
    """Raise BadInput for lazy layers that do not know their sizes."""
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(weight):
            fix = "give the layer its sizes, or call the model once before it is returned"
            raise BadInput(f"the size of {name} is not known yet: its layer is lazy", fix)


def _callable(step: Any) -> Step:
    if not callable(step):
        fix = "return a function without arguments that does one whole optimizer step"
        raise BadInput(f"make_step returned {_kind(step)}, not a function", fix)
    called: Step = step
    return called


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


def _family(model: torch.nn.Module) -> str:
    """Architecture by transformers' model type or trainfit's class, or an empty string."""
    modules = list(model.modules())
    if any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in modules):
        return ""
    if not all(weight.is_floating_point() for weight in model.parameters()):
        return ""  # no step with quantized weights was recorded
    types = [getattr(getattr(module, "config", None), "model_type", None) for module in modules]
    own = [type(m).__name__ for m in modules if type(m).__module__.startswith("trainfit.")]
    return next((str(name) for name in [*types, *own] if name), "")


def _repeated(step: list[Event]) -> set[int] | None:
    """Names that a step allocates and frees; None if it keeps or frees more than crumbs.

    cuBLAS takes the workspaces that it keeps in the first step.
    """
    taken = {name: size for name, size in step if size >= 0}
    freed = {name for name, size in step if size < 0}
    left = sorted(size for name, size in taken.items() if name not in freed)
    crumbs = sum(left[:-HANDLES]) <= _CRUMBS and len(freed - taken.keys()) <= _FEW
    return freed & taken.keys() if crumbs else None


@contextmanager
def _optimizers() -> Iterator[list[torch.optim.Optimizer]]:
    """Yield the list of the optimizers that the block makes."""
    made: list[torch.optim.Optimizer] = []
    plain = torch.optim.Optimizer.__init__

    def noting(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        made.append(self)

    torch.optim.Optimizer.__init__ = noting  # type: ignore[method-assign]
    try:
        yield made
    finally:
        torch.optim.Optimizer.__init__ = plain  # type: ignore[method-assign]


@contextmanager
def _watched_updates(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder when an optimizer updates; a closure computes a loss meanwhile."""

    def begin(_optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.updating = not any((*args[1:], *kwargs.values()))

    def end(*_: object) -> None:
        recorder.updating = False

    before, after = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _state_bytes(
    optimizers: list[torch.optim.Optimizer], kept: list[torch.Tensor], recorder: Recorder
) -> int:
    """Bytes of optimizers' state and of their copies of weights in another precision."""
    weights = _storages(kept)
    held = (
        (dict(each.state), each.param_groups, getattr(each, "moment_slots", []))
        for each in optimizers
    )
    found = [t for t in tree_iter(list(held)) if isinstance(t, torch.Tensor)]
    state = _storages(t for t in found if not recorder.is_elsewhere(t))
    return sum(nbytes for key, nbytes in state.items() if key not in weights)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of the storages behind tensors, each once."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in found}


def _answer(
    request: Request, recorder: Recorder, weights: int, optimizer: int, repeated: set[int]
) -> Answer:
    held = weights + optimizer
    inputs = recorder.live_bytes - held - recorder.workspace_bytes(0) - recorder.live_gradients
    rooms = []
    for at, target in enumerate(request.targets):
        events = recorder.events(at)
        events += [event for event in events if event[0] in repeated]
        free = replay(events)
        workspace = recorder.workspace_bytes(at)
        beside = held + inputs + workspace + recorder.gradients_at_peak
        rooms.append(
            Room(
                workspace=workspace,
                activations=max(0, free.peak_allocated - beside),
                peak_allocated=free.peak_allocated,
                peak_reserved=free.peak_reserved,
                fits=free.peak_reserved <= target.capacity
                or replay(events, capacity=target.capacity).fits,
            )
        )
    return Answer(
        weights=weights,
        gradients=recorder.gradient_bytes,
        optimizer=optimizer,
        inputs=inputs,
        rooms=tuple(rooms),
        done=tuple(Done(work=work, times=times) for work, times in recorder.work.items()),
        unknown=dict(recorder.unknown),
        masks=recorder.masks,
    )
