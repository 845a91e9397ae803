"""A long line drawn with few points looks the same."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainfit.runs.reader import thin

values = st.floats(-1e6, 1e6) | st.just(float("nan"))


@given(arrays.arrays(np.float64, st.integers(1, 400), elements=values), st.integers(1, 40))
def test_ends_and_extremes_stay_and_nothing_is_invented(y: np.ndarray, stretches: int):
    x = np.arange(len(y), dtype=np.float64)
    kept, shown = thin(x, y, stretches)
    assert len(kept) <= max(2 * stretches + 2, 1)
    assert (np.diff(kept) > 0).all()
    np.testing.assert_array_equal(shown, y[kept.astype(int)])
    assert kept[0] == 0
    assert kept[-1] == len(y) - 1
    if np.isfinite(y).any():
        assert np.nanmax(shown) == np.nanmax(y)
        assert np.nanmin(shown) == np.nanmin(y)


def test_one_spike_in_a_hundred_thousand_is_kept():
    y = np.ones(100_000)
    y[61_803] = 7.0
    kept, shown = thin(np.arange(100_000.0), y)
    assert shown[kept == 61_803] == [7.0]
    assert len(kept) < 700


def test_a_long_gap_stays_a_gap():
    y = np.ones(10_000)
    y[4000:6000] = np.nan
    kept, shown = thin(np.arange(10_000.0), y, 100)
    assert np.isnan(shown[(kept > 4000) & (kept < 6000)]).all()
    assert np.isnan(shown).any()
