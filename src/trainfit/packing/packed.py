"""Packed micro-batches: sequences end to end in one row of a fixed number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trainfit.core.records import Record
from trainfit.packing.steps import IntArray, check_fits, divide_up, emptiest_first, round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch(Record):
    """Sequences that go through the model together, and the shape they go in.

    A packed one has a single row that holds the sequences end to end; a padded one has a row for
    each. One without sequences is all filler: it keeps the ranks in step.
    """

    sequences: tuple[int, ...]
    tokens: int
    """Tokens of the sequences, without filler or padding."""
    rows: int
    width: int


# Share of steps that may need one more micro-batch than planned.
_EXCEPTIONS = 0.02
# A second shape costs a second compilation: it is used below this fill and from this gain on.
_GOOD_FILL = 0.972
_LEAST_GAIN = 0.01
# Spare room for steps of later epochs: one token too many would cost a micro-batch.
_MARGIN = 1 / 512


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCut(Record):
    """How steps are cut into packed micro-batches of one or two fixed shapes."""

    part_size: int
    """Sequences of a whole step that a rank gets, at most."""
    micro_batches: int
    """Micro-batches of a whole step on each rank; a step that does not fit takes one more."""
    budgets: tuple[int, ...]
    """Tokens of a micro-batch: one shape or two, the smaller first."""
    slots: int
    """Maximum sequences in a micro-batch: the fixed size of tensors with one item per sequence."""

    @property
    def tokens(self) -> int:
        """Tokens of the largest micro-batch, which sets the memory."""
        return self.budgets[-1]

    def empty(self) -> MicroBatch:
        """A micro-batch of filler alone."""
        return MicroBatch(sequences=(), tokens=0, rows=1, width=self.budgets[0])

    def cut(self, lengths: IntArray, part: IntArray) -> list[MicroBatch]:
        """Cut a rank's part of a step, which comes longest first."""
        if not part.size:
            return []
        values = lengths[part].tolist()
        check_fits(values[0], self.tokens)
        # A partial step gets fewer micro-batches, not emptier ones.
        start = divide_up(self.micro_batches * part.size, self.part_size)
        groups = _fewest(values, start, self.tokens, self.slots)
        return [self._pack(group, values, part) for group in groups]

    def _pack(self, group: list[int], values: list[int], part: IntArray) -> MicroBatch:
        tokens = sum(values[at] for at in group)
        width = next(budget for budget in self.budgets if tokens <= budget)
        return MicroBatch(sequences=tuple(part[group].tolist()), tokens=tokens, rows=1, width=width)


def fit_packed_parts(
    parts: list[list[int]], longest: int, cap_tokens: int, multiple: int = 64, at_least: int = 1
) -> PackedCut:
    """Fit the fewest micro-batches per step (`at_least` or more) under the cap, and their budget.

    The cap, batch_size × max_length, is what memory allows; the budget is what the steps need of
    it, rounded up to a `multiple`. A few steps may be exceptions: they get the second shape, or
    one micro-batch more.
    """
    size = max(map(len, parts))
    whole = [part for part in parts if len(part) == size]
    fewest = [_split(part, at_least, cap_tokens) for part in whole]
    count = _all_but_exceptions(list(map(len, fewest)))
    groups = [
        group
        for part, cut in zip(whole, fewest, strict=True)
        for group in (cut if len(cut) >= count else _split(part, count, cap_tokens))
    ]
    # Whole steps set the budget, and partial steps use it; but of a step that does not divide among
    # the ranks, the smaller share may have more tokens.
    smaller = [part for part in parts if len(part) < size]
    starts = [divide_up(count * len(part), size) for part in smaller]
    for part, start in zip(smaller, starts, strict=True):
        if start == count:
            groups += _split(part, start, cap_tokens)
    most = max(map(sum, groups))
    roomy = math.ceil(most * (1 + _MARGIN)) if most > longest else longest
    budget = int(round_up(roomy, multiple, cap_tokens))
    for part, start in zip(smaller, starts, strict=True):
        if start < count:
            groups += _split(part, start, budget)
    return PackedCut(
        part_size=size,
        micro_batches=count,
        budgets=_choose_budgets(np.array([sum(group) for group in groups]), budget, multiple),
        slots=max(map(len, groups)),
    )


def _fewest(
    lengths: list[int], start: int, budget: int, room: int | None = None
) -> list[list[int]]:
    """Group the sequences into the fewest micro-batches (`start` or more) within the budget."""
    size = len(lengths)
    room = room or size
    count = max(min(start, size), divide_up(size, room), divide_up(sum(lengths), budget))
    if count == 1:
        return [list(range(size))]
    while True:  # ends, at the latest, with a micro-batch for each sequence
        groups: list[list[int]] = [[] for _ in range(count)]
        tokens = [0] * count
        for at, group in enumerate(emptiest_first(lengths, count, room)):
            groups[group].append(at)
            tokens[group] += lengths[at]
        if max(tokens) <= budget:
            return groups
        count += 1


def _split(lengths: list[int], start: int, budget: int) -> list[list[int]]:
    """Group lengths as `_fewest` does, by length and not by index."""
    return [[lengths[at] for at in group] for group in _fewest(lengths, start, budget)]


def _all_but_exceptions(counts: list[int]) -> int:
    """Return the count that suffices for all steps but a few."""
    return sorted(counts)[-1 - int(len(counts) * _EXCEPTIONS)]


def _choose_budgets(totals: IntArray, budget: int, multiple: int) -> tuple[int, ...]:
    """Return the budget, which holds every total, after a smaller one where that pays."""
    roomy = np.ceil(totals * (1 + _MARGIN)).astype(np.int64)
    sizes, counts = np.unique(round_up(roomy, multiple, budget), return_counts=True)
    held = np.cumsum(counts)
    with_one = budget * totals.size
    with_two = sizes * held + budget * (totals.size - held)
    best = int(with_two.argmin())
    enough = int(totals.sum()) >= _GOOD_FILL * with_one
    if enough or with_two[best] > (1 - _LEAST_GAIN) * with_one:
        return (budget,)
    return int(sizes[best]), budget
