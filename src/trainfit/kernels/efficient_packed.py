"""Attention on a packed row by torch's memory-efficient kernel, for what the flash kernel lacks.

It runs on GPUs older than compute capability 8.0, and in float32. Its sliding window looks back
alone, so a window that reaches both ways must be as long as the longest sequence. Its dropout is
not used: on packed rows the gradient is that of another mask than the forward pass drew (seen with
torch 2.11: the output, which is linear in the values, is not their product with their gradient).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CAUSAL = 1
"""The kernel's number of a mask that hides later tokens; 0: none is hidden."""


@torch.library.custom_op("trainfit::efficient_attention", mutates_args=())
def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float,
    window: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend: `[tokens, heads, d]`, and the softmax's logarithms.

    A `window` above 0 hides tokens at that distance and beyond before each one.
    """
    out, sums, *_ = torch.ops.aten._efficient_attention_forward(
        query[None], key[None], value[None], None, starts, starts, longest, longest, 0.0,
        _CAUSAL if causal else 0, True, scale=scale, window_size=window or None,
    )  # fmt: skip
    return out[0], sums


@torch.library.custom_op("trainfit::efficient_attention_backward", mutates_args=())
def efficient_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, out: Tensor,
    sums: Tensor, longest: int, scale: float, window: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    unused = torch.empty((), dtype=torch.long)  # the state of a dropout
    found = torch.ops.aten._efficient_attention_backward(
        gradient[None], query[None], key[None], value[None], None, out[None], starts, starts,
        longest, longest, sums, 0.0, unused, unused, _CAUSAL if causal else 0, False,
        scale=scale, window_size=window or None,
    )  # fmt: skip
    return found[0][0], found[1][0], found[2][0]


@efficient_attention.register_fake
def _(
    query: Tensor, _key: Tensor, _value: Tensor, starts: Tensor, longest: int, *_rest: Any
) -> tuple[Tensor, Tensor]:
    rows = (longest + 31) // 32 * 32
    sums = query.new_empty(starts.shape[0] - 1, query.shape[1], rows, dtype=torch.float32)
    return query.new_empty(query.shape), sums


@efficient_attention_backward.register_fake
def _(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(part.new_empty(part.shape) for part in (query, key, value))  # type: ignore[return-value]


def differentiate(forward: Any, backward: Any, tensors: int) -> None:
    """Make one operator the backward pass of another, whose inputs begin with so many tensors.

    It takes the gradient of the first output, these tensors, the outputs and the other inputs, and
    gives the gradients of the first inputs.
    """

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.numbers = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors], *output)

    def go_back(ctx: Any, gradient: Tensor, _sums: Tensor | None) -> tuple[Tensor | None, ...]:
        found = backward(gradient, *ctx.saved_tensors, *ctx.numbers)
        return *found, *(None,) * (tensors + len(ctx.numbers) - len(found))

    forward.register_autograd(go_back, setup_context=remember)


differentiate(efficient_attention, efficient_attention_backward, tensors=4)


def attend_efficiently(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None,
    window: int, causal: bool,
) -> Tensor:  # fmt: skip
    """Attend: `[tokens, heads, d]`; keys and values may have fewer heads, which are repeated."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attended: Tensor = efficient_attention(
        query, key, value, starts, longest, scale, window, causal
    )[0]
    return attended
