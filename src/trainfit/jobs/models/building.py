"""Where and how a model is built: on a device, on the CPU, or as fake tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from trainfit.core.plan_records import Plan
from trainfit.planning.estimator.step_work import make_fake

Place = str | torch.device
ModuleT = TypeVar("ModuleT", bound=nn.Module)


def birthplace(plan: Plan, device: Place) -> Place:
    """Return the device to build on: the CPU for a model that is too large for one GPU."""
    return "cpu" if plan.sharding != "none" else device


def on_device(device: Place, build: Callable[[], ModuleT]) -> Callable[[], ModuleT]:
    """Return `build` on a device; to draw a billion random weights on a CPU takes half a minute."""

    def built() -> ModuleT:
        with torch.device(device):
            return build()

    return built


def build_anywhere(build: Callable[[], ModuleT]) -> ModuleT:
    """Call `build`; under fake tensors, build on the meta device and make the result fake."""
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
