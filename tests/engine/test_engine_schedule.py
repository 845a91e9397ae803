"""Learning rates against closed formulas."""

from __future__ import annotations

import math

import pytest

from trainfit.core.errors import BadInput
from trainfit.engine.loop_settings import ScheduleSettings, rate_factor, warmup_steps


def factors(total: int, **settings: object) -> list[float]:
    chosen = ScheduleSettings(**settings)  # type: ignore[arg-type]
    return [rate_factor(step, total, chosen) for step in range(total)]


def test_warm_up_rises_evenly_to_the_full_rate() -> None:
    found = factors(10, kind="constant", warmup_steps=4)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 1])


def test_linear_decay_would_reach_zero_after_the_last_step() -> None:
    assert factors(5, kind="linear") == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert factors(6, kind="linear", warmup_steps=1, min_ratio=0.5) == pytest.approx(
        [0.5, 1, 0.9, 0.8, 0.7, 0.6]
    )


def test_cosine_to_a_tenth_as_for_the_small_gpt() -> None:
    found = factors(1000, kind="cosine", warmup_steps=100, min_ratio=0.1)
    for step in (100, 325, 550, 999):
        expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 100) / 900))
        assert found[step] == pytest.approx(expected)
    assert found[550] == pytest.approx(0.55)
    assert 0.1 < found[999] < 0.1001


def test_restarts_begin_at_the_full_rate_again() -> None:
    found = factors(12, kind="cosine_with_restarts", cycles=3)
    one = [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert found == pytest.approx(one * 3)


def test_warm_up_by_ratio_counts_optimizer_steps() -> None:
    assert warmup_steps(105, ScheduleSettings(warmup_ratio=0.1)) == 11
    assert warmup_steps(105, ScheduleSettings()) == 0
    with pytest.raises(BadInput, match=r"warmup_ratio is 0.1 and warmup_steps is 3"):
        ScheduleSettings(warmup_ratio=0.1, warmup_steps=3)
