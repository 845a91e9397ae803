"""State that a checkpoint holds: weights, optimizer, task and random generators.

Nested state (of an optimizer or a task) is split into JSON data and named tensors, so that nothing
is pickled.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from trainfit.core.errors import BadInput, reason
from trainfit.core.records import Record
from trainfit.engine.optimizer import host_moments, is_adamw
from trainfit.engine.parallel import check_same, local
from trainfit.runs import timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState(Record):
    """States of the random generators that models and tasks use."""

    torch: str
    cuda: str | None
    """State of the run's GPU."""
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]


def take(device: torch.device) -> RandomState:
    """Read the current random state, without waiting for the device."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RandomState(
        torch=torch.get_rng_state().numpy().tobytes().hex(),
        cuda=None if cuda is None else cuda.numpy().tobytes().hex(),
        python=(version, list(words), gauss),
        numpy=(kind, keys.tolist(), *rest),  # type: ignore[union-attr]
    )


def put_back(state: RandomState, device: torch.device) -> None:
    """Restore every generator."""
    torch.set_rng_state(_tensor(state.torch))
    if state.cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(state.cuda), device)
    version, words, gauss = state.python
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state.numpy
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


@contextmanager
def protected(device: torch.device) -> Iterator[None]:
    """Restore the random state after a block."""
    before = take(device)
    try:
        yield
    finally:
        put_back(before, device)


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def flatten(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Turn nested state into JSON data; its tensors are put into `tensors`, named by their path."""
    match state:
        case Tensor():
            return {"tensor": _add(state, name, tensors), "on_cpu": state.device.type == "cpu"}
        case dict():
            if bad := [key for key in state if not isinstance(key, str | int)]:
                raise _unsaved(name, bad[0])
            pairs = [[k, flatten(v, f"{name}/{k}", tensors)] for k, v in state.items()]
            return {"dict": pairs}
        case list() | tuple():
            items = [flatten(v, f"{name}/{n}", tensors) for n, v in enumerate(state)]
            return {"list" if isinstance(state, list) else "tuple": items}
        case float() if not math.isfinite(state):
            return {"float": repr(state)}
        case None | bool() | int() | float() | str():
            return state
    raise _unsaved(name, state)


def _add(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Add a tensor under a free name; a copy where it shares memory, which safetensors refuses."""
    while name in tensors:
        name += "'"
    taken = {other.untyped_storage().data_ptr() for other in tensors.values()}
    shared = tensor.untyped_storage().data_ptr() in taken
    tensors[name] = tensor.detach().clone() if shared else tensor.detach()
    return name


def _unsaved(name: str, value: object) -> BadInput:
    return BadInput(
        f"the state {name} holds a {type(value).__name__}, which a checkpoint cannot keep",
        "keep tensors, numbers, texts, lists and dicts in it",
    )


def unflatten(data: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """Rebuild what `flatten` took apart; tensors that were on a GPU go to `device`."""
    match data:
        case {"tensor": str(name), "on_cpu": bool(on_cpu)}:
            return tensors[name] if on_cpu else tensors[name].to(device)
        case {"dict": list(pairs)}:
            return {key: unflatten(value, tensors, device) for key, value in pairs}
        case {"list": list(items)}:
            return [unflatten(item, tensors, device) for item in items]
        case {"tuple": list(items)}:
            return tuple(unflatten(item, tensors, device) for item in items)
        case {"float": str(text)}:
            return float(text)
    return data


def changes_frozen(task: object) -> bool:
    """Tell whether a task may change weights without gradients, such as an average of others."""
    return bool(getattr(task, "changes_frozen", False))


def model_tensors(model: nn.Module, *, frozen: bool = False) -> dict[str, Tensor]:
    """Trained weights and buffers by name, or all weights; those that are tied appear once."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad or frozen]
    kept = model.state_dict().keys()
    buffers = [(name, b) for name, b in model.named_buffers() if name in kept]
    return {plain_name(name): tensor for name, tensor in [*trained, *buffers]}


def plain_name(name: str) -> str:
    """Remove prefixes of torch.compile and parallel wrappers from a weight's name."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


@timeline.stage("build")
def frozen_checksum(model: nn.Module, task: object = None) -> Future[str | None]:
    """Begin to compute the checksum of the frozen weights; None where all are saved.

    A thread works on them as they are now, wherever the model is moved to meanwhile: gigabytes take
    seconds, and the first checkpoint is the first to need the answer.
    """
    named = model.named_parameters()
    unsaved = () if changes_frozen(task) else named
    frozen = [(plain_name(n), p.detach()) for n, p in unsaved if not p.requires_grad]
    pool = ThreadPoolExecutor(1, "checksum")
    found = pool.submit(_checksum, frozen)
    pool.shutdown(wait=False)
    return found


def _checksum(frozen: list[tuple[str, Tensor]]) -> str | None:
    if not frozen:
        return None
    digest = hashlib.sha256()
    for name, weight in sorted(frozen, key=lambda pair: pair[0]):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def find_nonfinite(model: nn.Module) -> str | None:
    """Name of a weight or buffer with a value that is not finite; None where all are.

    Buffers may hold negative infinities, as masks of attention do. Sums are looked at first, in one
    pass that waits for the device once: a sum is not finite where one of its values is not.
    """
    masks = {name for name, _ in model.named_buffers()}
    named = [*model.named_parameters(), *model.named_buffers()]
    floats = {name: local(t.detach()) for name, t in named if t.is_floating_point() and t.numel()}
    floats = {name: tensor for name, tensor in floats.items() if tensor.numel()}
    sums = [tensor.sum(dtype=torch.float32) for tensor in floats.values()]
    if not sums:
        return None
    finite = torch.stack([each.to(sums[0].device) for each in sums]).isfinite().tolist()
    doubtful = [name for name, fine in zip(floats, finite, strict=True) if not fine]
    for name in doubtful:
        largest = floats[name].amax() if name in masks else floats[name].abs().amax()
        if not largest < math.inf:  # nor is NaN
            return plain_name(name)
    return None


@torch.no_grad()
def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into a model with the same names and shapes."""
    everything = model_tensors(model, frozen=True)
    own = model_tensors(model) | {n: t for n, t in everything.items() if n in tensors}
    check_same({name: tensor.shape for name, tensor in tensors.items()}, own)
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state by the names of the weights."""
    if (host := host_moments(optimizer)) is not None:
        host.settle()
    return {
        f"{plain_name(name)}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], Any]:
    """Tensors of the optimizer's state, and the rest of it as JSON data: None for AdamW."""
    if is_adamw(optimizer):
        return optimizer_tensors(model, optimizer), None
    tensors: dict[str, Tensor] = {}
    return tensors, flatten(optimizer.state_dict(), "optimizer", tensors)


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], tree: Any
) -> None:
    """Restore what `optimizer_state` returned."""
    if (tree is None) is not is_adamw(optimizer):
        kind = type(optimizer).__name__
        raise BadInput(
            f"the checkpoint is of another optimizer than {kind}", "use the optimizer of the run"
        )
    if tree is None:
        _load_adamw(model, optimizer, tensors)
        return
    with _fitting("the optimizer"):
        device = optimizer.param_groups[0]["params"][0].device
        optimizer.load_state_dict(unflatten(tree, tensors, device))


@contextmanager
def _fitting(whose: str) -> Iterator[None]:
    """Convert errors of a block that restores state to BadInput."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        what = f"the checkpoint's state of {whose} does not fit ({reason(error)})"
        raise BadInput(what, "use the configuration of the run") from error


def task_state(task: object) -> tuple[dict[str, Tensor], Any]:
    """Tensors of the task's own state, and the rest of it as JSON data: None where it has none."""
    tensors: dict[str, Tensor] = {}
    if not has_state(task):
        return tensors, None
    return tensors, flatten(cast(Any, task).state_dict(), "task", tensors)


def has_state(task: object) -> bool:
    """Tell whether a task has state_dict and load_state_dict."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(task, name, None)) for name in names)


def load_task_state(
    task: object, tensors: Mapping[str, Tensor], tree: Any, device: torch.device
) -> None:
    """Restore what `task_state` returned, where the task has a state."""
    if not has_state(task):
        return
    if tree is None:
        raise BadInput("the checkpoint has no state of the task", "use the task of the run")
    with _fitting("the task"):
        cast(Any, task).load_state_dict(unflatten(tree, tensors, device))


@torch.no_grad()
def _load_adamw(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    for name, tensor in optimizer_tensors(model, optimizer).items():
        saved = tensors.get(name)
        if saved is None or saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            raise BadInput(
                f"the checkpoint's state of the optimizer does not fit, in {name}",
                "use the configuration of the run",
            )
        tensor.copy_(saved)
