"""Padded micro-batches of sequences of like length, where attention cannot take packed rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Self

import numpy as np

from trainfit.core.records import Record
from trainfit.packing.packed import MicroBatch
from trainfit.packing.steps import (
    IntArray,
    check_fits,
    round_up,
)

# Cost of starting a micro-batch, in tokens: a finer cut must save more padding than that.
_START_COST = 256
# Cost of an impossible cut, with room for additions.
_NEVER = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedCut(Record):
    """How steps are cut into padded micro-batches: longest first, a fixed number of rows each."""

    tokens: int
    """The most tokens of a micro-batch, padding included; it sets the memory."""
    widths: tuple[int, ...]
    """The lengths that sequences are padded to, the smallest first."""
    rows: tuple[int, ...]
    """Rows of each micro-batch in a rank's part of a whole step."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a whole step, on each rank."""
        return len(self.rows)

    def empty(self) -> MicroBatch:
        """A micro-batch of padding alone."""
        return MicroBatch(sequences=(), tokens=0, rows=1, width=self.widths[0])

    def cut(self, lengths: IntArray, part: IntArray) -> list[MicroBatch]:
        """Cut a rank's part of a step, which comes longest first."""
        if not part.size:
            return []
        values = lengths[part]
        check_fits(int(values[0]), self.widths[-1])
        widths = _pad(values, self.widths)
        rows = self.rows
        if sum(rows) != part.size:
            rows = _best_rows(widths[None], self.tokens, at_most=self.micro_batches)
        batches = []
        start = 0
        for end in _ends(rows, widths.tolist(), self.tokens):
            batches.append(
                MicroBatch(
                    sequences=tuple(part[start:end].tolist()),
                    tokens=int(values[start:end].sum()),
                    rows=end - start,
                    width=int(widths[start]),
                )
            )
            start = end
        return batches


def fit_padded_parts(
    parts: list[list[int]],
    widths: tuple[int, ...],
    cap_tokens: int,
    at_least: int = 1,
    at_most: int | None = None,
) -> PaddedCut:
    """Fit the rows per micro-batch that pad the least, under a cap in tokens with padding.

    Dealt steps have nearly the same lengths, so the same rows suit them all and the shapes stay
    few. A step has between `at_least` and `at_most` micro-batches, or as few as the cap allows.
    """
    profile = _profile(parts, widths)
    return _cut_of(profile, widths, _best_rows(profile, cap_tokens, at_least, at_most))


def fit_coarser_parts(
    parts: list[list[int]], widths: tuple[int, ...], cap_tokens: int
) -> list[PaddedCut]:
    """Fit cuts with fewer micro-batches than `fit_padded_parts` has, the fewest first."""
    profile = _profile(parts, widths)
    most = len(_best_rows(profile, cap_tokens))
    fewer = takewhile(lambda rows: len(rows) < most, _rows_by_count(_Runs.of(profile, cap_tokens)))
    return [_cut_of(profile, widths, rows) for rows in fewer]


def _profile(parts: list[list[int]], widths: tuple[int, ...]) -> IntArray:
    """The widths of the sequences of each whole step, the longest first."""
    whole = max(map(len, parts))
    return _pad(np.array([part for part in parts if len(part) == whole]), widths)


def _cut_of(profile: IntArray, widths: tuple[int, ...], rows: tuple[int, ...]) -> PaddedCut:
    firsts = np.cumsum((0, *rows[:-1]))
    largest = int((profile.max(axis=0)[firsts] * rows).max())
    return PaddedCut(tokens=max(largest, widths[-1]), widths=widths, rows=rows)


def choose_widths(lengths: IntArray, most: int = 8, multiple: int = 32) -> tuple[int, ...]:
    """Choose at most `most` widths, multiples of `multiple`, to which padding adds few tokens."""
    # At most the longest, since a model may have no positions beyond it.
    padded = round_up(lengths, multiple, int(lengths.max()))
    sizes, counts = np.unique(padded, return_counts=True)
    while sizes.size > most:
        least = int((counts[:-1] * np.diff(sizes)).argmin())
        counts[least + 1] += counts[least]
        sizes, counts = np.delete(sizes, least), np.delete(counts, least)
    return tuple(sizes.tolist())


def _pad(values: IntArray, widths: tuple[int, ...]) -> IntArray:
    """The width that each length is padded to."""
    return np.array(widths)[np.searchsorted(widths, values)]


def _best_rows(
    profile: IntArray, cap: int, at_least: int = 1, at_most: int | None = None
) -> tuple[int, ...]:
    """Choose the rows of each micro-batch, longest sequences first, so that all steps pad least.

    `profile` has the widths of one step in each row, the longest first.
    """
    steps, size = profile.shape
    cost = np.zeros(size + 1, dtype=np.int64)
    first = np.zeros(size + 1, dtype=np.int64)
    runs = _Runs.of(profile, cap)
    for end in range(1, size + 1):
        first[end], cost[end] = runs.last(cost, end, steps * _START_COST)
    ends = [size]
    while ends[-1]:
        ends.append(int(first[ends[-1]]))
    rows = tuple(np.diff(ends[::-1]).tolist())
    wanted = min(max(len(rows) if at_most is None else min(len(rows), at_most), at_least), size)
    if len(rows) == wanted:
        return rows
    return next(rows for rows in _rows_by_count(runs) if len(rows) >= wanted)


def _rows_by_count(runs: _Runs) -> Iterator[tuple[int, ...]]:
    """Yield the rows that pad the least, for each number of micro-batches that the cap allows.

    Of those that pad the same, the most even ones take the least memory.
    """
    size = runs.total.size
    scale = min(size**2 + 1, _NEVER // (4 * size * int(runs.total.max())))
    runs = replace(runs, total=runs.total * scale, uneven=1)
    cost = np.full(size + 1, _NEVER)
    cost[0] = 0
    firsts: list[IntArray] = []
    for _ in range(size):
        found = [(0, _NEVER), *(runs.last(cost, end) for end in range(1, size + 1))]
        first, cost = np.array(found, dtype=np.int64).T
        firsts.append(first)
        if cost[size] < _NEVER:
            ends = [size]
            for first in reversed(firsts):
                ends.append(int(first[ends[-1]]))
            yield tuple(np.diff(ends[::-1]).tolist())


@dataclass(frozen=True, slots=True)
class _Runs:
    """Costs of runs of sequences as micro-batches: rows times the width of the first sequence."""

    total: IntArray
    """The width of each sequence, over all steps."""
    most: IntArray
    cap: int
    uneven: int = 0
    """Weight of the squared number of rows, which prefers even micro-batches."""

    @classmethod
    def of(cls, profile: IntArray, cap: int) -> Self:
        """Build the costs for steps with these widths."""
        return cls(profile.sum(axis=0), profile.max(axis=0), cap)

    def last(self, cost: IntArray, end: int, start: int = 0) -> tuple[int, int]:
        """Find where the micro-batch that ends at `end` starts, and the cost of all up to it."""
        rows = end - np.arange(end)
        options = cost[:end] + rows * (self.total[:end] + self.uneven * rows) + start
        options[rows * self.most[:end] > self.cap] = _NEVER
        first = int(options.argmin())
        return first, min(int(options[first]), _NEVER)


def _ends(rows: tuple[int, ...], widths: list[int], cap: int) -> Iterator[int]:
    """Yield where each micro-batch of a step ends; one over the cap is cut again."""
    start = 0
    for end in np.cumsum(rows).tolist():
        while start < end:
            start = min(end, start + cap // widths[start])
            yield start
