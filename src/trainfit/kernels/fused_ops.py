"""GELU at the speed of memory, cross-entropy with its gradient in one pass, and AdamW.

torch's GELU kernels compute the error function term by term, which takes longer than reading and
writing the numbers, and torch.compile computes the result again in the backward pass.
`fused_ops_triton` has a shorter formula that is as accurate; without Triton torch's own runs.

AdamW has moments in fewer bytes: two bytes each, or one byte and a scale per block.

Two-byte moments are bfloat16, rounded up or down at random in proportion to the distance: a plain
rounding would lose the small changes that a slow average consists of. The random bits are a hash of
the step, the weight's number and the element, so that a repeated or resumed step has the same ones.

One-byte moments are bitsandbytes': blocks of 256 numbers, each with its largest magnitude in
float32, and a code of 256 values for the rest. A second moment that is not zero never gets the code
of zero, since the update divides by its root.

Rates, counts and `found_inf` are tensors on the device: nothing waits for it, and an update can be
captured. `fused_ops_triton` has the kernels; elsewhere the formulas below run, one weight per call,
and write nothing before all of its numbers are computed.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainfit.kernels.varlen import in_half_on_gpu, triton_exists, triton_takes


def gelu(tensor: Tensor) -> Tensor:
    """Compute the exact GELU of any tensor, by the fastest kernel that takes it."""
    if in_half_on_gpu(tensor):
        fast: Tensor = half_gelu(tensor)
        return fast
    return functional.gelu(tensor)


@torch.library.custom_op("trainfit::half_gelu", mutates_args=())
def half_gelu(tensor: Tensor) -> Tensor:
    """GELU in half precision on a GPU."""
    if not triton_takes(tensor):
        return functional.gelu(tensor)
    from trainfit.kernels import fused_ops_triton

    return fused_ops_triton.forward(tensor.contiguous())


@torch.library.custom_op("trainfit::half_gelu_backward", mutates_args=())
def half_gelu_backward(gradient: Tensor, tensor: Tensor) -> Tensor:
    if not triton_takes(tensor):
        into: Tensor = torch.ops.aten.gelu_backward(gradient, tensor)
        return into
    from trainfit.kernels import fused_ops_triton

    return fused_ops_triton.backward(gradient.contiguous(), tensor.contiguous())


@half_gelu.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@half_gelu_backward.register_fake
def _(_gradient: Tensor, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    (tensor,) = ctx.saved_tensors
    into: Tensor = half_gelu_backward(gradient, tensor)
    return into


half_gelu.register_autograd(_backward, setup_context=_remember)


# ── cross-entropy ───────────────────────────────────────────────────────────────────────────────

IGNORED = -100
"""Target of a row that is left out of the loss."""


def loss_and_slopes(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of `logits` `[N, classes]`, and its gradient."""
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
    from trainfit.kernels import fused_ops_triton

    return fused_ops_triton.losses_and_slopes(logits, targets)


@half_losses_and_slopes.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(targets.shape, dtype=torch.float32)
    return losses, torch.empty_like(logits, memory_format=torch.contiguous_format)


def by_formula(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `loss_and_slopes` in a few plain operations, which torch.compile can fuse."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = (targets != IGNORED)[:, None]
    places = targets.clamp_min(0)[:, None]
    normaliser = wide.logsumexp(-1, keepdim=True)
    losses = (normaliser - wide.gather(-1, places)) * counts
    chosen = torch.arange(wide.shape[-1], device=wide.device) == places
    slopes = ((wide - normaliser).exp() - chosen.to(wide.dtype)) * counts
    return losses[:, 0], slopes.to(logits.dtype)


# ── AdamW with small moments ────────────────────────────────────────────────────────────────────

BLOCK = 256
"""Numbers that share a scale."""
LEAST = 4096
"""Smaller weights keep float32 moments, as in bitsandbytes: a block may hold a whole bias."""
SALT = 0x3C6EF372
"""Added to the number of a weight, so that it differs from the count of steps."""
_MASK = 0xFFFFFFFF
_FIRST_CAPABILITY = (7, 0)


def takes_lists(weight: Tensor) -> bool:
    """Tell if one call updates many weights, without taking memory once it has begun."""
    if not weight.is_cuda or not triton_exists():
        return False
    return torch.cuda.get_device_capability(weight.device) >= _FIRST_CAPABILITY


def corrections(counts: Tensor, beta1: float, beta2: float) -> Tensor:
    """Bias corrections at each count of steps: of the mean, and of the root of the square."""
    logarithms = (math.log(beta) if beta else -math.inf for beta in (beta1, beta2))
    first, second = (-torch.expm1(counts.double() * each) for each in logarithms)
    return torch.stack([first, second.sqrt()], dim=1).float()


def mixed(bits: Tensor) -> Tensor:
    """Hash 32-bit numbers in int64 to others (lowbias32 of Chris Wellons' hash prospector)."""
    bits = bits & _MASK
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D) & _MASK
    bits = bits ^ (bits >> 15)
    bits = (bits * 0x846CA68B) & _MASK
    return bits ^ (bits >> 16)


@lru_cache(maxsize=16)
def codes(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values of the codes, signed and not, and the limits between neighbours of each."""
    values = [torch.tensor(dynamic_map(signed=signed)) for signed in (True, False)]
    limits = [(each[1:] + each[:-1]) / 2 for each in values]
    signed, unsigned, lower, upper = (each.to(device) for each in (*values, *limits))
    return signed, unsigned, lower, upper


def dynamic_map(*, signed: bool) -> list[float]:
    """Dynamic code of bitsandbytes: seven decades, the upper ones in finer steps."""
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float32)
        means = ((edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade - 6)).tolist()
        values += [*means, *(-mean for mean in means)] if signed else means
    return sorted(values)


@torch.library.custom_op("trainfit::adamw_bf16_", mutates_args={"weights", "means", "squares"})
def adamw_bf16_(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    numbers: list[int],
    starts: list[int],
    counts: Tensor,
    rate: Tensor,
    found_inf: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update float32 weights whose moments are bfloat16, or float32, in the same layout.

    `numbers` name the weights among all, `starts` the first elements of theirs that are given, and
    `counts` the steps with this one. Nothing changes where `found_inf` is not zero.
    """
    gradients = [laid_out(g, w) for g, w in zip(gradients, weights, strict=True)]
    corrected = corrections(counts, beta1, beta2)
    fixed = (beta1, beta2, eps, weight_decay)
    if takes_lists(weights[0]):
        from trainfit.kernels import fused_ops_triton

        fused_ops_triton.update_rounded(
            weights, gradients, means, squares, numbers, starts, counts, corrected, rate,
            found_inf, fixed,
        )  # fmt: skip
        return
    for at, (weight, mean, square) in enumerate(zip(weights, means, squares, strict=True)):
        old = [_flat(t) for t in (weight, mean, square)]
        new = _adamw(
            old[0], _flat(gradients[at]), old[1].float(), old[2].float(), corrected[at], rate,
            fixed,
        )  # fmt: skip
        if mean.dtype == torch.bfloat16:
            bits = random_bits(weight.numel(), starts[at], counts[at], numbers[at])
            new = (new[0], rounded(new[1], bits), rounded(new[2], bits >> 16))
        _write(old, new, found_inf)


@torch.library.custom_op(
    "trainfit::adamw_8bit_",
    mutates_args={"weights", "means", "mean_scales", "squares", "square_scales"},
)
def adamw_8bit_(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    mean_scales: list[Tensor],
    squares: list[Tensor],
    square_scales: list[Tensor],
    counts: Tensor,
    rate: Tensor,
    found_inf: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update float32 weights whose moments are codes with a scale per block."""
    gradients = [laid_out(g, w) for g, w in zip(gradients, weights, strict=True)]
    corrected = corrections(counts, beta1, beta2)
    fixed = (beta1, beta2, eps, weight_decay)
    tables = codes(weights[0].device)
    if takes_lists(weights[0]):
        from trainfit.kernels import fused_ops_triton

        fused_ops_triton.update_coded(
            weights, gradients, means, mean_scales, squares, square_scales, tables, corrected, rate,
            found_inf, fixed,
        )  # fmt: skip
        return
    signed, unsigned, lower, upper = tables
    for at, weight in enumerate(weights):
        old = [_flat(t) for t in (weight, means[at], squares[at])]
        mean = decoded(old[1], mean_scales[at], signed)
        square = decoded(old[2], square_scales[at], unsigned)
        new = _adamw(old[0], _flat(gradients[at]), mean, square, corrected[at], rate, fixed)
        mean_codes, mean_scale = coded(new[1], lower)
        square_codes, square_scale = coded(new[2], upper)
        square_codes = torch.maximum(square_codes, (new[2] > 0).to(torch.uint8))
        _write(
            [*old, mean_scales[at], square_scales[at]],
            (new[0], mean_codes, square_codes, mean_scale, square_scale),
            found_inf,
        )


@adamw_bf16_.register_fake
@adamw_8bit_.register_fake
def _(*_arguments: object) -> None:
    return None


def _adamw(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, corrected: Tensor,
    rate: Tensor, fixed: tuple[float, float, float, float],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """New weight and moments in float32, by AdamW's formula."""
    beta1, beta2, eps, decay = fixed
    mean = mean + (gradient - mean) * (1 - beta1)
    square = square * beta2 + gradient * gradient * (1 - beta2)
    below = square.sqrt() / corrected[1] + eps
    return weight * (1 - rate * decay) - rate / corrected[0] * (mean / below), mean, square


def random_bits(elements: int, start: int, count: Tensor, number: int) -> Tensor:
    """32 random bits for each element of a weight from `start` on, at a step, in int64."""
    places = torch.arange(start, start + elements, device=count.device)
    own = torch.full_like(places[:1], number + SALT)
    return mixed(mixed(places) ^ mixed(mixed(count.long()) ^ mixed(own)))


def rounded(numbers: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16, away from zero if the lower 16 of `bits` reach the next one."""
    whole = numbers.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (whole & -0x10000).view(torch.float32).bfloat16()


def decoded(code: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """Numbers of a flat tensor of codes."""
    each = scales.repeat_interleave(BLOCK)[: code.numel()]
    return values[code.long()] * each


def coded(numbers: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest codes of a flat tensor, and the scales of its blocks."""
    short = -numbers.numel() % BLOCK
    blocks = functional.pad(numbers, (0, short)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    shares = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    found = torch.bucketize(shares, limits).to(torch.uint8)
    return found.view(-1)[: numbers.numel()], scales


def _flat(tensor: Tensor) -> Tensor:
    """All elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out(gradient: Tensor, weight: Tensor) -> Tensor:
    """Gradient in the layout of its weight, which autograd nearly always gives it."""
    alike = gradient.is_contiguous() and weight.is_contiguous()
    if alike or gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight).copy_(gradient)


def _write(old: list[Tensor], new: tuple[Tensor, ...], found_inf: Tensor) -> None:
    """Write all results, or none where `found_inf` says so."""
    found = [torch.where(found_inf > 0, *pair) for pair in zip(old, new, strict=True)]
    for target, value in zip(old, found, strict=True):
        target.copy_(value)
