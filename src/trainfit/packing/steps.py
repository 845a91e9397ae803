"""The sequences of each optimizer step, each rank's part of them, and packed micro-batches.

Steps are dealt, not drawn. A drawn step has as many tokens as chance gives it, and a fixed budget
must then hold the worst; a dealt one has its exact number of sequences and nearly the same tokens
as every other. All is a pure function of lengths, seed and epoch, so a run resumes at step s by
dealing again and leaving out the first s. A packed micro-batch has its sequences end to end in one
row of a fixed number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heapreplace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainfit.core.errors import BadInput
from trainfit.core.records import Record

IntArray: TypeAlias = NDArray[np.int64]
Lengths: TypeAlias = Sequence[int] | IntArray


def check_lengths(lengths: Lengths) -> IntArray:
    """Return the lengths as an array, or raise BadInput for the first invalid one."""
    array = np.asarray(lengths)
    if array.size == 0:
        raise BadInput("there are no sequences", "give one or more")
    if array.ndim != 1:
        raise BadInput(f"the lengths have the shape {array.shape}", "give one for each sequence")
    if not np.issubdtype(array.dtype, np.integer):
        raise BadInput(f"the lengths are of type {array.dtype}", "give whole numbers of tokens")
    if array.min() < 1:
        at = int(array.argmin())
        fix = "leave out sequences without tokens"
        raise BadInput(f"sequence {at} has {array[at]} tokens", fix)
    return array.astype(np.int64, copy=False)


def check_whole(name: str, value: int, least: int = 1) -> int:
    """Return the value, or raise BadInput when it is below `least`."""
    if value < least:
        raise BadInput(f"{name} is {value}", f"give {least} or more")
    return value


def check_fits(longest: int, limit: int) -> None:
    """Raise BadInput for a sequence that no micro-batch can hold."""
    if longest > limit:
        fix = f"truncate to {limit} or less (data.max_length) or raise training.batch_size"
        raise BadInput(f"a sequence of {longest} tokens does not fit a micro-batch of {limit}", fix)


def divide_up(value: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-value // by)


def round_up(values: IntArray | int, multiple: int, limit: int) -> IntArray:
    """Round up to multiples, but never over the limit, which no value exceeds."""
    rounded: IntArray = np.minimum(-(-np.asarray(values) // multiple) * multiple, limit)
    return rounded


# Shortest strata, dealt in order of length to level out the tokens of the steps.
_LEVELLING_STRATA = 2
# Sample that shapes are fitted to: large enough that other epochs rarely need more.
_SAMPLE_SEQUENCES = 1 << 16
_SAMPLE_LEAST_STEPS = 64
_SAMPLE_EPOCHS = 64


def deal_steps(
    lengths: Lengths, effective_batch: int, seed: int, epoch: int = 0
) -> tuple[IntArray, ...]:
    """Deal the sequences of an epoch, by index, into optimizer steps.

    Each sequence is in one step. Every step has `effective_batch` sequences (over all ranks),
    except the last one, which has what remains.
    """
    array = check_lengths(lengths)
    check_whole("effective_batch_size", effective_batch)
    check_whole("the seed", seed, least=0)
    check_whole("the epoch", epoch, least=0)
    steps, rest = divmod(array.size, effective_batch)
    # Raw bits and a stable sort, since numpy keeps its bit streams the same in every release, but
    # not its shuffle.
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch)))
    keys = bits.random_raw(array.size)
    ordered: IntArray = np.lexsort((keys, -array))
    ordered, partial = _take_evenly(ordered, rest, int(bits.random_raw()))
    if not steps:
        return (partial,)
    ordered = _shuffle_strata(ordered, keys, effective_batch)
    groups = np.array(emptiest_first(array[ordered].tolist(), steps, effective_batch))
    full = ordered[np.argsort(groups, kind="stable")].reshape(steps, effective_batch)
    full = full[np.argsort(bits.random_raw(steps), kind="stable")]
    return (*full, partial) if rest else tuple(full)


def _take_evenly(ordered: IntArray, count: int, offset: int) -> tuple[IntArray, IntArray]:
    """Split off `count` sequences, evenly over the lengths: a partial step as mixed as any."""
    if not count:
        return ordered, ordered[:0]
    size = ordered.size
    taken = (np.arange(count) * size + offset % size) // count
    return np.delete(ordered, taken), ordered[taken]


def _shuffle_strata(ordered: IntArray, keys: NDArray[np.uint64], effective_batch: int) -> IntArray:
    """Shuffle sequences of similar length among themselves: every epoch's steps are new sets.

    A stratum has one sequence for each step.
    """
    steps = ordered.size // effective_batch
    # In pairs, levelling would match the same two sequences in every epoch.
    levelling = min(_LEVELLING_STRATA, max(effective_batch - 2, 0))
    shuffled = keys[ordered]
    shuffled[ordered.size - levelling * steps :] = 0
    return ordered[np.lexsort((shuffled, np.arange(ordered.size) // steps))]


def emptiest_first(lengths: Iterable[int], groups: int, room: int) -> list[int]:
    """Assign each sequence to the group with the fewest tokens that still has room."""
    heap = list(range(groups))  # tokens * groups + group, in one integer, since tuples are slow
    rooms = [room] * groups
    dealt = []
    for length in lengths:
        lightest = heap[0]
        group = lightest % groups
        dealt.append(group)
        rooms[group] -= 1
        if rooms[group]:
            heapreplace(heap, lightest + length * groups)
        else:
            heappop(heap)
    return dealt


def share_step(lengths: IntArray, step: IntArray, ranks: int = 1) -> tuple[IntArray, ...]:
    """Split a step into one part per rank, longest sequences first.

    The parts have nearly the same tokens, and the same number of sequences where it divides. They
    do not depend on how the step is cut into micro-batches.
    """
    check_whole("the number of ranks", ranks)
    ordered = step[np.argsort(-lengths[step], kind="stable")]
    if ranks == 1:
        return (ordered,)
    room = divide_up(step.size, ranks)
    groups = np.array(emptiest_first(lengths[ordered].tolist(), ranks, room))
    return tuple(ordered[groups == rank] for rank in range(ranks))


def sample_parts(
    lengths: IntArray, effective_batch: int, ranks: int, seed: int = 0, folds: int = 1
) -> list[list[int]]:
    """Sample the parts of steps that shapes are fitted to: their lengths, longest first.

    They come from a few epochs, or from one that is large, since dealt steps are much alike; so
    each of several `folds` needs only a share of the sample.
    """
    check_whole("effective_batch_size", effective_batch)
    most = max(_SAMPLE_SEQUENCES // (effective_batch * folds), _SAMPLE_LEAST_STEPS)
    epochs = min(_SAMPLE_EPOCHS, divide_up(most * effective_batch, lengths.size))
    sampled = []
    for epoch in range(epochs):
        *full, last = deal_steps(lengths, effective_batch, seed, epoch)
        for step in (*full[:most], last):
            parts = share_step(lengths, step, ranks)
            sampled += [lengths[part].tolist() for part in parts if part.size]
    return sampled


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
        packed = [self._pack(group, values, part) for group in groups]
        # In one order: each order of two shapes would be captured as a CUDA graph by itself.
        return sorted(packed, key=lambda batch: -batch.width)

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
    count = sorted(map(len, fewest))[-1 - int(len(fewest) * _EXCEPTIONS)]
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
