"""The loss of some logits and its gradient by them, together and in one pass.

`cross_entropy_triton` has the kernel, for half precision on a GPU; the formula is for all else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainfit.kernels.varlen import in_half_on_gpu, triton_takes

IGNORED = -100
"""A target that counts nothing."""


def loss_and_slopes(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of `logits` `[N, classes]`, and its gradient by them, alike."""
    if in_half_on_gpu(logits):
        losses, slopes = half_losses_and_slopes(logits, targets)
    else:
        losses, slopes = by_formula(logits, targets)
    return losses.sum(), slopes


@torch.library.custom_op("trainfit::half_losses_and_slopes", mutates_args=())
def half_losses_and_slopes(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row in float32, and the gradient of their sum by the logits."""
    if not triton_takes(logits):
        return by_formula(logits, targets)
    from trainfit.kernels import cross_entropy_triton

    return cross_entropy_triton.losses_and_slopes(logits, targets)


@half_losses_and_slopes.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(targets.shape, dtype=torch.float32)
    return losses, torch.empty_like(logits, memory_format=torch.contiguous_format)


def by_formula(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same in a few operations, which torch.compile can join."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = (targets != IGNORED)[:, None]
    places = targets.clamp_min(0)[:, None]
    normaliser = wide.logsumexp(-1, keepdim=True)
    losses = (normaliser - wide.gather(-1, places)) * counts
    chosen = torch.arange(wide.shape[-1], device=wide.device) == places
    slopes = ((wide - normaliser).exp() - chosen.to(wide.dtype)) * counts
    return losses[:, 0], slopes.to(logits.dtype)
