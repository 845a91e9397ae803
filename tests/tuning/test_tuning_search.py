"""The search on candidates whose true speed is known, with a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import tuning_toy as toy
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from trainfit.cli.pages import tune_page
from trainfit.core.records import Scalar
from trainfit.tuning.search import Found, search
from trainfit.tuning.tuned_cache import Trial, TrialCandidate, TuneResult
from trainfit.tuning.tuner import RATE, conclude

BATCH = 16
AXES: dict[str, tuple[Scalar, Scalar]] = {
    "optimizer": ("adamw_fused", "adamw"),
    "num_workers": (0, 4),
    "pin_memory": (False, True),
}


class Machine:
    """A machine where every setting costs a factor, steps scatter a little, and time is told."""

    def __init__(
        self,
        factors: dict[str, float] | None = None,
        *,
        step: float = 0.1,
        overhead: float = 2.0,
        noise: float = 0.005,
        fails: dict[str, str] | None = None,
        drift: Callable[[float], float] = lambda _now: 1.0,
    ) -> None:
        self.now = 100.0
        self.asked: list[tuple[str, int]] = []
        self.limits: list[float] = []
        self._factors, self._step, self._overhead = factors or {}, step, overhead
        self._noise, self._fails, self._drift = noise, fails or {}, drift
        self._random = random.Random(0)

    def seconds_of(self, candidate: TrialCandidate) -> float:
        seconds = self._step
        for name, factor in self._factors.items():
            if name in candidate.settings:
                seconds *= factor
        return seconds

    def run(
        self,
        candidate: TrialCandidate,
        *,
        steps: int,
        warm_up: int,
        limit: float,
        most_seconds: float | None,
    ) -> Trial:
        name = "+".join(candidate.settings) or "planned"
        self.asked.append((name, steps))
        self.limits.append(limit)
        began = self.now
        self.now += self._overhead
        if name in self._fails:
            return Trial(settings=candidate.settings, status=self._fails[name])
        seconds = []
        while len(seconds) < steps:
            scatter = 1 + self._noise * self._random.gauss(0, 1)
            took = self.seconds_of(candidate) * scatter * self._drift(self.now)
            self.now += took
            seconds.append(took)
            if self.now - began - self._overhead > (most_seconds or 1e9) and len(seconds) >= 3:
                break
        if self.now - began > limit:
            self.now = began + limit
            return Trial(settings=candidate.settings, status="hung", note="killed")
        return Trial(
            settings=candidate.settings,
            status="ok",
            step_seconds=tuple(seconds),
            step_samples=(BATCH,) * len(seconds),
            seconds=self.now - began,
        )


def neighbours(of: TrialCandidate) -> list[TrialCandidate]:
    """One setting away, along every axis."""
    found = []
    for name, values in AXES.items():
        changed = dict(of.settings)
        if name in changed:
            del changed[name]
        else:
            changed[name] = values[1]
        found.append(toy.candidate(changed))
    return found


def look(machine: Machine, seconds: float = 1000.0, first: Sequence[TrialCandidate] = ()) -> Found:
    return search(
        [toy.candidate(), *first],
        neighbours,
        machine.run,
        seconds=seconds,
        clock=lambda: machine.now,
    )


def best(found: Found) -> set[str]:
    return set(found.tried[0].candidate.settings)


def test_settings_that_help_together_are_found() -> None:
    found = look(Machine({"optimizer": 0.8, "num_workers": 0.9, "pin_memory": 1.1}))
    assert best(found) == {"optimizer", "num_workers"}
    assert found.tried[0].rate.value == pytest.approx(BATCH / (0.1 * 0.8 * 0.9), rel=0.01)
    assert found.ended == "finished"


def test_the_planner_stays_where_nothing_is_better() -> None:
    found = look(Machine({"optimizer": 1.2, "num_workers": 1.0, "pin_memory": 1.001}))
    assert best(found) == set()  # as fast as others, and it changes nothing
    assert conclude(toy.plan(), found, 1.0).changes == {}


@given(st.lists(st.floats(0.7, 1.4), min_size=3, max_size=3), st.integers(0, 3))
@settings(max_examples=40)
def test_what_is_chosen_is_within_three_percent_of_the_best(
    factors: list[float], seed: int
) -> None:
    machine = Machine(dict(zip(AXES, factors, strict=True)), noise=0.01)
    machine._random.seed(seed)
    found = look(machine)
    least = 0.1
    for factor in factors:
        least *= min(factor, 1.0)
    assert machine.seconds_of(found.tried[0].candidate) <= 1.03 * least


def test_a_machine_that_was_busy_for_a_moment_is_found_out() -> None:
    """The planner's own is tried while others work; the other setting gains nothing."""
    machine = Machine({"optimizer": 1.02}, drift=lambda now: 1.6 if now < 105 else 1.0)
    found = look(machine, first=[toy.candidate({"optimizer": "adamw"})])
    assert best(found) == set()


def test_repeats_take_turns() -> None:
    machine = Machine({"optimizer": 0.98, "num_workers": 1.3, "pin_memory": 1.3}, noise=0.05)
    look(machine, first=[toy.candidate({"optimizer": "adamw"})])
    again = [name for name, steps in machine.asked if steps > 20]
    assert again[:2] in (["planned", "optimizer"], ["optimizer", "planned"])
    assert len(again) >= 4
    assert all(a != b for a, b in zip(again[::2], again[1::2], strict=False))


@pytest.mark.parametrize("seconds", [5.0, 12.0, 30.0, 60.0])
def test_the_time_is_kept(seconds: float) -> None:
    machine = Machine({"optimizer": 0.9}, overhead=4.0)
    began = machine.now
    found = look(machine, seconds)
    assert machine.now - began <= seconds + 1e-9
    if seconds < 60:
        assert found.ended == "time is up"
    if seconds > 6:
        assert found.tried


def test_a_trial_has_a_limit_of_its_own_and_the_search_goes_on() -> None:
    machine = Machine({"optimizer": 400.0, "num_workers": 0.9})
    found = look(machine, 180.0)
    assert max(machine.limits) <= 90.0
    assert [t.status for t in found.trials if t.settings.keys() == {"optimizer"}] == ["hung"]
    assert best(found) == {"num_workers"}


@pytest.mark.parametrize("status", ["oom", "crashed", "failed"])
def test_failures_leave_a_record_and_are_not_chosen(status: str) -> None:
    fast_but_broken = Machine({"optimizer": 0.1, "num_workers": 0.9}, fails={"optimizer": status})
    found = look(fast_but_broken)
    assert status in [trial.status for trial in found.trials]
    assert best(found) == {"num_workers"}
    assert [name for name, _ in fast_but_broken.asked].count("optimizer") == 1


def test_a_plan_that_fails_is_replaced_by_one_that_works() -> None:
    machine = Machine(fails={"planned": "oom"})
    found = look(machine, first=[toy.candidate({"num_workers": 4})])
    assert best(found) == {"num_workers"}
    told = conclude(toy.plan(), found, 1.0)
    assert told.planned_samples_per_second is None
    assert told.gain is None
    reason = {r.setting: r.why for r in told.best.reasons}["num_workers"]
    assert "as planned it ran out of memory" in reason


def test_nothing_that_works_leaves_the_plan_as_it_is() -> None:
    found = look(Machine(fails={"planned": "crashed"}))
    told = conclude(toy.plan(), found, 1.0)
    assert told.best == toy.plan()
    assert told.samples_per_second is None
    assert told.notes == ("nothing could be measured",)
    page = shown(replace(told, ended="time is up"))
    assert page.lower().count("nothing could be measured") == 1
    assert "Give more time (--minutes)" in page
    assert "--minutes" not in shown(told)


def shown(result: TuneResult) -> str:
    console = Console(width=200)
    with console.capture() as caught:
        console.print(tune_page(result))
    return caught.get()


def test_what_was_clearly_slower_is_not_tried_beside_others() -> None:
    machine = Machine({"optimizer": 1.5, "num_workers": 0.8, "pin_memory": 0.9})
    look(machine, first=[toy.candidate({"optimizer": "adamw"})])
    assert {name for name, _ in machine.asked if "optimizer" in name} == {"optimizer"}


def test_skipped_ones_are_told_once() -> None:
    told: list[Trial] = []
    skipped = Trial(settings={"precision": "fp32"}, status="skipped", note="slow")
    machine = Machine()
    search(
        [toy.candidate()],
        lambda _winner: [skipped, skipped],
        machine.run,
        seconds=100,
        tell=told.append,
        clock=lambda: machine.now,
    )
    assert told.count(skipped) == 1


def test_an_interrupt_keeps_what_was_measured() -> None:
    machine = Machine({"optimizer": 0.8})

    def run(candidate: TrialCandidate, **how: float) -> Trial:
        if len(machine.asked) == 2:
            raise KeyboardInterrupt
        return machine.run(candidate, **how)

    found = search(
        [toy.candidate(), toy.candidate({"optimizer": "adamw"})],
        neighbours,
        run,
        seconds=1000,
        clock=lambda: machine.now,
    )
    assert found.ended == "interrupted"
    assert len(found.trials) == 2
    told = conclude(toy.plan(), found, 3.0)
    assert told.ended == "interrupted"
    assert told.changes == {"optimizer": "adamw"}


def test_the_best_plan_says_what_was_measured() -> None:
    found = look(Machine({"optimizer": 0.8}))
    told = conclude(toy.plan(), found, 9.0)
    assert told.best.optimizer == "adamw"
    assert told.gain == pytest.approx(1 / 0.8, rel=0.02)
    [item] = [m for m in told.best.measurements if m.name == RATE]
    assert item.value == told.samples_per_second.value
    assert sorted(item.samples)[len(item.samples) // 2] == pytest.approx(item.value, rel=0.01)
    reason = {r.setting: r for r in told.best.reasons}["optimizer"]
    assert reason.value == "adamw"
    planned = told.planned_samples_per_second.value
    assert reason.why == f"measured: {item.value:,.1f} samples/s against {planned:,.1f} as planned"
    time = told.best.time
    assert time.step_seconds == pytest.approx(toy.BATCH / item.value)
    assert time.total_seconds == pytest.approx(2 * 48 / item.value)


def test_the_best_plan_promises_the_memory_that_was_seen() -> None:
    for seen, allocated, reserved, activations in (
        ((14.5, 15.5), 14.5, 15.5, 10.5),
        ((11.0, 12.5), 12.0, 13.0, 8.0),
        ((14.5, None), 12.0, 13.0, 8.0),  # a process's own memory, where there is no GPU
    ):
        found = look(Machine({"optimizer": 0.8}))
        trials = tuple(
            replace(trial, peak_memory_gib=seen[0], peak_reserved_gib=seen[1])
            if trial.settings
            else replace(trial, peak_memory_gib=20.0, peak_reserved_gib=20.0)
            for trial in found.trials
        )
        tried = tuple(
            replace(
                one,
                candidate=replace(
                    one.candidate, plan=replace(one.candidate.plan, memory=toy.MEMORY)
                ),
            )
            for one in found.tried
        )
        best = conclude(toy.plan(), replace(found, trials=trials, tried=tried), 9.0).best
        assert best.memory is not None
        assert best.memory.peak_allocated_gib == pytest.approx(allocated)
        assert best.memory.peak_reserved_gib == pytest.approx(reserved)
        assert best.memory.activations_gib == pytest.approx(activations)
