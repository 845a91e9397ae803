"""A row of the ladder while it is measured, and the numbers that come of its trials."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from trainfit import codec
from trainfit.measuring.timing import ratio_interval, rounds_interval
from trainfit.records import Plan, Scalar, TaskSpec
from trainfit.tuning.ladder_records import LadderStep
from trainfit.tuning.ladder_rungs import THOUGHTFUL, Naive
from trainfit.tuning.records import Candidate, Interval, Status, Trial

Timed = list[tuple[int, float]]
"""Sequences and seconds of each timed step of a trial."""
NAIVE_FACTORY = "trainfit.tuning.ladder_naive:trial"


@dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """A setting, its trials, and the row that it is compared with."""

    name: str
    what: str
    plan: Plan
    naive: Naive
    before: Row | None = None
    trials: list[Trial] = field(default_factory=list)
    kept: bool = True
    note: str = ""
    twin: Row | None = None
    """Where nothing but the start of an epoch differs: the row before, in epochs of one step, as
    this one is."""
    epoch_steps: int = 1
    """Of the job: so many steps share the start of an epoch."""

    @property
    def good(self) -> list[Trial]:
        """The trials that went through."""
        return [trial for trial in self.trials if trial.status == "ok"]

    @property
    def status(self) -> Status:
        """How the last trial failed, or ok where any went through."""
        return "ok" if self.good else self.trials[-1].status if self.trials else "skipped"

    def candidate(self, task: TaskSpec, best: Plan) -> Candidate:
        """What is tried."""
        if self.naive != THOUGHTFUL:
            arguments = {"inner": codec.encode(task), "naive": codec.encode(self.naive)}
            task = TaskSpec(factory=NAIVE_FACTORY, arguments=arguments)
        return Candidate(settings=self.settings(best), plan=self.plan, task=task)

    def settings(self, best: Plan) -> dict[str, Scalar]:
        """What is set otherwise than in `best`, by name."""
        pairs = ((best, self.plan), (best.runtime, self.plan.runtime), (THOUGHTFUL, self.naive))
        return {
            one.name: getattr(ours, one.name)
            for theirs, ours in pairs
            for one in fields(ours)
            if isinstance(getattr(ours, one.name), Scalar)
            and getattr(ours, one.name) != getattr(theirs, one.name)
        }

    def rates(self) -> list[list[float]]:
        """Samples per second of each timed step, round by round."""
        if self.twin is None or self.before is None:
            return [[samples / seconds for samples, seconds in each] for each in self._timed()]
        return _spread(self._timed(), self.before.rates(), self.epoch_steps)

    def gain(self) -> Interval | None:
        """Against the row that it is compared with."""
        if self.before is None:
            return None
        before = self.before.rates()
        if self.twin is not None:
            before = _spread(self.twin._timed(), before, self.epoch_steps)
        own = self.rates()
        return ratio_interval(own, before) if own and before else None

    def step(self, baseline: list[list[float]], best: Plan) -> LadderStep:
        """The row as it is written down; `baseline` are the rates that all are compared with."""
        rates = self.rates()
        peaks = [t.peak_memory_gib for t in self.good if t.peak_memory_gib is not None]
        return LadderStep(
            name=self.name,
            what=self.what,
            status=self.status,
            samples_per_second=rounds_interval(rates) if rates else None,
            speedup=_speedup(rates, baseline),
            gain=self.gain(),
            peak_memory_gib=max(peaks, default=None),
            kept=self.kept,
            note="; ".join(self._notes()),
            settings=self.settings(best),
            step_seconds=tuple(trial.step_seconds for trial in self.good),
        )

    def _timed(self) -> list[Timed]:
        return [
            list(zip(trial.step_samples, trial.step_seconds, strict=True)) for trial in self.good
        ]

    def _usual_seconds(self) -> float:
        return statistics.median(seconds for trial in self.good for seconds in trial.step_seconds)

    def _notes(self) -> Iterator[str]:
        if self.note:
            yield self.note
        if self.twin is not None and self.good and self.twin.good:
            own, other = (row._usual_seconds() for row in (self, self.twin))
            yield (
                f"an epoch's first step takes {own:.3g} s, before {other:.3g} s; "
                f"spread over the job's {self.epoch_steps:,} steps an epoch"
            )
        failed = [trial for trial in self.trials if trial.status != "ok"]
        if failed and self.good:
            yield f"{len(failed)} of {len(self.trials)} rounds failed: {failed[-1].note}"
        elif failed and failed[-1].note:
            yield failed[-1].note


def _speedup(rates: list[list[float]], baseline: list[list[float]]) -> Interval | None:
    if not rates or not baseline:
        return None
    if rates == baseline:  # it is as fast as itself, and no doubt about it
        return Interval(value=1.0, low=1.0, high=1.0)
    return ratio_interval(rates, baseline)


def _spread(rounds: list[Timed], usual: list[list[float]], epoch_steps: int) -> list[list[float]]:
    """Rates of epochs whose first step is one of these, and all others go at the `usual` rate."""
    if not usual:
        return []
    rate = statistics.median(each for found in usual for each in found)
    return [
        [
            samples / (samples / rate + (seconds - samples / rate) / epoch_steps)
            for samples, seconds in firsts
        ]
        for firsts in rounds
    ]
