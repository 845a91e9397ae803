"""Autocast by device, and loss scaling for fp16 alone.

bf16 has the range of fp32 and needs no scaling; fp16 has not, and small gradients would vanish.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from trainfit.records import Precision

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE = 2.0**16
_GROW_AFTER = 2000


def autocast(device_type: str, precision: Precision) -> AbstractContextManager[object]:
    """What the forward pass runs in."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type, dtype=_HALF[precision])


class LossScale:
    """The factor on an fp16 loss: halved when gradients overflow, doubled after a long quiet.

    It follows torch's GradScaler, but decides by the norm that clipping computes anyway, stays on
    the device with any optimizer, and a step can be taken again from its beginning.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.factor = torch.tensor(_FIRST_SCALE, device=device)
        self.quiet_steps = torch.tensor(0.0, device=device)

    def follow(self, finite: Tensor) -> None:
        """Take note of a step whose gradients were `finite`, or not."""
        quiet = torch.where(finite, self.quiet_steps + 1, 0.0)
        grows = quiet >= _GROW_AFTER
        self.factor = self.factor * torch.where(finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.quiet_steps = torch.where(grows, 0.0, quiet)


def loss_scale(precision: Precision, device: torch.device | str) -> LossScale | None:
    """The scaling that `precision` needs: fp16 alone."""
    return LossScale(device) if precision == "fp16" else None
