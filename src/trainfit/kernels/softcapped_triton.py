"""The Triton kernels of soft-capped attention on a packed row.

Gemma 2 squashes its scores to cap·tanh(score / cap), which torch's flash kernel cannot do. As
there, blocks of one sequence and one head are independent programs that never hold more than a tile
of scores, and the backward pass computes the scores again, once for queries and once for keys.
Nothing is added atomically: the same input gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def find_sequence(starts):
    """Return the start of this program's sequence, and its length."""
    index = tl.program_id(1)
    start = tl.load(starts + index)
    return start, tl.load(starts + index + 1) - start


@triton.jit
def row_pointers(tensor, start, rows, head, HEADS: tl.constexpr, HEAD: tl.constexpr):
    """Pointers to rows of one head of a sequence in a `[tokens, heads, d]` tensor."""
    first = tensor + (start.to(tl.int64) * HEADS + head) * HEAD
    return first + rows[:, None] * (HEADS * HEAD) + tl.arange(0, HEAD)[None, :]


@triton.jit
def load_rows(tensor, start, rows, count, head, HEADS: tl.constexpr, HEAD: tl.constexpr):
    """Load rows of one head of a sequence; zeros beyond its end."""
    pointers = row_pointers(tensor, start, rows, head, HEADS, HEAD)
    return tl.load(pointers, mask=(rows < count)[:, None], other=0.0)


@triton.jit
def kept_shares(seed, dropout, rows, others, count, head, HEADS: tl.constexpr):
    """Draw a tile of factors for the shares of keys: 0 for a dropped one, else above 1.

    A seed always gives a pair of tokens of a sequence the same factor, in any tile.
    """
    stream = tl.load(seed) + (tl.program_id(1) * HEADS + head)
    random = tl.rand(stream, rows[:, None] * count + others[None, :])
    return tl.where(random >= dropout, 1.0 / (1.0 - dropout), 0.0)


BLOCK = {16: 64, 32: 64, 64: 64, 128: 64, 256: 32}
"""Tokens of a tile by the size of a head: a large head leaves few registers."""


def forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, seed: Tensor | None, longest: int,
    scale: float, cap: float, window: int, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend: `[tokens, heads, d]`, and the softmax's logarithms `[heads, tokens]`."""
    tokens, heads, head = query.shape
    out = torch.empty_like(query)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    grid = (triton.cdiv(longest, BLOCK[head]), len(starts) - 1, heads)
    _attend[grid](
        query, key, value, starts, seed, out, sums, tokens, scale, cap, window, dropout,
        **_how(query, key),
    )  # fmt: skip
    return out, sums


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, starts: Tensor,
    seed: Tensor | None, out: Tensor, sums: Tensor, longest: int, scale: float, cap: float,
    window: int, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, heads, head = query.shape
    into_query, into_key, into_value = (torch.empty_like(t) for t in (query, key, value))
    blocks, sequences = triton.cdiv(longest, BLOCK[head]), len(starts) - 1
    numbers = (tokens, scale, cap, window, dropout)
    tensors = (query, key, value, starts, seed, out, sums, gradient)
    how = _how(query, key)
    _query_gradient[blocks, sequences, heads](*tensors, into_query, *numbers, **how)
    _key_gradient[blocks, sequences, key.shape[1]](*tensors, into_key, into_value, *numbers, **how)
    return into_query, into_key, into_value


def _how(query: Tensor, key: Tensor) -> dict[str, Any]:
    _, heads, head = query.shape
    wide = query.dtype == torch.float32
    return {
        "HEADS": heads,
        "GROUPS": heads // key.shape[1],
        "HEAD": head,
        "BLOCK": BLOCK[head],
        "PRECISION": "ieee" if wide else "tf32",
        "num_warps": 8 if head == 256 else 4,
        "num_stages": 1 if wide or head == 256 else 2,
    }


@triton.jit
def _span(first, count, window, BLOCK: tl.constexpr):
    """Range of tokens that a block can see: the sequence, or the window's part of it."""
    begin = tl.maximum(0, first - window + 1) // BLOCK * BLOCK
    return begin, tl.minimum(count, first + BLOCK - 1 + window)


@triton.jit
def _capped(queries, keys, scale, cap, PRECISION: tl.constexpr):
    """Scores as shares of the cap, between -1 and 1."""
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale / cap)
    return 2.0 / (1.0 + tl.math.exp2(scores * -2.8853900817779268)) - 1.0


@triton.jit
def _seen(rows, others, count, window):
    distance = rows[:, None] - others[None, :]
    near = (distance < window) & (-distance < window)
    return near & (rows < count)[:, None] & (others < count)[None, :]


@triton.jit
def _attend(
    query, key, value, starts, seed, out, sums, tokens, scale, cap, window, dropout,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from a block of queries to the keys that it sees, with an online softmax."""
    start, count = find_sequence(starts)
    first = tl.program_id(0) * BLOCK
    if first >= count:
        return
    head = tl.program_id(2)
    rows = first + tl.arange(0, BLOCK)
    asked = load_rows(query, start, rows, count, head, HEADS, HEAD)
    highest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, HEAD], tl.float32)
    begin, end = _span(first, count, window, BLOCK)
    for at in range(begin, end, BLOCK):
        others = at + tl.arange(0, BLOCK)
        keys = load_rows(key, start, others, count, head // GROUPS, HEADS // GROUPS, HEAD)
        scores = _capped(asked, keys, scale, cap, PRECISION) * (cap * 1.4426950408889634)
        scores = tl.where(_seen(rows, others, count, window), scores, -1e30)
        above = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen no key yet gets shares of zero.
        shares = tl.where(scores > -1e29, tl.math.exp2(scores - above[:, None]), 0.0)
        faded = tl.math.exp2(highest - above)
        total = total * faded + tl.sum(shares, 1)
        if seed is not None:
            shares *= kept_shares(seed, dropout, rows, others, count, head, HEADS)
        values = load_rows(value, start, others, count, head // GROUPS, HEADS // GROUPS, HEAD)
        mixed = mixed * faded[:, None] + tl.dot(
            shares.to(values.dtype), values, input_precision=PRECISION
        )
        highest = above
    total = tl.where(rows < count, total, 1.0)
    pointers = row_pointers(out, start, rows, head, HEADS, HEAD)
    written = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(pointers, written, mask=(rows < count)[:, None])
    place = sums + head * tl.cast(tokens, tl.int64) + start
    tl.store(place + rows, highest + tl.math.log2(total), mask=rows < count)


@triton.jit
def _changes(
    asked, keys, values, slopes, attended, total, seen, scale, cap,
    seed, dropout, rows, others, count, head, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The shares of a tile, and the gradients of its scores before they are scaled and capped."""
    bent = _capped(asked, keys, scale, cap, PRECISION)
    shares = tl.math.exp2(bent * (cap * 1.4426950408889634) - total[:, None])
    shares = tl.where(seen, shares, 0.0)
    mean = tl.sum(slopes.to(tl.float32) * attended.to(tl.float32), 1)
    wanted = tl.dot(slopes, tl.trans(values), input_precision=PRECISION)
    used = shares
    if seed is not None:
        kept = kept_shares(seed, dropout, rows, others, count, head, HEADS)
        wanted *= kept
        used = shares * kept
    return used, shares * (wanted - mean[:, None]) * (1.0 - bent * bent) * scale


@triton.jit
def _query_gradient(
    query, key, value, starts, seed, out, sums, gradient, into, tokens, scale, cap, window,
    dropout,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of queries, over the keys that it sees."""
    start, count = find_sequence(starts)
    first = tl.program_id(0) * BLOCK
    if first >= count:
        return
    head = tl.program_id(2)
    rows = first + tl.arange(0, BLOCK)
    asked = load_rows(query, start, rows, count, head, HEADS, HEAD)
    slopes = load_rows(gradient, start, rows, count, head, HEADS, HEAD)
    attended = load_rows(out, start, rows, count, head, HEADS, HEAD)
    place = sums + head * tl.cast(tokens, tl.int64) + start
    total = tl.load(place + rows, mask=rows < count, other=0.0)
    found = tl.zeros([BLOCK, HEAD], tl.float32)
    begin, end = _span(first, count, window, BLOCK)
    for at in range(begin, end, BLOCK):
        others = at + tl.arange(0, BLOCK)
        keys = load_rows(key, start, others, count, head // GROUPS, HEADS // GROUPS, HEAD)
        values = load_rows(value, start, others, count, head // GROUPS, HEADS // GROUPS, HEAD)
        seen = _seen(rows, others, count, window)
        _, changed = _changes(
            asked, keys, values, slopes, attended, total, seen, scale, cap,
            seed, dropout, rows, others, count, head, HEADS, PRECISION,
        )  # fmt: skip
        found += tl.dot(changed.to(keys.dtype), keys, input_precision=PRECISION)
    pointers = row_pointers(into, start, rows, head, HEADS, HEAD)
    tl.store(pointers, found.to(into.dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def _key_gradient(
    query, key, value, starts, seed, out, sums, gradient, into_key, into_value, tokens, scale,
    cap, window, dropout,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values, over all heads that share it."""
    start, count = find_sequence(starts)
    first = tl.program_id(0) * BLOCK
    if first >= count:
        return
    own = tl.program_id(2)
    others = first + tl.arange(0, BLOCK)
    keys = load_rows(key, start, others, count, own, HEADS // GROUPS, HEAD)
    values = load_rows(value, start, others, count, own, HEADS // GROUPS, HEAD)
    to_keys = tl.zeros([BLOCK, HEAD], tl.float32)
    to_values = tl.zeros([BLOCK, HEAD], tl.float32)
    begin, end = _span(first, count, window, BLOCK)
    for group in range(GROUPS):
        head = own * GROUPS + group
        place = sums + head * tl.cast(tokens, tl.int64) + start
        for at in range(begin, end, BLOCK):
            rows = at + tl.arange(0, BLOCK)
            asked = load_rows(query, start, rows, count, head, HEADS, HEAD)
            slopes = load_rows(gradient, start, rows, count, head, HEADS, HEAD)
            attended = load_rows(out, start, rows, count, head, HEADS, HEAD)
            total = tl.load(place + rows, mask=rows < count, other=0.0)
            seen = _seen(rows, others, count, window)
            shares, changed = _changes(
                asked, keys, values, slopes, attended, total, seen, scale, cap,
                seed, dropout, rows, others, count, head, HEADS, PRECISION,
            )  # fmt: skip
            to_values += tl.dot(
                tl.trans(shares.to(slopes.dtype)), slopes, input_precision=PRECISION
            )
            to_keys += tl.dot(tl.trans(changed.to(asked.dtype)), asked, input_precision=PRECISION)
    mask = (others < count)[:, None]
    pointers = row_pointers(into_key, start, others, own, HEADS // GROUPS, HEAD)
    tl.store(pointers, to_keys.to(into_key.dtype.element_ty), mask=mask)
    pointers = row_pointers(into_value, start, others, own, HEADS // GROUPS, HEAD)
    tl.store(pointers, to_values.to(into_value.dtype.element_ty), mask=mask)
