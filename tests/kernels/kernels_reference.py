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
