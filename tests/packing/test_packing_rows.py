"""Offsets and positions of packed rows, against a plain walk over the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.core.errors import BadInput
from trainfit.packing import row_offsets, row_positions

SEQUENCES = st.lists(st.integers(1, 40), max_size=12)


def test_sequences_then_filler() -> None:
    assert row_offsets([3, 2], 8).tolist() == [0, 3, 5, 8]
    assert row_offsets([3, 5], 8).tolist() == [0, 3, 8]
    assert row_offsets([], 8).tolist() == [0, 8]
    assert row_offsets([3], 8).dtype == np.int32


def test_filler_is_never_longer_than_the_longest_sequence() -> None:
    assert row_offsets([4], 13, longest=4).tolist() == [0, 4, 8, 12, 13]


def test_the_number_of_offsets_is_fixed_by_the_slots() -> None:
    rows = [row_offsets(held, 12, slots=3, longest=6) for held in ([], [6], [2, 2, 2], [6, 6])]
    assert {row.size for row in rows} == {6}
    assert rows[2].tolist() == [0, 2, 4, 6, 12, 12]


@given(SEQUENCES, st.integers(0, 100), st.integers(0, 3), st.integers(40, 60))
def test_offsets_and_positions(held: list[int], slack: int, spare: int, longest: int) -> None:
    width = max(1, sum(held) + slack)
    offsets = row_offsets(held, width, slots=len(held) + spare, longest=longest)
    sizes = np.diff(offsets)
    assert sizes[: len(held)].tolist() == held
    assert offsets[0] == 0
    assert offsets[-1] == width
    assert sizes.min() >= 0
    assert sizes.max() <= longest
    walked = [at for size in sizes.tolist() for at in range(size)]
    assert row_positions(offsets).tolist() == walked


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match="9 tokens do not fit a row of 8"):
        row_offsets([4, 5], 8)
    with pytest.raises(BadInput, match="2 sequences do not fit 1 slots"):
        row_offsets([4, 4], 8, slots=1)
    with pytest.raises(BadInput, match="longest sequence is 0"):
        row_offsets([4, 4], 8, longest=0)
