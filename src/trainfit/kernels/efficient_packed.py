"""Attention on a packed row by torch's memory-efficient kernel, for what the flash kernel lacks.

It runs on GPUs older than compute capability 8.0, and in float32. Its sliding window looks back
alone, so a window that reaches both ways must be as long as the longest sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.supported import BF16_SINCE, EFFICIENT_SINCE, LARGEST_HEAD

_CAUSAL = 1
"""The kernel's number of a mask that hides later tokens; 0: none is hidden."""


# The generator moves on inside, so that a compiler must not compute it twice.
@torch.library.custom_op(
    "trainfit::efficient_attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float,
    window: int, causal: bool, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Attend: `[tokens, heads, d]`, the softmax's logarithms, and the state of its dropout.

    A `window` above 0 hides tokens at that distance and beyond before each one. The state is on the
    host, or within a CUDA graph on the GPU.
    """
    out, sums, seed, offset, _, _ = torch.ops.aten._efficient_attention_forward(
        query[None], key[None], value[None], None, starts, starts, longest, longest, dropout,
        _CAUSAL if causal else 0, True, scale=scale, window_size=window or None,
    )  # fmt: skip
    return out[0], sums, seed, offset


@torch.library.custom_op("trainfit::efficient_attention_backward", mutates_args=())
def efficient_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, out: Tensor,
    sums: Tensor, seed: Tensor, offset: Tensor, longest: int, scale: float, window: int,
    causal: bool, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value."""
    found = torch.ops.aten._efficient_attention_backward(
        gradient[None], query[None], key[None], value[None], None, out[None], starts, starts,
        longest, longest, sums, dropout, seed, offset, _CAUSAL if causal else 0, False,
        scale=scale, window_size=window or None,
    )  # fmt: skip
    return found[0][0], found[1][0], found[2][0]


@efficient_attention.register_fake
def _(
    query: Tensor, _key: Tensor, _value: Tensor, starts: Tensor, longest: int, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = (longest + 31) // 32 * 32
    sums = query.new_empty(starts.shape[0] - 1, query.shape[1], rows, dtype=torch.float32)
    seed, offset = (query.new_empty((), dtype=torch.long) for _ in range(2))
    return query.new_empty(query.shape), sums, seed, offset


@efficient_attention_backward.register_fake
def _(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(part.new_empty(part.shape) for part in (query, key, value))  # type: ignore[return-value]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, longest, scale, window, causal, dropout = inputs
    ctx.numbers = longest, scale, window, causal, dropout
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient: Tensor, *_rest: Tensor | None) -> tuple[Tensor | None, ...]:
    found = efficient_attention_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return *found, *(None,) * 6


efficient_attention.register_autograd(_backward, setup_context=_remember)


def attend_efficiently(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None,
    window: int, causal: bool, dropout: float,
) -> Tensor:  # fmt: skip
    """Attend: `[tokens, heads, d]`; keys and values may have fewer heads, which are repeated."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    numbers = (longest, scale, window, causal, dropout)
    attended: Tensor = efficient_attention(query, key, value, starts, *numbers)[0]
    return attended


def obstacle(
    *,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    head: int,
    window: int | None,
    longest: int | None,
    causal: bool,
) -> str | None:
    """Reason why the kernel cannot take such packed rows; None: it can.

    A `capability` of None stands for a GPU that is new enough, a `longest` of None for any length.
    """
    since = BF16_SINCE if dtype == torch.bfloat16 else EFFICIENT_SINCE
    if capability is not None and capability < since:
        return f"the memory-efficient one needs {since[0]}.{since[1]} in {dtype_name(dtype)}"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the memory-efficient one does not compute in {dtype_name(dtype)}"
    if head % 8 or head > LARGEST_HEAD:
        return f"the memory-efficient one takes no heads of {head}"
    if window is not None and not causal and (longest is None or window < longest):
        return "the memory-efficient one has no sliding window that reaches both ways"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype as people write it."""
    return str(dtype).removeprefix("torch.")
