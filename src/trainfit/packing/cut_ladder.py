"""A step into micro-batches, packed or padded, on one rank or several, and the ladder of cuts.

A step owns its sequences. How it is cut is a decision about memory alone, so the union over all
micro-batches of all ranks is the step, whatever the cut. Where attention cannot take packed rows,
sequences of similar length are padded to one of a few shapes, so that each shape is compiled, or
captured as a CUDA graph, once. Rows without a sequence fill a shape up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Self, TypeAlias

import numpy as np

from trainfit.core.records import Record
from trainfit.packing.steps import (
    IntArray,
    Lengths,
    MicroBatch,
    PackedCut,
    check_fits,
    check_lengths,
    check_whole,
    divide_up,
    fit_packed_parts,
    round_up,
    sample_parts,
    share_step,
)

MOST_SHAPES = 8
"""Shapes of a cut: each takes memory and seconds to compile or to capture."""
_LEAST_GAIN = 0.015
"""Share of the tokens that one more width must save: steps of another mix are captured again."""
_MULTIPLE = 16
"""Widths are multiples of it: SDPA copies a mask of any other width."""
_MOST_PLACES = 256
"""Places of a step at which micro-batches may begin: more would take long to choose among."""
# Cost of starting a micro-batch, in tokens: a finer cut must save more padding than that.
_START_COST = 256
# Of cuts whose costs differ by less, the one with the least padding is taken.
_ALIKE = 1.01
# Cost of an impossible cut, with room for additions.
_NEVER = 1 << 60
# Cost of a start that outweighs any padding.
_MANY = 1 << 40

Shape: TypeAlias = tuple[int, int]
"""Rows and width."""
Rows: TypeAlias = list[tuple[int, int]]
"""Sequences of each micro-batch, and the rows of its shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedCut(Record):
    """How steps are cut into padded micro-batches of a few fixed shapes, longest first."""

    tokens: int
    """The most tokens of a micro-batch, padding included; it sets the memory."""
    shapes: tuple[Shape, ...]
    """Rows and width of each shape, the fewest tokens first."""
    rows: tuple[int, ...]
    """Sequences of each micro-batch in a rank's part of a whole step."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a whole step, on each rank."""
        return len(self.rows)

    def empty(self) -> MicroBatch:
        """A micro-batch of padding alone."""
        rows, width = self.shapes[0]
        return MicroBatch(sequences=(), tokens=0, rows=rows, width=width)

    def cut(self, lengths: IntArray, part: IntArray) -> list[MicroBatch]:
        """Cut a rank's part of a step, which comes longest first."""
        if not part.size:
            return []
        values = lengths[part].tolist()
        check_fits(values[0], max(width for _, width in self.shapes))
        shapes = self._as_fitted(values) or self._cover(values)
        batches, start = [], 0
        for count, (rows, width) in shapes:
            chosen = slice(start, start + count)
            own, tokens = tuple(part[chosen].tolist()), sum(values[chosen])
            batches.append(MicroBatch(sequences=own, tokens=tokens, rows=rows, width=width))
            start += count
        return batches

    def _as_fitted(self, values: list[int]) -> list[tuple[int, Shape]]:
        """Sequences and shape of each micro-batch of a whole step; empty where one has no shape."""
        if sum(self.rows) != len(values):
            return []
        found, start = [], 0
        for count in self.rows:
            holds = (s for s in self.shapes if s[0] >= count and s[1] >= values[start])
            if (shape := next(holds, None)) is None:
                return []
            found.append((count, shape))
            start += count
        return found

    def _cover(self, values: list[int]) -> list[tuple[int, Shape]]:
        """Sequences and shape of the micro-batches that compute the least."""
        size = len(values)
        costs = [0] * (size + 1)
        best: list[Shape] = [(1, 1)] * size
        for start in reversed(range(size)):
            costs[start], best[start] = min(
                (rows * width + _START_COST + costs[min(start + rows, size)], (rows, width))
                for rows, width in self.shapes
                if width >= values[start]
            )
        found, start = [], 0
        while start < size:
            shape = best[start]
            found.append((min(shape[0], size - start), shape))
            start += shape[0]
        return found


def fit_padded_parts(
    parts: list[list[int]],
    longest: int,
    cap_tokens: int,
    at_least: int = 1,
    at_most: int | None = None,
    multiple: int = _MULTIPLE,
) -> PaddedCut:
    """Fit the micro-batches that pad the least, under a cap in tokens with padding.

    Dealt steps have nearly the same lengths, so the same rows suit them all. A step has between
    `at_least` and `at_most` micro-batches, or as few as the cap allows. No width exceeds `longest`,
    since a model may have no positions beyond it.
    """
    profile = _profile(parts, longest, multiple)
    size = profile.shape[1]
    least, most = min(at_least, size), max(at_least, at_most or size)
    runs = _Runs.of(profile, cap_tokens)
    candidates = [
        *runs.by_count(),
        runs.with_shared_shapes(_START_COST, least),
        runs.with_shared_shapes(_MANY, least),  # the fewest micro-batches
    ]
    off = [max(least - len(rows), len(rows) - most, 0) for rows in candidates]
    nearest = [rows for rows, by in zip(candidates, off, strict=True) if by == min(off)]
    found = [_cut_of(profile, rows) for rows in nearest]
    starts = [_START_COST * len(profile) * cut.micro_batches for _, cut in found]
    costs = [tokens + start for (tokens, _), start in zip(found, starts, strict=True)]
    good = [one for one, cost in zip(found, costs, strict=True) if cost <= _ALIKE * min(costs)]
    return min(good, key=lambda one: one[0])[1]


def _profile(parts: list[list[int]], longest: int, multiple: int) -> IntArray:
    """The rounded lengths of the sequences of each whole step, the longest first."""
    whole = max(map(len, parts))
    profile = round_up(np.array([part for part in parts if len(part) == whole]), multiple, longest)
    profile[profile[:, 0].argmax(), 0] = longest  # which a sample of the steps may lack
    return profile


def _cut_of(profile: IntArray, rows: Rows) -> tuple[int, PaddedCut]:
    """Choose the widths of shapes with these rows; the cut comes with the tokens of all steps."""
    firsts: dict[int, list[IntArray]] = {}
    start = 0
    for count, held in rows:
        firsts.setdefault(held, []).append(profile[:, start])
        start += count
    options = {held: quantize(np.concatenate(f), MOST_SHAPES) for held, f in firsts.items()}
    taken, worth = dict.fromkeys(options, 1), 0.0
    if len(rows) <= MOST_SHAPES:  # a shape for each, and more where they pay
        taken = {held: min(len(firsts[held]), len(found)) for held, found in options.items()}
        worth = _LEAST_GAIN * sum(held * found[0][0] for held, found in options.items())
    for _ in range(MOST_SHAPES - sum(taken.values())):  # each saves no more than the last did
        saved = {
            held: held * (found[taken[held] - 1][0] - found[taken[held]][0])
            for held, found in options.items()
            if taken[held] < len(found)
        }
        if not saved or max(saved.values()) < worth:
            break
        taken[max(saved, key=lambda held: saved[held])] += 1
    shapes = [(held, width) for held, n in taken.items() for width in options[held][n - 1][1]]
    shapes.sort(key=lambda shape: (shape[0] * shape[1], shape))
    tokens = sum(held * options[held][n - 1][0] for held, n in taken.items())
    return tokens, PaddedCut(
        tokens=max(held * width for held, width in shapes),
        shapes=tuple(shapes),
        rows=tuple(count for count, _ in rows),
    )


def quantize(values: IntArray, most: int) -> list[tuple[int, tuple[int, ...]]]:
    """Choose 1, 2 and up to `most` of the values, so that rounding all up to them adds the least.

    Each choice comes with the sum of the rounded values.
    """
    sizes, counts = np.unique(values, return_counts=True)
    below = np.cumsum((0, *counts))
    price = np.concatenate([[0], sizes]) * (below - below[:, None])
    return [
        (cost, tuple(sizes[np.array(places[1:]) - 1].tolist()))
        for cost, places in _paths(price, min(most, sizes.size))
    ]


def _paths(price: IntArray, most: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the cheapest way from the first place to the last in 1, 2 and up to `most` strides.

    `price` has the cost of a stride between any two places, from `_NEVER` on if there is none.
    """
    place = np.arange(len(price))
    price = np.where(place[:, None] < place, price, _NEVER)
    cost = price[0]
    before: list[IntArray] = []
    for _ in range(most):
        if cost[-1] < _NEVER:
            places = [len(price) - 1]
            for stride in reversed(before):
                places.append(int(stride[places[-1]]))
            yield int(cost[-1]), [0, *reversed(places)]
        options = np.minimum(cost[:, None] + price, _NEVER)
        before.append(options.argmin(axis=0))
        cost = options.min(axis=0)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of sequences of a step, from any place where one may begin to any other."""

    counts: IntArray
    """Sequences of each run; 0 and less where it would end before it begins."""
    widths: IntArray
    """The most that the sequence at each place, the longest of its runs, is padded to."""
    cap: int

    @classmethod
    def of(cls, profile: IntArray, cap: int) -> Self:
        """List the runs of steps with these lengths."""
        size = profile.shape[1]
        places = np.append(np.arange(0, size, divide_up(size, _MOST_PLACES)), size)
        widths = profile.max(axis=0)[np.minimum(places, size - 1)]
        return cls(places - places[:, None], widths[:, None], cap)

    def by_count(self) -> Iterator[Rows]:
        """Yield the rows that pad the least, for each number of micro-batches that the cap allows.

        Of those that pad the same, the most even ones take the least memory.
        """
        size = int(self.counts[0, -1])
        tokens = self.counts * self.widths
        scale = min(size**2 + 1, _NEVER // (4 * size * int(self.widths.max())))
        price = np.where(tokens <= self.cap, tokens * scale + self.counts**2, _NEVER)
        for _, places in _paths(price, min(MOST_SHAPES, size)):
            rows = [int(self.counts[run]) for run in pairwise(places)]
            yield [(count, count) for count in rows]

    def with_shared_shapes(self, start_cost: int, least: int) -> Rows:
        """Choose `least` micro-batches or more, of which neighbours share a shape.

        The shape is as wide as the first one needs it.
        """
        batches = np.maximum(-(-self.counts // (self.cap // self.widths)), 1)
        price = batches * (-(-self.counts // batches) * self.widths + start_cost)
        _, places = min(_paths(price, MOST_SHAPES))
        groups = [
            [int(self.counts[run]), int(batches[run]), int(self.widths[run[0], 0])]
            for run in pairwise(places)
        ]
        for _ in range(least - sum(count for _, count, _ in groups)):
            more = [
                (width * ((n + 1) * divide_up(size, n + 1) - n * divide_up(size, n)), at)
                for at, (size, n, width) in enumerate(groups)
                if n < size
            ]
            groups[min(more)[1]][1] += 1
        return [
            (size // n + (index < size % n), divide_up(size, n))
            for size, n, _ in groups
            for index in range(n)
        ]


Cut: TypeAlias = PackedCut | PaddedCut

_FEW = 256
"""Steps used to fit the fallback cuts."""


def cut_step(
    lengths: IntArray, step: Sequence[int] | IntArray, cut: Cut, ranks: int = 1
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Cut a step into micro-batches, for each rank.

    All ranks get the same number, since some kinds of parallel training communicate in each of
    them; a rank with less to do gets empty ones at the end.
    """
    parts = share_step(lengths, np.asarray(step, dtype=np.int64), ranks)
    batches = [cut.cut(lengths, part) for part in parts]
    most = max(map(len, batches))
    return tuple((*own, *[cut.empty()] * (most - len(own))) for own in batches)


def ladder(
    lengths: Lengths,
    effective_batch: int,
    cap_tokens: int,
    *,
    padded: bool = False,
    ranks: int = 1,
    seed: int = 0,
    at_least: int = 1,
    at_most: int | None = None,
    folds: Sequence[Lengths] = (),
) -> tuple[Cut, ...]:
    """Fit the cut to start with, then smaller ones to fall back on when memory runs out.

    Each next cut has twice the micro-batches (packed) or half the tokens (padded); the last one
    holds little more than the longest sequence. The first has `at_least` that many micro-batches
    per step: as few as the cap allows (packed), or those that pad the least, but no more than
    `at_most` as far as the cap allows (padded). `folds` are the lengths of further folds that
    share the cuts, so that every fold has the same shapes.
    """
    arrays = tuple(check_lengths(each).tobytes() for each in (lengths, *folds))
    return _ladder(arrays, effective_batch, cap_tokens, padded, ranks, seed, at_least, at_most)


@lru_cache(maxsize=32)
def _ladder(
    folds: tuple[bytes, ...],
    effective_batch: int,
    cap_tokens: int,
    padded: bool,
    ranks: int,
    seed: int,
    at_least: int,
    at_most: int | None,
) -> tuple[Cut, ...]:
    """Fit the ladder of these lengths; cached, since every fold and trial asks for the same."""
    arrays = [np.frombuffer(each, dtype=np.int64) for each in folds]
    parts, longest = _sample(arrays, effective_batch, cap_tokens, ranks, seed)
    # Whole steps first: enough for shapes that are rarely needed.
    few = [*sorted(parts, key=len, reverse=True)[: _FEW - 1], min(parts, key=len)]

    def below(rung: Cut) -> Cut:
        if padded:
            return fit_padded_parts(few, longest, max(rung.tokens // 2, longest))
        return fit_packed_parts(few, longest, cap_tokens, at_least=2 * rung.micro_batches)

    rungs: list[Cut] = [
        fit_padded_parts(parts, longest, cap_tokens, at_least, at_most)
        if padded
        else fit_packed_parts(parts, longest, cap_tokens, at_least=at_least)
    ]
    while (rung := below(rungs[-1])).tokens < rungs[-1].tokens:
        rungs.append(rung)
    return tuple(rungs)


def coarser_cuts(
    lengths: Lengths,
    effective_batch: int,
    cap_tokens: int,
    *,
    ranks: int = 1,
    folds: Sequence[Lengths] = (),
) -> tuple[PaddedCut, ...]:
    """Fit padded cuts with fewer micro-batches than pad the least, the fewest first.

    They suit a device that takes longer to start a micro-batch than to compute some padding.
    """
    parts, longest = _sample((lengths, *folds), effective_batch, cap_tokens, ranks)
    best = fit_padded_parts(parts, longest, cap_tokens)
    profile = _profile(parts, longest, _MULTIPLE)
    cuts = (_cut_of(profile, rows)[1] for rows in _Runs.of(profile, cap_tokens).by_count())
    return tuple(cut for cut in cuts if cut.micro_batches < best.micro_batches)


def _sample(
    folds: Sequence[Lengths], effective_batch: int, cap_tokens: int, ranks: int, seed: int = 0
) -> tuple[list[list[int]], int]:
    """Sample the steps of every fold, and find the longest sequence.

    Fold n is dealt with the seed `seed + n`, as in training.
    """
    arrays = [check_lengths(lengths) for lengths in folds]
    longest = max(int(array.max()) for array in arrays)
    check_fits(longest, check_whole("the cap in tokens", cap_tokens))
    parts = [
        part
        for number, array in enumerate(arrays)
        for part in sample_parts(array, effective_batch, ranks, seed + number, len(arrays))
    ]
    return parts, longest
