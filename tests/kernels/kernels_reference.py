"""Variable-length attention by its definition: a loop over sequences, everything in float64.

It stands in for the GPU's kernel on the CPU. As with the kernel, memory that belongs to no
sequence, or lies beyond the longest that was announced, is left as it was: here, not a number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.attention.varlen  # makes the operation known
from torch import Tensor


def install_reference() -> Any:
    """The library that holds the kernels; `_destroy()` takes them back."""
    library: Any = torch.library.Library("torch_attn", "IMPL")
    library.impl("_varlen_attn", forward, "CPU")
    library.impl("_varlen_attn_backward", _backward, "CPU")
    return library


def _shares(query: Tensor, key: Tensor, scale: float, reach: list[int]) -> Tensor:
    """How much of each key each query takes, `[heads, T, T]`."""
    logits = torch.einsum("qhd,khd->hqk", query, key) * scale
    place = torch.arange(len(query))
    ahead = place[None, :] - place[:, None]
    left, right = (len(query) if side < 0 else side for side in reach)
    return logits.masked_fill((ahead > right) | (-ahead > left), -torch.inf).softmax(-1)


def _doubled(query: Tensor, key: Tensor, value: Tensor, piece: slice) -> tuple[Tensor, ...]:
    """One sequence in float64, with as many heads of keys and values as of queries."""
    groups = query.shape[1] // key.shape[1]
    whole = query, key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return tuple(part[piece].double() for part in whole)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _pieces(starts: Tensor, longest: int) -> Iterator[slice]:
    bounds = starts.tolist()
    for begin, end in itertools.pairwise(bounds):
        yield slice(begin, min(end, begin + longest))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    key_longest: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert starts.dtype == key_starts.dtype == torch.int32
    assert is_causal == (window_size == [-1, 0])
    assert longest == key_longest
    out = torch.full_like(query, torch.nan)
    for piece in _pieces(starts, longest):
        q, k, v = _doubled(query, key, value, piece)
        shares = _shares(q, k, _scale(q, scale), window_size or [-1, -1])
        out[piece] = torch.einsum("hqk,khd->qhd", shares, v).to(out.dtype)
    sums = torch.zeros(query.shape[1], query.shape[0])
    return out, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    key_longest: int,
    is_causal: bool,
    state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, ...]:
    found = tuple(torch.full_like(part, torch.nan) for part in (query, key, value))
    for piece in _pieces(starts, longest):
        q, k, v = _doubled(query, key, value, piece)
        slope, factor = gradient[piece].double(), _scale(q, scale)
        shares = _shares(q, k, factor, window_size or [-1, -1])
        by_share = torch.einsum("qhd,khd->hqk", slope, v)
        by_logit = shares * (by_share - (by_share * shares).sum(-1, keepdim=True)) * factor
        parts = (
            torch.einsum("hqk,khd->qhd", by_logit, k),
            torch.einsum("hqk,qhd->khd", by_logit, q),
            torch.einsum("hqk,qhd->khd", shares, slope),
        )
        for whole, part in zip(found, parts, strict=True):
            grouped = part.unflatten(1, (whole.shape[1], -1)).sum(2)
            whole[piece] = grouped.to(whole.dtype)
    return found


def install_efficient() -> Any:
    """The same for torch's memory-efficient kernel, whose batch has one packed row."""
    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", _efficient_forward, "CPU")
    library.impl("_efficient_attention_backward", _efficient_backward, "CPU")
    return library


def _reach(mask_type: int, window: int | None) -> list[int]:
    assert mask_type == 1 or window is None  # the kernel's window looks back alone
    return [-1 if window is None else window - 1, 0 if mask_type == 1 else -1]


def _efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    key_longest: int,
    dropout: float,
    mask_type: int,
    compute_sums: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: Tensor | None = None,
    window_size: int | None = None,
) -> tuple[Any, ...]:
    assert bias is None
    assert seqlen_k is None
    assert compute_sums
    assert dropout == 0.0  # its gradient would be that of another mask
    assert query.shape[2] == key.shape[2]
    rows = (query[0], key[0], value[0], starts, key_starts, longest, key_longest)
    reach = _reach(mask_type, window_size)
    out, _, _ = forward(*rows, reach == [-1, 0], scale, reach)
    sums = torch.zeros(len(starts) - 1, query.shape[2], -(-longest // 32) * 32)
    return out[None], sums, torch.zeros(()), torch.zeros(()), longest, longest


def _efficient_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    key_longest: int,
    sums: Tensor,
    dropout: float,
    seed: Tensor,
    offset: Tensor,
    mask_type: int,
    bias_needs_gradient: bool,
    *,
    scale: float | None = None,
    num_splits_key: int | None = None,
    window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> tuple[Tensor, ...]:
    assert dropout == 0.0
    assert sums.shape == (len(starts) - 1, query.shape[2], -(-longest // 32) * 32)
    parts = (gradient[0], query[0], key[0], value[0], out[0], sums, starts, key_starts)
    reach = _reach(mask_type, window_size)
    found = _backward(*parts, longest, key_longest, reach == [-1, 0], seed, scale, reach)
    return *(part[None] for part in found), query.new_empty(0)
