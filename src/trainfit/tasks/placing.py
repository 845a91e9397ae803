"""Where a new model's weights are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

Built = TypeVar("Built", bound=nn.Module)


def on_device(device: str | torch.device, build: Callable[[], Built]) -> Callable[[], Built]:
    """Build where it will train: to make up a billion weights on a CPU takes half a minute."""

    def built() -> Built:
        with torch.device(device):
            return build()

    return built
