"""Where a new model's weights are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from trainfit.core.plan_records import Plan

Device = str | torch.device
Built = TypeVar("Built", bound=nn.Module)


def birthplace(plan: Plan, device: Device) -> Device:
    """The run's device; the CPU for a model that no GPU has room for."""
    return "cpu" if plan.sharding == "fsdp" else device


def on_device(device: Device, build: Callable[[], Built]) -> Callable[[], Built]:
    """Build where it will train: to make up a billion weights on a CPU takes half a minute."""

    def built() -> Built:
        with torch.device(device):
            return build()

    return built
