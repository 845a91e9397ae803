"""Times, intervals, and samples of the GPU."""

import itertools
import statistics
from dataclasses import replace

import numpy as np
import pytest

from trainfit.core.errors import BadInput
from trainfit.core.records import GpuState
from trainfit.hardware.nvml import NvmlGpu
from trainfit.measuring.timing import median_interval, time_work
from trainfit.tuning.tuner import sampled


def test_the_interval_holds_the_true_median_about_as_often_as_it_says():
    random = np.random.default_rng(3)
    trials = 200
    held = 0
    for trial in range(trials):
        found = median_interval(random.lognormal(0.0, 0.5, 25).tolist(), seed=trial)
        held += found.low <= 1.0 <= found.high  # the median of a lognormal around 0
    assert 0.88 <= held / trials <= 0.99


def test_an_outlier_is_kept_and_widens_nothing_but_the_tail():
    samples = [1.0] * 20 + [50.0]
    found = median_interval(samples)
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)
    few = median_interval([1.0, 1.0, 50.0])
    assert few.high == 50.0
    assert few.value == statistics.median([1.0, 1.0, 50.0])


def test_work_is_warmed_up_and_every_sample_is_kept():
    calls = []
    ticks = itertools.chain([0.0], (t / 10 for t in itertools.count()))
    found = time_work(lambda: calls.append(1), warm_up=2, repeats=5, clock=lambda: next(ticks))
    assert len(calls) == 7
    assert found.seconds == pytest.approx((0.1,) * 5)
    assert found.median.value == pytest.approx(0.1)


def test_a_limit_of_time_ends_it_early_but_not_at_once():
    now = itertools.count()
    found = time_work(lambda: None, repeats=100, most_seconds=1.0, clock=lambda: float(next(now)))
    assert len(found.seconds) == 3


@pytest.mark.parametrize(("repeats", "warm_up"), [(0, 1), (1, -1)])
def test_impossible_repetitions_are_bad_input(repeats: int, warm_up: int):
    with pytest.raises(BadInput):
        time_work(lambda: None, repeats=repeats, warm_up=warm_up)
    with pytest.raises(BadInput):
        median_interval([])


def gpu(own: float | None = 3.0, used: float = 3.2, reasons: tuple[str, ...] = ()) -> NvmlGpu:
    state = GpuState(
        memory_used_gib=used, power_w=200.0, utilisation_percent=90, throttle_reasons=reasons
    )
    return NvmlGpu(name="GPU", state=state, own_gib=own)


def test_a_gpu_that_is_held_back_is_noticed():
    answers = itertools.cycle([[gpu()], [gpu(used=9.0, reasons=("sw_thermal_slowdown",))]])
    with sampled(every=0.001, look=lambda: next(answers)) as samples:
        while len(samples.gpus) < 4:
            pass
    [heat] = samples.throttling()
    assert "heat" in heat
    assert samples.mean("power_w") == 200.0


def test_a_gpu_alone_at_full_speed_is_not_worth_a_word():
    with sampled(every=0.001, look=lambda: [gpu(own=None, used=70.0)]) as samples:
        while not samples.gpus:
            pass
    assert samples.throttling() == ()


@pytest.mark.parametrize("uuid", ["GPU-2", "MIG-2"])
def test_the_gpu_in_use_is_sampled_and_not_the_first_of_the_driver(uuid: str):
    hot = replace(gpu(reasons=("hw_thermal_slowdown",)), uuid="GPU-1")
    used = replace(gpu(), uuid="GPU-2", slices=(NvmlGpu(name="slice", uuid="MIG-2"),))
    with sampled(uuid, every=0.001, look=lambda: [hot, used]) as samples:
        while not samples.gpus:
            pass
    assert samples.throttling() == ()
    with sampled("GPU-9", look=lambda: [hot, used]) as samples:
        pass
    assert samples.gpus == []


def test_without_nvml_there_is_no_sample():
    with sampled(look=list) as samples:
        pass
    assert samples.gpus == []
    assert samples.mean("power_w") is None
