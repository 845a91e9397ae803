"""Padded micro-batches of sequences of similar length, where attention cannot take packed rows.

All of them have one of a few shapes, so that each shape is compiled, or captured as a CUDA graph,
once. Rows without a sequence fill a shape up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self, TypeAlias

import numpy as np

from trainfit.core.records import Record
from trainfit.packing.packed import MicroBatch
from trainfit.packing.steps import IntArray, check_fits, divide_up, round_up

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
        batches = []
        start = 0
        for count, (rows, width) in shapes:
            chosen = slice(start, start + count)
            batches.append(
                MicroBatch(
                    sequences=tuple(part[chosen].tolist()),
                    tokens=sum(values[chosen]),
                    rows=rows,
                    width=width,
                )
            )
            start += count
        return batches

    def _as_fitted(self, values: list[int]) -> list[tuple[int, Shape]]:
        """Sequences and shape of each micro-batch of a whole step; empty where one has no shape."""
        if sum(self.rows) != len(values):
            return []
        found = []
        start = 0
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
        found = []
        start = 0
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


def fit_coarser_parts(parts: list[list[int]], longest: int, cap_tokens: int) -> list[PaddedCut]:
    """Fit cuts with fewer micro-batches than `fit_padded_parts` has, the fewest first."""
    best = fit_padded_parts(parts, longest, cap_tokens)
    profile = _profile(parts, longest, _MULTIPLE)
    cuts = (_cut_of(profile, rows)[1] for rows in _Runs.of(profile, cap_tokens).by_count())
    return [cut for cut in cuts if cut.micro_batches < best.micro_batches]


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
    for _ in range(
        MOST_SHAPES - sum(taken.values())
    ):  # one width more never saves more than the last did
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
