"""The Triton kernel of the cross-entropy: a program per row, which reads its logits twice.

The second time they are still in the GPU's cache, where all rows that run at a time have room.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 16384, 16
"""Logits at a time, and the warps that share them."""


def losses_and_slopes(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row in float32, and the gradient of their sum by the logits."""
    rows, classes = logits.shape
    slopes = torch.empty_like(logits, memory_format=torch.contiguous_format)
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _row[(rows,)](
            logits,
            targets,
            slopes,
            losses,
            logits.stride(0),
            classes,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return losses, slopes


@triton.jit
def _scaled(logits, at, classes):
    """Logits as exponents of two."""
    x = tl.load(logits + at, mask=at < classes, other=-float("inf"))
    return x.to(tl.float32) * 1.4426950408889634


@triton.jit
def _row(logits, targets, slopes, losses, stride, classes, BLOCK: tl.constexpr):
    """The sum of exponentials, then each one's share of it.

    They are measured from the largest logit of the first block, which float32 has room for unless
    another is larger by 127; then the largest of all is looked for.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    slopes += row * classes
    target = tl.load(targets + row)
    place = tl.arange(0, BLOCK)
    first = _scaled(logits, place, classes)
    most = tl.max(first, 0)
    sums = tl.exp2(first - most)
    for start in range(BLOCK, classes, BLOCK):
        sums += tl.exp2(_scaled(logits, start + place, classes) - most)
    total = tl.sum(sums, 0)
    if total == float("inf"):
        for start in range(BLOCK, classes, BLOCK):
            most = tl.maximum(most, tl.max(_scaled(logits, start + place, classes), 0))
        total = 0.0
        for start in range(0, classes, BLOCK):
            total += tl.sum(tl.exp2(_scaled(logits, start + place, classes) - most), 0)
    normaliser = most + tl.log2(total)
    counts = target >= 0
    subtracted = tl.where(counts, normaliser, float("inf"))  # a row that does not count: all 0
    for start in range(0, classes, BLOCK):
        at = start + place
        slope = tl.exp2(_scaled(logits, at, classes) - subtracted)
        tl.store(slopes + at, slope.to(slopes.dtype.element_ty), mask=at < classes)
    wanted = _scaled(logits, tl.maximum(target, 0), classes)
    loss = tl.where(counts, (normaliser - wanted) * 0.6931471805599453, 0.0)
    tl.store(losses + row, loss)
    tl.debug_barrier()  # the target's own slope is written over what the loop wrote there
    own = tl.exp2(wanted - normaliser) - 1.0
    tl.store(slopes + target, own.to(slopes.dtype.element_ty), mask=counts)
