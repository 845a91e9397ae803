"""The Triton kernels of GELU and of cross-entropy.

The normal distribution is 1 - P(t)·exp(-x²/2) for x >= 0, with t = 1/(1 + c·x) and a polynomial P
of degree five: Abramowitz and Stegun 7.1.26, which is off by at most 7.5e-8, a thousandth of what
half precision can tell. The exponential is the one that the slope needs as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GELU_BLOCK, GELU_WARPS = 2048, 4
"""Numbers of one program: each thread takes sixteen bytes at a time."""


def forward(tensor: Tensor) -> Tensor:
    """GELU of a contiguous tensor."""
    out = torch.empty_like(tensor)
    count = tensor.numel()
    if count:
        _forward[(triton.cdiv(count, GELU_BLOCK),)](
            tensor, out, count, BLOCK=GELU_BLOCK, num_warps=GELU_WARPS
        )
    return out


def backward(gradient: Tensor, tensor: Tensor) -> Tensor:
    """The gradient of `tensor`, both contiguous."""
    into = torch.empty_like(tensor)
    count = tensor.numel()
    if count:
        _backward[(triton.cdiv(count, GELU_BLOCK),)](
            gradient, tensor, into, count, BLOCK=GELU_BLOCK, num_warps=GELU_WARPS
        )
    return into


@triton.jit
def _normal(x):
    """The distribution and the density of the standard normal at x."""
    size = tl.abs(x)
    under = 1.0 + 0.23164190 * size
    t = tl.rsqrt(under * under)  # a reciprocal in one instruction
    bell = tl.exp2(x * x * -0.72134752)
    terms = 0.5307027145 * t - 0.7265760135
    terms = terms * t + 0.7107068705
    terms = terms * t - 0.142248368
    terms = terms * t + 0.127414796
    tail = terms * t * bell
    return tl.where(x >= 0.0, 1.0 - tail, tail), 0.39894228 * bell


@triton.jit
def _forward(tensor, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(tensor + at, mask=inside, other=0.0).to(tl.float32)
    below, _ = _normal(x)
    tl.store(out + at, (x * below).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gradient, tensor, into, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(tensor + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    below, density = _normal(x)
    tl.store(into + at, (slope * (below + x * density)).to(into.dtype.element_ty), mask=inside)


LOSS_BLOCK, LOSS_WARPS = 16384, 16
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
            BLOCK=LOSS_BLOCK,
            num_warps=LOSS_WARPS,
        )
    return losses, slopes


@triton.jit
def _scaled(logits, at, classes):
    """Logits as exponents of two."""
    x = tl.load(logits + at, mask=at < classes, other=-float("inf"))
    return x.to(tl.float32) * 1.4426950408889634


@triton.jit
def _row(logits, targets, slopes, losses, stride, classes, BLOCK: tl.constexpr):
    """Sum the exponentials of a row, then write each one's share of the sum.

    Exponents are relative to the largest logit of the first block, which float32 has room for
    unless another is larger by 127; then the largest of all is used.
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
    subtracted = tl.where(counts, normaliser, float("inf"))  # an ignored row has zero slopes
    for start in range(0, classes, BLOCK):
        at = start + place
        slope = tl.exp2(_scaled(logits, at, classes) - subtracted)
        tl.store(slopes + at, slope.to(slopes.dtype.element_ty), mask=at < classes)
    wanted = _scaled(logits, tl.maximum(target, 0), classes)
    loss = tl.where(counts, (normaliser - wanted) * 0.6931471805599453, 0.0)
    tl.store(losses + row, loss)
    tl.debug_barrier()  # the loop's store to the target must be done before the next one
    own = tl.exp2(wanted - normaliser) - 1.0
    tl.store(slopes + target, own.to(slopes.dtype.element_ty), mask=counts)
