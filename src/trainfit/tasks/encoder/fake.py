"""Building on tensors without values, as the planner does, with libraries that look at values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def build_anywhere(build: Callable[[], ModuleT]) -> ModuleT:
    """What `build` returns; under fake tensors, built on the meta device and made fake after.

    A truncated normal looks at what it drew, and peft moves modules in a way that fake tensors do
    not take; the meta device does both.
    """
    if detect_fake_mode() is None:
        return build()
    with unset_fake_temporarily(), torch.device("meta"):
        model = build()
    _make_fake(model)
    return model


def unscript(model: nn.Module) -> None:
    """Replace TorchScript functions in the module of `model` by the Python they were made from.

    The results are the same; TorchScript cannot run on fake tensors.
    """
    module = sys.modules[type(model).__module__]
    for name, function in list(vars(module).items()):
        if isinstance(function, torch.jit.ScriptFunction):
            setattr(module, name, getattr(function, "_torchdynamo_inline", function))


def _make_fake(model: nn.Module) -> None:
    """Give every tensor of a meta model a fake one on the default device; shared ones stay so."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            # Not empty_like: a fake mode takes no argument that is not fake.
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_weight = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
        return made[id(tensor)]

    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                store[name] = None if tensor is None else fake(tensor)  # type: ignore[assignment]
