"""Building on tensors without values, as the planner does, with libraries that look at values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from trainfit.planning.fakes import make_fake

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def build_anywhere(build: Callable[[], ModuleT]) -> ModuleT:
    """What `build` returns; under fake tensors, built on the meta device and made fake after."""
    mode = detect_fake_mode()
    if mode is None:
        return build()
    with unset_fake_temporarily(), torch.device("meta"):
        model = build()
    make_fake(model, mode)
    return model


def unscript(model: nn.Module) -> None:
    """Replace TorchScript functions in the module of `model` by the Python they were made from.

    The results are the same; TorchScript cannot run on fake tensors.
    """
    module = sys.modules[type(model).__module__]
    for name, function in list(vars(module).items()):
        if isinstance(function, torch.jit.ScriptFunction):
            setattr(module, name, getattr(function, "_torchdynamo_inline", function))
