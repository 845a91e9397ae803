"""GELU at the speed of memory, and cross-entropy with its gradient in one pass.

torch's GELU kernels compute the error function term by term, which takes longer than reading and
writing the numbers, and torch.compile computes the result again in the backward pass.
`fused_ops_triton` has a shorter formula that is as accurate; without Triton torch's own runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainfit.kernels.varlen import in_half_on_gpu, triton_takes


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
    """Gradient of the input."""
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
