"""Attention with soft-capped logits on a packed row, as Gemma 2 has it.

`softcapped_triton` has the kernels, which exist for GPUs alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("trainfit::softcapped_attention", mutates_args=())
def softcapped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    cap: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """From `[tokens, heads, d]` to the same, and the softmax's logarithms `[heads, tokens]`.

    Keys and values may have fewer heads. Tokens at a distance of `window` and beyond are not seen.
    """
    from trainfit.kernels import softcapped_triton

    return softcapped_triton.forward(query, key, value, starts, longest, scale, cap, window)


@torch.library.custom_op("trainfit::softcapped_attention_backward", mutates_args=())
def softcapped_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    out: Tensor,
    sums: Tensor,
    longest: int,
    scale: float,
    cap: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    from trainfit.kernels import softcapped_triton

    return softcapped_triton.backward(
        gradient.contiguous(), query, key, value, starts, out, sums, longest, scale, cap, window
    )


@softcapped_attention.register_fake
def _(query: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _head = query.shape
    return torch.empty_like(query), query.new_empty(heads, tokens, dtype=torch.float32)


@softcapped_attention_backward.register_fake
def _(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, starts, *output)


def _backward(ctx: Any, gradient: Tensor, _sums: Tensor | None) -> tuple[Tensor | None, ...]:
    found = softcapped_attention_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return *found, None, None, None, None, None


softcapped_attention.register_autograd(_backward, setup_context=_remember)
