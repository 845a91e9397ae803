"""Cuts: the union is the step whatever the cut, shapes are fixed and few, and well filled."""

from __future__ import annotations

from itertools import chain, combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from packing_lengths import fill_of, fit_budget, fit_padded, redsm5_lengths

from trainfit.core.errors import BadInput
from trainfit.packing import (
    Cut,
    MicroBatch,
    PackedCut,
    PaddedCut,
    coarser_cuts,
    cut_step,
    deal_steps,
    ladder,
)
from trainfit.packing.cut_ladder import MOST_SHAPES, quantize

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def cut_epoch(
    lengths: np.ndarray, batch: int, cut: Cut, ranks: int = 1, epoch: int = 0
) -> list[tuple[tuple[MicroBatch, ...], ...]]:
    return [cut_step(lengths, step, cut, ranks) for step in deal_steps(lengths, batch, 0, epoch)]


def flat(steps: list[tuple[tuple[MicroBatch, ...], ...]]) -> list[MicroBatch]:
    return [batch for step in steps for rank in step for batch in rank]


# ── whatever the lengths and settings ─────────────────────────────────────────────────────────


@settings(max_examples=60)
@given(
    lengths=LENGTHS,
    batch=st.integers(1, 40),
    spare=st.integers(0, 2000),
    ranks=st.integers(1, 3),
    padded=st.booleans(),
    epoch=st.sampled_from([0, 99]),  # one that the shapes were fitted to, and one that was not
)
def test_the_union_over_ranks_and_cuts_is_the_step(
    lengths: list[int], batch: int, spare: int, ranks: int, padded: bool, epoch: int
) -> None:
    array = np.array(lengths)
    cap = max(lengths) + spare
    rungs = ladder(array, batch, cap, padded=padded, ranks=ranks)
    assert all(low.tokens < high.tokens <= cap for high, low in pairwise(rungs))
    for cut, step in product(rungs, deal_steps(array, batch, 0, epoch)):
        by_rank = cut_step(array, step, cut, ranks)
        assert len(by_rank) == ranks
        assert len({len(own) for own in by_rank}) == 1
        own = [[i for b in own for i in b.sequences] for own in by_rank]
        assert sorted(chain(*own)) == sorted(step.tolist())
        first = cut_step(array, step, rungs[0], ranks)
        assert [set(o) for o in own] == [{i for b in o for i in b.sequences} for o in first]
        for micro in flat([by_rank]):
            check_micro_batch(array, cut, micro)


def check_micro_batch(lengths: np.ndarray, cut: Cut, micro: MicroBatch) -> None:
    held = [int(lengths[i]) for i in micro.sequences]
    assert micro.tokens == sum(held)
    assert micro.rows * micro.width <= cut.tokens
    if isinstance(cut, PackedCut):
        assert micro.rows == 1
        assert micro.width == min(b for b in cut.budgets if b >= micro.tokens)
        assert len(held) <= cut.slots
        assert len(cut.budgets) <= 2
    else:
        assert len(cut.shapes) <= 8
        assert (micro.rows, micro.width) in cut.shapes
        assert len(held) <= micro.rows
        assert max(held, default=1) <= micro.width


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(9, 20))
def test_the_fewest_micro_batches_are_close_to_brute_force(lengths: list[int], cap: int) -> None:
    array = np.array(lengths)
    best = next(
        k
        for k in range(1, len(lengths) + 1)
        if any(
            max(np.bincount(places, weights=array)) <= cap
            for places in product(range(k), repeat=len(lengths))
        )
    )
    cut = fit_budget(array, len(lengths), cap, multiple=1)
    assert best <= cut.micro_batches <= best + 1
    assert len(cut_step(array, np.arange(array.size), cut)[0]) == cut.micro_batches


def padded_sizes(lengths: list[int], cap: int) -> list[list[int]]:
    """The micro-batches' tokens by every cut of a step that the cap allows."""
    ordered = sorted(lengths, reverse=True)
    inner = range(1, len(ordered))
    found = []
    for mask in range(0, 2 ** len(ordered), 2):
        ends = [i for i in inner if mask >> i & 1]
        runs = [ordered[a:b] for a, b in zip((0, *ends), (*ends, len(ordered)), strict=True)]
        found.append([len(run) * run[0] for run in runs])
    return [sizes for sizes in found if max(sizes) <= cap]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=9))
def test_padded_rows_pad_no_more_than_any_other_cut(lengths: list[int]) -> None:
    array = np.array(lengths)
    cap = 2 * max(lengths)
    cut = fit_padded(array, len(lengths), cap, multiple=1)
    batches = cut_step(array, np.arange(array.size), cut)[0]
    best = min(sum(sizes) + 256 * len(sizes) for sizes in padded_sizes(lengths, cap))
    assert sum(b.rows * b.width + 256 for b in batches) <= 1.01 * best


@settings(max_examples=60)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 4))
def test_fewer_padded_micro_batches_pad_no_more_than_they_must(
    lengths: list[int], at_most: int, longest: int
) -> None:
    array, cap = np.array(lengths), longest * max(lengths)
    free = fit_padded(array, len(lengths), cap, multiple=1)
    cut = fit_padded(array, len(lengths), cap, multiple=1, at_most=at_most)
    if free.micro_batches <= at_most:
        assert cut == free
        return
    allowed = padded_sizes(lengths, cap)
    count = max(at_most, min(map(len, allowed)))
    batches = cut_step(array, np.arange(array.size), cut)[0]
    assert len(batches) <= count
    best = min(sum(sizes) + 256 * len(sizes) for sizes in allowed if len(sizes) <= count)
    assert sum(b.rows * b.width + 256 for b in batches) <= 1.01 * best


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=MOST_SHAPES),  # more would share a shape
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_a_number_of_micro_batches_is_kept_with_the_least_padding(
    lengths: list[int], wanted: int, rows: int
) -> None:
    array, cap = np.array(lengths), rows * max(lengths)
    count = {"at_least": wanted, "at_most": wanted}
    cut = fit_padded(array, len(lengths), cap, multiple=1, **count)
    allowed = padded_sizes(lengths, cap)
    exactly = max(min(wanted, len(lengths)), min(map(len, allowed)))
    assert cut.micro_batches == exactly
    batches = cut_step(array, np.arange(array.size), cut)[0]
    best = min(sum(sizes) for sizes in allowed if len(sizes) == exactly)
    assert sum(b.rows * b.width for b in batches) == best


def test_micro_batches_that_pad_the_same_are_even() -> None:
    for count in (2, 4, 8):
        cut = ladder([20] * 64, 32, 32 * 192, padded=True, at_least=count, at_most=count)[0]
        assert isinstance(cut, PaddedCut)
        assert cut.rows == (32 // count,) * count


@settings(max_examples=60)
@given(
    lengths=LENGTHS,
    batch=st.integers(1, 12),
    steps=st.integers(1, 6),
    ranks=st.integers(1, 3),
    padded=st.booleans(),
)
def test_batch_times_accumulation_is_always_cut_into_so_many(
    lengths: list[int], batch: int, steps: int, ranks: int, padded: bool
) -> None:
    """Micro-batches of `batch` rows of the longest length hold any step of as many sequences."""
    effective = batch * steps * ranks
    counted = {"at_least": steps, "at_most": steps}
    cap = batch * max(lengths)
    cut = ladder(lengths, effective, cap, padded=padded, ranks=ranks, **counted)[0]
    share = -(-min(len(lengths), effective) // ranks)
    assert cut.micro_batches == min(steps, share)
    assert cut.tokens <= cap


@settings(max_examples=40)
@given(
    folds=st.lists(LENGTHS, min_size=1, max_size=4),
    batch=st.integers(1, 20),
    ranks=st.integers(1, 2),
    padded=st.booleans(),
)
@example(folds=[[1, 1, 1, 1, 1, 1, 18, 45, 45]], batch=9, ranks=2, padded=False)
def test_every_step_of_every_fold_fits_the_one_cut_of_all(
    folds: list[list[int]], batch: int, ranks: int, padded: bool
) -> None:
    assume(batch <= min(map(len, folds)))  # else a whole step of one fold is partial in another
    first, *others = folds
    longest = max(map(max, folds))
    how = {"padded": padded, "ranks": ranks, "seed": 7, "at_most": 1}
    cut = ladder(first, batch, batch * longest, folds=others, **how)[0]
    assert cut.micro_batches == 1
    for seed, lengths in enumerate(folds, 7):
        array = np.array(lengths)
        for epoch in range(2):
            for step in deal_steps(array, batch, seed, epoch):
                for [micro] in cut_step(array, step, cut, ranks):
                    assert len(micro.sequences) <= batch
                    check_micro_batch(array, cut, micro)
    if not padded and len(folds) > 1:  # the largest fold decides, whichever it is
        how["seed"] = 7 + len(others)
        assert ladder(others[-1], batch, batch * longest, **how)[0].tokens <= cut.tokens


def test_coarser_cuts_start_fewer_and_pad_more() -> None:
    lengths = redsm5_lengths()
    plain = ladder(lengths, 64, 64 * 512, padded=True)[0]
    coarser = coarser_cuts(lengths, 64, 64 * 512)
    assert [cut.micro_batches for cut in coarser] == list(range(1, plain.micro_batches))
    fills = [fill_of(flat(cut_epoch(lengths, 64, cut))) for cut in (*coarser, plain)]
    assert fills == sorted(fills)
    assert coarser[0].rows == (64,)
    # Bounded by the cap: two halves need not fit.
    assert coarser_cuts(lengths, 64, 16 * 512)[0].micro_batches > 2
    assert coarser_cuts([100] * 64, 64, 6400) == ()


# ── fill and shapes on lengths like ReDSM5's ──────────────────────────────────────────────────


@pytest.mark.parametrize("batch", [16, 32, 64, 128])
@pytest.mark.parametrize(("count", "least"), [(1, 0.97), (2, 0.95)])
def test_fill_of_packed_steps(batch: int, count: int, least: float) -> None:
    lengths = redsm5_lengths()
    cut = fit_budget(lengths, batch, batch * 512 // count)
    assert cut.micro_batches == count
    for epoch in (0, 1, 20):
        steps = cut_epoch(lengths, batch, cut, epoch=epoch)
        assert {len(step[0]) for step in steps[:-1]} == {count}
        held = flat(steps)
        assert fill_of(held) >= least
        assert len({(b.rows, b.width) for b in held}) <= 2


@pytest.mark.parametrize("sequences", [200, 500, 1187])
def test_small_data_are_filled_too_with_their_partial_step(sequences: int) -> None:
    lengths = np.random.default_rng(0).permutation(redsm5_lengths())[:sequences]
    cut = fit_budget(lengths, 32, 32 * 512)
    for epoch in (0, 3, 70):
        held = flat(cut_epoch(lengths, 32, cut, epoch=epoch))
        assert fill_of(held) >= 0.95
        assert len({(b.rows, b.width) for b in held}) <= 2


def test_budgets_are_multiples_under_the_cap() -> None:
    lengths = redsm5_lengths()
    assert fit_budget(lengths, 64, 8192).tokens % 64 == 0
    assert fit_budget(lengths, 64, 8192, multiple=128).tokens % 128 == 0
    assert fit_budget(lengths, 16, 4900).tokens == 4900  # rounding up would break the cap


def test_steps_of_two_shapes_come_in_few_mixes() -> None:
    """Each is captured by itself, at most 24, and 8 micro-batches may stand in 256 orders."""
    lengths = redsm5_lengths()
    cut = ladder(lengths, 32, 32 * 512, padded=False, at_least=8, at_most=8)[0]
    assert isinstance(cut, PackedCut)
    assert len(cut.budgets) == 2
    mixes = [tuple(b.width for b in step[0]) for step in cut_epoch(lengths, 32, cut)]
    assert len(set(mixes)) <= len({(len(mix), sum(mix)) for mix in mixes}) <= 12


def test_one_outlier_does_not_cost_all_steps_a_micro_batch() -> None:
    lengths = np.array([100] * 1599 + [900])
    cut = fit_budget(lengths, 16, 1700)
    assert cut.micro_batches == 1
    counts = [len(step[0]) for step in cut_epoch(lengths, 16, cut)]
    assert sorted(counts) == [1] * 99 + [2]
    assert fill_of(flat(cut_epoch(lengths, 16, cut))) > 0.9


@pytest.mark.parametrize(("batch", "least"), [(16, 0.85), (64, 0.9), (128, 0.91)])
@pytest.mark.parametrize("rows", [8, 64])
def test_padded_batches_pad_little_in_few_shapes(batch: int, least: float, rows: int) -> None:
    lengths = redsm5_lengths()
    cut = fit_padded(lengths, batch, rows * 512)
    steps = cut_epoch(lengths, batch, cut, epoch=20)
    held = flat(steps)
    to_longest = lengths.mean() / 512
    assert fill_of(held) > least > to_longest
    assert len({(b.rows, b.width) for b in held}) <= 8
    # A whole step is one CUDA graph, so their mixes are to be few as well.
    assert len({tuple((b.rows, b.width) for b in step[0]) for step in steps}) <= 4


@pytest.mark.parametrize("count", [9, 13, 40, 64])
def test_more_micro_batches_than_shapes_are_so_many_all_the_same(count: int) -> None:
    lengths = redsm5_lengths()
    cut = fit_padded(lengths, 64, 8 * 512, at_least=count, at_most=count)
    assert cut.micro_batches == count
    assert len(cut.shapes) <= 8
    whole = cut_epoch(lengths, 64, cut)[:-1]
    assert np.mean([len(step[0]) == count for step in whole]) > 0.9


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 4))
def test_values_are_rounded_up_to_those_that_add_the_least(values: list[int], most: int) -> None:
    found = quantize(np.array(values), most)
    assert len(found) == min(most, len(set(values)))
    for count, (total, chosen) in enumerate(found, 1):
        sets = combinations(sorted(set(values)), count)
        totals = [
            sum(min(c for c in kept if c >= v) for v in values)
            for kept in sets
            if max(kept) == max(values)
        ]
        assert total == min(totals)
        assert total == sum(min(c for c in chosen if c >= value) for value in values)


def test_bucketing_comes_before_padding() -> None:
    # Padding first makes all lengths equal, and then there is nothing left to gain.
    cut = fit_padded(redsm5_lengths(), 16, 16 * 512)
    assert len({width for _, width in cut.shapes}) > 1
    assert cut.tokens < 16 * 512


def test_widths_never_exceed_the_longest_sequence() -> None:
    assert fit_padded([500, 33, 90], 3, 1000).shapes == ((2, 96), (1, 500))


# ── cuts and ladders ──────────────────────────────────────────────────────────────────────────


def test_any_effective_batch_is_cut_as_memory_allows() -> None:
    lengths = np.full(640, 512)
    cut = fit_budget(lengths, 64, 23 * 512)
    assert cut.micro_batches == 3
    sizes = [len(batch.sequences) for batch in cut_step(lengths, np.arange(64), cut)[0]]
    assert sum(sizes) == 64
    assert max(sizes) <= 23


def test_the_ladder_doubles_the_cuts_down_to_the_longest_sequence() -> None:
    rungs = ladder(redsm5_lengths(), 64, 16 * 512)
    counts = [rung.micro_batches for rung in rungs]
    assert counts == [3 * 2**i for i in range(5)]
    assert rungs[-1].tokens == 512
    padded = ladder(redsm5_lengths(), 64, 16 * 512, padded=True)
    assert [rung.tokens for rung in padded] == [8192, 4096, 2048, 1024, 512]


def test_a_partial_step_gets_fewer_micro_batches() -> None:
    lengths = redsm5_lengths()[: 64 * 20 + 10]
    cut = fit_budget(lengths, 64, 16 * 512, at_least=4)
    counts = [len(step[0]) for step in cut_epoch(lengths, 64, cut)]
    assert counts == [4] * 20 + [1]


def test_ranks_with_nothing_to_do_keep_step_with_empty_micro_batches() -> None:
    lengths = np.array([5, 7, 3])
    for cut in (fit_budget(lengths, 3, 64, ranks=4), fit_padded(lengths, 3, 64, ranks=4)):
        by_rank = cut_step(lengths, [0, 1, 2], cut, ranks=4)
        assert [len(own) for own in by_rank] == [1] * 4
        assert by_rank[3][0].sequences == ()
        assert by_rank[3][0].tokens == 0


def test_a_dataset_of_one_sequence() -> None:
    for cut in (*ladder([37], 16, 512), *ladder([37], 16, 512, padded=True)):
        assert cut.micro_batches == 1
        ((batch,),) = cut_step(np.array([37]), [0], cut)
        assert batch.sequences == (0,)


def test_cuts_survive_json() -> None:
    lengths = redsm5_lengths(posts=30)
    packed, padded = fit_budget(lengths, 16, 4096), fit_padded(lengths, 16, 4096)
    assert PackedCut.from_json(packed.to_json()) == packed
    assert PaddedCut.from_json(padded.to_json()) == padded


# ── errors ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fit", [ladder, coarser_cuts])
def test_a_sequence_over_the_cap_is_named_with_the_fix(fit) -> None:
    with pytest.raises(
        BadInput, match=r"sequence of 700 tokens.*of 512; truncate to 512.*batch_size"
    ):
        fit([10, 700], 2, 512)
    with pytest.raises(BadInput, match="cap in tokens is 0"):
        fit([10], 2, 0)
    with pytest.raises(BadInput, match="effective_batch_size is 0"):
        fit([10], 0, 512)
    with pytest.raises(BadInput, match="number of ranks is 0"):
        fit([10], 1, 512, ranks=0)


@pytest.mark.parametrize("fit", [fit_budget, fit_padded])
def test_a_step_of_other_data_than_fitted_is_refused(fit) -> None:
    cut = fit([10, 20], 2, 512)
    with pytest.raises(BadInput, match="sequence of 900 tokens"):
        cut_step(np.array([900]), [0], cut)
