"""The Triton kernels of disentangled attention on a packed row.

The score of query i and key j of a sequence is q_i·k_j + q_i·a + k_j·b, where the vectors a and b
belong to the distance of the two tokens. Seen from either side it is the same: a token's own
vector, times one of `positions` for the distance to the other token. These products are computed
first, into `products` `[2, heads, tokens, 2·longest]`, for the distances that a token's sequence
has; a score then picks one of each side. The backward pass writes the scores' gradients over them,
so that no pass holds more, nothing is added atomically, and the same input gives the same bits.

Blocks of one sequence and one head are independent programs. Those beyond a sequence's end return.
Only where a sequence begins needs 64 bits; offsets inside it are many, and take registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainfit.kernels.disentangled import SPLITS
from trainfit.kernels.softcapped_triton import find_sequence, kept_shares, load_rows, row_pointers

BLOCK = 64
WARPS = 4
STAGES = {"multiply": 3, "attend": 2, "differentiate": 3, "input": 2, "position": 2}
"""Pipeline stages that were fastest on an H200, by kernel; float32 has room for one only."""


def forward(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, starts: Tensor,
    seed: Tensor | None, longest: int, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend: `[tokens, heads, d]`, and the softmax's logarithms `[heads, tokens]`."""
    tokens, heads, _ = query.shape
    out = torch.empty_like(query)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    products = _products(query, key, positions, starts, longest)
    _attend[_grid(starts, longest, heads)](
        query, key, value, *products, starts, seed, out, sums, tokens, scale, dropout,
        **_how("attend", query, longest),
    )  # fmt: skip
    return out, sums


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, positions: Tensor,
    starts: Tensor, seed: Tensor | None, out: Tensor, sums: Tensor, longest: int, scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, heads, head = query.shape
    grid = _grid(starts, longest, heads)
    products = _products(query, key, positions, starts, longest)
    into_query, into_key, into_value = (torch.empty_like(t) for t in (query, key, value))
    _differentiate[grid](
        query, key, value, *products, starts, seed, out, sums, gradient, into_value, tokens, scale,
        dropout, **_how("differentiate", query, longest),
    )  # fmt: skip
    into_positions = []
    sides = ((query, key, into_query), (key, query, into_key))
    for (own, other, into), changes, terms in zip(sides, products, positions, strict=True):
        _input_gradient[grid](
            changes, other, terms, starts, into, tokens, **_how("input", query, longest)
        )
        parts = torch.empty(
            SPLITS, 2 * longest, heads, head, dtype=torch.float32, device=own.device
        )
        _position_gradient[triton.cdiv(2 * longest, BLOCK), heads, SPLITS](
            changes, own, starts, parts, tokens, len(starts) - 1,
            **_how("position", query, longest),
        )  # fmt: skip
        into_positions.append(parts.sum(0))
    found = torch.stack(into_positions).to(positions.dtype)
    return into_query, into_key, into_value, found


def _products(
    query: Tensor, key: Tensor, positions: Tensor, starts: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    products = query.new_empty(2, heads, tokens, 2 * longest)
    for side, own in enumerate((query, key)):
        _multiply[_grid(starts, longest, heads)](
            own, positions[side], starts, products[side], tokens,
            **_how("multiply", query, longest),
        )  # fmt: skip
    return products[0], products[1]


def _grid(starts: Tensor, longest: int, heads: int) -> tuple[int, int, int]:
    return triton.cdiv(longest, BLOCK), len(starts) - 1, heads


def _how(kernel: str, query: Tensor, longest: int) -> dict[str, Any]:
    _, heads, head = query.shape
    wide = query.dtype == torch.float32
    return {
        "HEADS": heads,
        "HEAD": head,
        "LONGEST": longest,
        "BLOCK": BLOCK,
        "PRECISION": "ieee" if wide else "tf32",
        "num_warps": WARPS,
        "num_stages": 1 if wide else STAGES[kernel],
    }


@triton.jit
def _line(products, start, head, tokens, LONGEST: tl.constexpr):
    """Pointer to one head of a sequence in a side's products, at the distance 0."""
    first = head * tl.cast(tokens, tl.int64) + start
    return products + first * (2 * LONGEST) + (LONGEST - 1)


@triton.jit
def _vectors(
    positions, distances, head, HEADS: tl.constexpr, HEAD: tl.constexpr, LONGEST: tl.constexpr
):
    """Load a side's position vectors for these distances; zeros where there is none."""
    places = distances + (LONGEST - 1)
    pointers = positions + (places * HEADS + head)[:, None] * HEAD + tl.arange(0, HEAD)[None, :]
    return tl.load(pointers, mask=(places < 2 * LONGEST)[:, None], other=0.0)


@triton.jit
def _multiply(
    own, positions, starts, products, tokens,
    HEADS: tl.constexpr, HEAD: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply a block of tokens by the positions of all distances within their sequence."""
    start, count = find_sequence(starts)
    first = tl.program_id(0) * BLOCK
    if first >= count:
        return
    head = tl.program_id(2)
    rows = first + tl.arange(0, BLOCK)
    tile = load_rows(own, start, rows, count, head, HEADS, HEAD)
    line = _line(products, start, head, tokens, LONGEST)
    for begin in range(1 - tl.minimum(first + BLOCK, count), count - first, BLOCK):
        distances = begin + tl.arange(0, BLOCK)
        vectors = _vectors(positions, distances, head, HEADS, HEAD, LONGEST)
        found = tl.dot(tile, tl.trans(vectors), input_precision=PRECISION)
        tl.store(
            line + rows[:, None] * (2 * LONGEST) + distances[None, :],
            found.to(products.dtype.element_ty),
            mask=(rows < count)[:, None] & (distances <= LONGEST)[None, :],
        )


@triton.jit
def _attend(
    query, key, value, by_query, by_key, starts, seed, out, sums, tokens, scale, dropout,
    HEADS: tl.constexpr, HEAD: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from a block of queries to all keys, with an online softmax."""
    start, count = find_sequence(starts)
    first = tl.program_id(0) * BLOCK
    if first >= count:
        return
    head = tl.program_id(2)
    rows = first + tl.arange(0, BLOCK)
    asked = load_rows(query, start, rows, count, head, HEADS, HEAD)
    line = _line(by_query, start, head, tokens, LONGEST)
    other_line = _line(by_key, start, head, tokens, LONGEST)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, HEAD], tl.float32)
    for begin in range(0, count, BLOCK):
        others = begin + tl.arange(0, BLOCK)
        keys = load_rows(key, start, others, count, head, HEADS, HEAD)
        distance = others[None, :] - rows[:, None]
        real = (rows < count)[:, None] & (others < count)[None, :]
        here = tl.load(line + (rows[:, None] * (2 * LONGEST) + distance), mask=real, other=0.0)
        there = tl.load(
            other_line + (others[None, :] * (2 * LONGEST) - distance), mask=real, other=0.0
        )
        scores = tl.dot(asked, tl.trans(keys), input_precision=PRECISION)
        scores += here.to(tl.float32) + there.to(tl.float32)
        scores = tl.where((others < count)[None, :], scores * (scale * 1.4426950408889634), -1e30)
        above = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.math.exp2(scores - above[:, None])
        faded = tl.math.exp2(highest - above)
        total = total * faded + tl.sum(shares, 1)
        if seed is not None:
            shares *= kept_shares(seed, dropout, rows, others, count, head, HEADS)
        values = load_rows(value, start, others, count, head, HEADS, HEAD)
        mixed = mixed * faded[:, None] + tl.dot(
            shares.to(values.dtype), values, input_precision=PRECISION
        )
        highest = above
    pointers = row_pointers(out, start, rows, head, HEADS, HEAD)
    written = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(pointers, written, mask=(rows < count)[:, None])
    place = sums + head * tl.cast(tokens, tl.int64) + start
    tl.store(place + rows, highest + tl.math.log2(total), mask=rows < count)


@triton.jit
def _differentiate(
    query, key, value, by_query, by_key, starts, seed, out, sums, gradient, into_value, tokens,
    scale, dropout,
    HEADS: tl.constexpr, HEAD: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of values, and the scores' gradients over the products."""
    start, count = find_sequence(starts)
    first = tl.program_id(0) * BLOCK
    if first >= count:
        return
    head = tl.program_id(2)
    others = first + tl.arange(0, BLOCK)
    keys = load_rows(key, start, others, count, head, HEADS, HEAD)
    values = load_rows(value, start, others, count, head, HEADS, HEAD)
    line = _line(by_query, start, head, tokens, LONGEST)
    other_line = _line(by_key, start, head, tokens, LONGEST)
    place = sums + head * tl.cast(tokens, tl.int64) + start
    given = tl.zeros([BLOCK, HEAD], tl.float32)
    for begin in range(0, count, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        real = (rows < count)[:, None] & (others < count)[None, :]
        distance = others[None, :] - rows[:, None]
        near = line + (rows[:, None] * (2 * LONGEST) + distance)
        far = other_line + (others[None, :] * (2 * LONGEST) - distance)
        here = tl.load(near, mask=real, other=0.0)
        there = tl.load(far, mask=real, other=0.0)
        asked = load_rows(query, start, rows, count, head, HEADS, HEAD)
        scores = tl.dot(asked, tl.trans(keys), input_precision=PRECISION)
        scores += here.to(tl.float32) + there.to(tl.float32)
        total = tl.load(place + rows, mask=rows < count, other=0.0)
        shares = tl.math.exp2(scores * (scale * 1.4426950408889634) - total[:, None])
        shares = tl.where(real, shares, 0.0)
        slopes = load_rows(gradient, start, rows, count, head, HEADS, HEAD)
        wanted = tl.dot(slopes, tl.trans(values), input_precision=PRECISION)
        used = shares
        if seed is not None:
            kept = kept_shares(seed, dropout, rows, others, count, head, HEADS)
            wanted *= kept
            used = shares * kept
        given += tl.dot(tl.trans(used.to(slopes.dtype)), slopes, input_precision=PRECISION)
        attended = load_rows(out, start, rows, count, head, HEADS, HEAD)
        mean = tl.sum(slopes.to(tl.float32) * attended.to(tl.float32), 1)
        changed = (shares * (wanted - mean[:, None]) * scale).to(by_query.dtype.element_ty)
        tl.store(near, changed, mask=real)
        tl.store(far, changed, mask=real)
    pointers = row_pointers(into_value, start, others, head, HEADS, HEAD)
    tl.store(pointers, given.to(into_value.dtype.element_ty), mask=(others < count)[:, None])


@triton.jit
def _changes(line, rows, distances, count, LONGEST: tl.constexpr):
    """The gradients of scores by token and distance; zero where there is no such pair."""
    others = rows[:, None] + distances[None, :]
    real = (rows < count)[:, None] & (others >= 0) & (others < count)
    return tl.load(
        line + (rows[:, None] * (2 * LONGEST) + distances[None, :]), mask=real, other=0.0
    )


@triton.jit
def _input_gradient(
    changes, other, positions, starts, into, tokens,
    HEADS: tl.constexpr, HEAD: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of one side's block of tokens: by the other side, and by the positions."""
    start, count = find_sequence(starts)
    first = tl.program_id(0) * BLOCK
    if first >= count:
        return
    head = tl.program_id(2)
    rows = first + tl.arange(0, BLOCK)
    line = _line(changes, start, head, tokens, LONGEST)
    found = tl.zeros([BLOCK, HEAD], tl.float32)
    for begin in range(0, count, BLOCK):
        others = begin + tl.arange(0, BLOCK)
        real = (rows < count)[:, None] & (others < count)[None, :]
        distance = others[None, :] - rows[:, None]
        tile = tl.load(line + (rows[:, None] * (2 * LONGEST) + distance), mask=real, other=0.0)
        vectors = load_rows(other, start, others, count, head, HEADS, HEAD)
        found += tl.dot(tile, vectors, input_precision=PRECISION)
    for begin in range(1 - tl.minimum(first + BLOCK, count), count - first, BLOCK):
        distances = begin + tl.arange(0, BLOCK)
        tile = _changes(line, rows, distances, count, LONGEST)
        vectors = _vectors(positions, distances, head, HEADS, HEAD, LONGEST)
        found += tl.dot(tile, vectors, input_precision=PRECISION)
    pointers = row_pointers(into, start, rows, head, HEADS, HEAD)
    tl.store(pointers, found.to(into.dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def _position_gradient(
    changes, own, starts, parts, tokens, sequences,
    HEADS: tl.constexpr, HEAD: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of positions, over this program's share of the sequences."""
    least = tl.program_id(0) * BLOCK - (LONGEST - 1)
    head = tl.program_id(1)
    distances = least + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK, HEAD], tl.float32)
    for index in range(tl.program_id(2), sequences, tl.num_programs(2)):
        start = tl.load(starts + index)
        count = tl.load(starts + index + 1) - start
        line = _line(changes, start, head, tokens, LONGEST)
        # The tokens that have another one at some of these distances.
        begin = tl.maximum(0, 1 - least - BLOCK)
        for first in range(begin, tl.minimum(count, count - least), BLOCK):
            rows = first + tl.arange(0, BLOCK)
            tile = _changes(line, rows, distances, count, LONGEST)
            vectors = load_rows(own, start, rows, count, head, HEADS, HEAD)
            found += tl.dot(tl.trans(tile), vectors, input_precision=PRECISION)
    places = distances + (LONGEST - 1)
    lines = (tl.program_id(2) * 2 * LONGEST + places) * HEADS + head
    tl.store(
        parts + lines[:, None] * HEAD + tl.arange(0, HEAD)[None, :],
        found,
        mask=(places < 2 * LONGEST)[:, None],
    )
