"""The loss of a GPT, at once or a chunk of tokens at a time.

All logits in float32 are the largest tensor of a small GPT. A chunk's logits exist only until its
gradients are computed, which is at once and in the forward pass: the loss is a sum, so its gradient
is known up to a factor before the backward pass brings it, and nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfit.kernels.cross_entropy import IGNORED, loss_and_slopes

_EVALUATED = 8192
"""Tokens at a time where no gradient is wanted: more would only take memory."""


class SummedLoss(nn.Module):
    """Cross-entropy summed over tokens; a module, so that it can be compiled by itself."""

    def __init__(self, chunk: int | None = None) -> None:
        """So many tokens at a time; None: all at once."""
        super().__init__()
        self.chunk = chunk

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        chunk = self.chunk
        if not torch.is_grad_enabled():
            chunk = min(chunk or _EVALUATED, _EVALUATED)
        return summed_cross_entropy(hidden, weight, targets, chunk)


def summed_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None
) -> Tensor:
    """The loss of `hidden` `[N, width]` against `targets` `[N]` with the output layer `weight`.

    With `chunk`, the logits of only so many tokens exist at a time.
    """
    if chunk is None:
        return _sum(functional.linear(hidden, weight), targets)
    if not torch.is_grad_enabled():
        parts = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
        return torch.stack([_sum(functional.linear(h, weight), t) for h, t in parts]).sum()
    total: Tensor = _Chunked.apply(hidden, weight, targets, chunk)  # type: ignore[no-untyped-call]
    return total


def _sum(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(_wide(logits), targets, reduction="sum", ignore_index=IGNORED)


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at the least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _Chunked(torch.autograd.Function):
    """Loss and gradients of a chunk, then of the next."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        kind = hidden.device.type
        narrow = hidden.dtype
        if torch.is_autocast_enabled(kind):
            narrow = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            matrix = weight.to(narrow)
            of_weight = torch.zeros_like(_wide(weight))
            of_hidden, sums = [], []
            for part, wanted in zip(
                torch.split(hidden, chunk), torch.split(targets, chunk), strict=True
            ):
                given = part.to(narrow)
                loss, slopes = loss_and_slopes(given @ matrix.t(), wanted)
                sums.append(loss)
                of_hidden.append(slopes @ matrix)
                of_weight += slopes.t() @ given
        ctx.save_for_backward(torch.cat(of_hidden), of_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        first, second = ctx.dtypes
        return (of_hidden * factor).to(first), (of_weight * factor).to(second), None, None
