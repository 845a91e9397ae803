"""Steps: every sequence once, exact counts, even tokens, new sets every epoch, resumable."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_lengths import redsm5_lengths, words_per_post

from trainfit.core.errors import BadInput
from trainfit.packing import deal_steps
from trainfit.packing.steps import emptiest_first, share_step

LENGTHS = st.lists(st.integers(1, 600), min_size=1, max_size=80)


def totals(lengths: np.ndarray, steps: tuple[np.ndarray, ...]) -> np.ndarray:
    return np.array([lengths[step].sum() for step in steps])


def test_the_made_up_lengths_are_like_redsm5() -> None:
    words = words_per_post()
    assert (words.min(), words.max()) == (2, 6990)
    assert words.mean() == pytest.approx(294.7, rel=0.05)
    lengths = redsm5_lengths()
    assert lengths.size == 13_356
    assert lengths.mean() == pytest.approx(305, rel=0.02)
    assert (lengths == 512).mean() == pytest.approx(0.24, abs=0.02)


@given(LENGTHS, st.integers(1, 90), st.integers(0, 2**40), st.integers(0, 5))
def test_every_sequence_is_in_one_step_and_only_the_last_step_is_partial(
    lengths: list[int], batch: int, seed: int, epoch: int
) -> None:
    steps = deal_steps(lengths, batch, seed, epoch)
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(lengths)))
    assert len(steps) == -(-len(lengths) // batch)
    assert all(step.size == batch for step in steps[:-1])
    assert steps[-1].size == len(lengths) - batch * (len(steps) - 1)


def test_accumulation_never_drops_or_carries_over_the_end_of_an_epoch() -> None:
    lengths = redsm5_lengths(posts=100)
    for epoch in range(3):
        steps = deal_steps(lengths, 64, 0, epoch)
        assert [step.size for step in steps] == [64] * 14 + [4]


@pytest.mark.parametrize("batch", [16, 32, 64, 128])
def test_steps_have_nearly_the_same_tokens(batch: int) -> None:
    lengths = redsm5_lengths()
    dealt = totals(lengths, deal_steps(lengths, batch, 0)[:-1])
    drawn = lengths[: batch * dealt.size].reshape(-1, batch).sum(axis=1)
    assert dealt.max() / dealt.mean() < 1.006
    assert dealt.min() / dealt.mean() > 0.985
    assert dealt.std() < drawn.std() / 20


def test_long_tails_are_levelled_by_short_sequences() -> None:
    lengths = redsm5_lengths(max_length=4096)
    dealt = totals(lengths, deal_steps(lengths, 64, 0)[:-1])
    assert dealt.max() / dealt.mean() < 1.02


def test_the_partial_step_is_as_mixed_as_the_others() -> None:
    lengths = redsm5_lengths()[:1000]
    means = [lengths[deal_steps(lengths, 64, seed)[-1]].mean() for seed in range(20)]
    assert means == pytest.approx([lengths.mean()] * 20, rel=0.05)


@pytest.mark.parametrize("batch", [2, 3, 4, 16, 64])
def test_an_epoch_deals_other_sets_than_the_one_before(batch: int) -> None:
    # All lengths differ, so nothing but the shuffle can tell the epochs apart.
    lengths = np.arange(1, 1025)
    place = np.empty(lengths.size, dtype=int)
    for at, step in enumerate(deal_steps(lengths, batch, 0, 0)):
        place[step] = at
    met_again = 0
    steps = deal_steps(lengths, batch, 0, 1)
    for step in steps:
        met_again += sum(place[a] == place[b] for a in step for b in step) - batch
    share = met_again / (len(steps) * batch * (batch - 1))
    by_chance = (batch - 1) / (lengths.size - 1)
    assert share < 1.5 * by_chance + 0.025


def test_the_order_of_steps_is_shuffled() -> None:
    lengths = np.arange(1, 4001)
    dealt = totals(lengths, deal_steps(lengths, 2, 0))
    assert abs(np.corrcoef(dealt, np.arange(dealt.size))[0, 1]) < 0.1


def test_seed_and_epoch_decide_and_the_digest_is_the_same_on_every_machine() -> None:
    lengths = np.arange(450) * 7919 % 500 + 1
    for as_given in (lengths, lengths.tolist(), lengths.astype(np.int32)):
        dealt = np.concatenate(deal_steps(as_given, 16, seed=7, epoch=3))
        assert hashlib.sha256(dealt.astype("<i8").tobytes()).hexdigest()[:16] == "7202eeaf5fb37675"
    others = [deal_steps(lengths, 16, 7, 2), deal_steps(lengths, 16, 8, 3)]
    assert all(np.concatenate(other).tolist() != dealt.tolist() for other in others)


def test_a_run_resumes_in_mid_epoch_with_the_remaining_steps() -> None:
    lengths = redsm5_lengths(posts=60)
    whole = deal_steps(lengths, 32, 1, 4)
    again = deal_steps(lengths, 32, 1, 4)[9:]
    assert [step.tolist() for step in again] == [step.tolist() for step in whole[9:]]


@given(LENGTHS, st.integers(1, 7))
def test_ranks_share_a_step_evenly_and_wholly(lengths: list[int], ranks: int) -> None:
    array = np.array(lengths)
    step = np.arange(array.size)[::-1]
    parts = share_step(array, step, ranks)
    assert sorted(np.concatenate(parts).tolist()) == list(range(array.size))
    assert len(parts) == ranks
    assert max(part.size for part in parts) == -(-array.size // ranks)
    assert all((np.diff(array[part]) <= 0).all() for part in parts)


@given(LENGTHS, st.integers(1, 9), st.integers(0, 5))
def test_emptiest_first_agrees_with_a_plain_search(
    lengths: list[int], groups: int, spare: int
) -> None:
    room = -(-len(lengths) // groups) + spare
    tokens, counts, expected = [0] * groups, [0] * groups, []
    for length in lengths:
        best = min((g for g in range(groups) if counts[g] < room), key=lambda g: (tokens[g], g))
        expected.append(best)
        tokens[best] += length
        counts[best] += 1
    assert emptiest_first(lengths, groups, room) == expected


@pytest.mark.parametrize(
    ("lengths", "batch", "seed", "epoch", "words"),
    [
        ([], 4, 0, 0, "no sequences"),
        ([[1, 2]], 4, 0, 0, r"shape \(1, 2\)"),
        ([1.5], 4, 0, 0, "float64"),
        ([3, 0], 4, 0, 0, "sequence 1 has 0 tokens"),
        ([3], 0, 0, 0, "effective_batch_size is 0; give 1 or more"),
        ([3], 1, -1, 0, "seed is -1"),
        ([3], 1, 0, -1, "epoch is -1"),
    ],
)
def test_bad_input_is_named(lengths: list[int], batch: int, seed: int, epoch: int, words: str):
    with pytest.raises(BadInput, match=words):
        deal_steps(lengths, batch, seed, epoch)


def test_no_rank_is_an_error() -> None:
    with pytest.raises(BadInput, match="number of ranks is 0"):
        share_step(np.array([1]), np.array([0]), 0)


def test_many_sequences_are_dealt_fast() -> None:
    lengths = np.tile(redsm5_lengths(), 15)
    start = time.process_time()
    steps = deal_steps(lengths, 16, 0)
    assert time.process_time() - start < 4
    assert len(steps) == -(-lengths.size // 16)
