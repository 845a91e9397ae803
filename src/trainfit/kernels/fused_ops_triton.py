"""The Triton kernels of GELU, of cross-entropy, and of AdamW with small moments.

The normal distribution is 1 - P(t)·exp(-x²/2) for x >= 0, with t = 1/(1 + c·x) and a polynomial P
of degree five: Abramowitz and Stegun 7.1.26, which is off by at most 7.5e-8, a thousandth of what
half precision can tell. The exponential is the one that the slope needs as well.

AdamW takes one launch for each weight, which takes no memory once its kernel is loaded. So each
variant of a kernel is loaded by a launch on no elements before the first weight is written: an
update is never half made.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainfit.kernels.fused_ops import BLOCK, SALT

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


# ── AdamW with small moments ────────────────────────────────────────────────────────────────────

ELEMENTS, WARPS = 1024, 4
"""Elements of one program."""
ROWS = 4
"""Blocks of one program with coded moments."""
_LOADED: set[Any] = set()
"""Variants that were launched before, by device, kernel and alignment of their pointers."""


def update_rounded(
    weights: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor],
    numbers: list[int], starts: list[int], counts: Tensor, corrected: Tensor, rate: Tensor,
    found_inf: Tensor, fixed: tuple[float, ...],
) -> None:  # fmt: skip
    """Update weights with bfloat16 or float32 moments."""
    half = means[0].dtype == torch.bfloat16
    kind = torch.int16 if half else torch.float32
    calls = []
    for at, weight in enumerate(weights):
        pointers = (weight, gradients[at], means[at].view(kind), squares[at].view(kind))
        shared = (counts, corrected, rate, found_inf)
        calls.append((*pointers, *shared, at, numbers[at], starts[at]))
    _launch(_rounded, calls, fixed, ELEMENTS, SALTED=SALT, HALF=half, SIZE=ELEMENTS)


def update_coded(
    weights: list[Tensor], gradients: list[Tensor], means: list[Tensor],
    mean_scales: list[Tensor], squares: list[Tensor], square_scales: list[Tensor],
    tables: tuple[Tensor, ...], corrected: Tensor, rate: Tensor, found_inf: Tensor,
    fixed: tuple[float, ...],
) -> None:  # fmt: skip
    calls = []
    for at, weight in enumerate(weights):
        moments = (means[at], mean_scales[at], squares[at], square_scales[at])
        calls.append((weight, gradients[at], *moments, *tables, corrected, rate, found_inf, at))
    _launch(_coded, calls, fixed, ROWS * BLOCK, ROWS=ROWS, SIZE=BLOCK)


def _launch(
    kernel: Any, calls: list[tuple[Any, ...]], fixed: tuple[float, ...], each: int, **shape: Any
) -> None:
    """Launch a kernel for each weight; first load variants that were not launched yet."""
    beta1, beta2, eps, decay = fixed
    rest = (beta2, 1 - beta1, 1 - beta2, eps, decay)
    options = shape | {"num_warps": WARPS}
    device = calls[0][0].device
    with torch.cuda.device(device):
        for call in calls:
            variant = device, kernel, shape.get("HALF"), *map(_aligned, call)
            if variant not in _LOADED:
                kernel[(1,)](*call, 0, *rest, **options)
                _LOADED.add(variant)
        for call in calls:
            count = call[0].numel()
            if count:
                kernel[(triton.cdiv(count, each),)](*call, count, *rest, **options)


def _aligned(value: Any) -> bool:
    """Tell if an address is a multiple of 16: Triton compiles other code for those."""
    return isinstance(value, Tensor) and value.data_ptr() % 16 == 0


@triton.jit
def _mixed(bits):
    """`fused_ops.mixed` of unsigned numbers."""
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _adamw(weight, gradient, mean, square, corrected, rate, beta2, rest1, rest2, eps, decay):
    """New weight and moments; `corrected` points to the weight's row."""
    mean = mean + (gradient - mean) * rest1
    square = square * beta2 + gradient * gradient * rest2
    first = tl.load(corrected)
    second = tl.load(corrected + 1)
    speed = tl.load(rate)
    below = tl.div_rn(tl.sqrt_rn(square), second) + eps
    weight = weight * (1.0 - speed * decay) - tl.div_rn(speed, first) * tl.div_rn(mean, below)
    return weight, mean, square


@triton.jit
def _round(numbers, bits):
    """Bits of the bfloat16 that a float32 is rounded to."""
    whole = numbers.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)
    return (whole >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def _wide(half):
    """float32 of the bits of a bfloat16."""
    return (half.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["place", "number", "start", "count"])
def _rounded(
    weights, gradients, means, squares, counts, corrected, rate, found_inf, place, number, start,
    count, beta2, rest1, rest2, eps, decay, SALTED: tl.constexpr,
    HALF: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) != 0.0:
        return
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    weight = tl.load(weights + at, mask=inside, other=0.0)
    gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(means + at, mask=inside, other=0)
    square = tl.load(squares + at, mask=inside, other=0)
    if HALF:
        mean = _wide(mean)
        square = _wide(square)
    weight, mean, square = _adamw(
        weight, gradient, mean, square, corrected + 2 * place, rate,
        beta2, rest1, rest2, eps, decay,
    )  # fmt: skip
    tl.store(weights + at, weight, mask=inside)
    if HALF:
        step = _mixed(tl.load(counts + place).to(tl.uint32))
        key = _mixed(step ^ _mixed((number + SALTED).to(tl.uint32)))
        bits = _mixed(_mixed((at + start).to(tl.uint32)) ^ key)
        tl.store(means + at, _round(mean, bits), mask=inside)
        tl.store(squares + at, _round(square, bits >> 16), mask=inside)
    else:
        tl.store(means + at, mean, mask=inside)
        tl.store(squares + at, square, mask=inside)


@triton.jit
def _nearest(shares, limits):
    """Number of limits below each share: the place of its nearest code."""
    found = tl.zeros_like(shares).to(tl.int32)
    for power in tl.static_range(8):
        limit = tl.load(limits + found + ((128 >> power) - 1))
        found = tl.where(shares > limit, found + (128 >> power), found)
    return found


@triton.jit
def _relative(numbers):
    """Largest magnitudes of the rows, and the numbers relative to them."""
    scales = tl.max(tl.abs(numbers), 1)
    whole = tl.where(scales > 0.0, scales, 1.0)[:, None]
    return scales, tl.div_rn(numbers, tl.broadcast_to(whole, numbers.shape))


@triton.jit(do_not_specialize=["place", "count"])
def _coded(
    weights, gradients, means, mean_scales, squares, square_scales, signed, unsigned, lower, upper,
    corrected, rate, found_inf, place, count, beta2, rest1, rest2, eps, decay,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) != 0.0:
        return
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = at < count
    held = row * SIZE < count
    weight = tl.load(weights + at, mask=inside, other=0.0)
    gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(signed + tl.load(means + at, mask=inside, other=0).to(tl.int32))
    square = tl.load(unsigned + tl.load(squares + at, mask=inside, other=0).to(tl.int32))
    # Beyond the end there is code 0, which is no zero: it would count among the largest.
    mean = tl.where(inside, mean * tl.load(mean_scales + row, mask=held, other=0.0)[:, None], 0.0)
    square = square * tl.load(square_scales + row, mask=held, other=0.0)[:, None]
    weight, mean, square = _adamw(
        weight, gradient, mean, square, corrected + 2 * place, rate,
        beta2, rest1, rest2, eps, decay,
    )  # fmt: skip
    tl.store(weights + at, weight, mask=inside)
    scales, shares = _relative(mean)
    tl.store(means + at, _nearest(shares, lower).to(tl.uint8), mask=inside)
    tl.store(mean_scales + row, scales, mask=held)
    scales, shares = _relative(square)
    found = tl.maximum(_nearest(shares, upper), (square > 0.0).to(tl.int32))
    tl.store(squares + at, found.to(tl.uint8), mask=inside)
    tl.store(square_scales + row, scales, mask=held)
