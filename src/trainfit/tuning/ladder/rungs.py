"""What a rung of the ladder is, and the naive baseline that all of them stand on.

A rung is data: what it sets in the plan, and what naive habit it ends. So any set of rungs is a
setting, and the best without one of them is the baseline with all the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from trainfit.core import codec
from trainfit.core.plan_records import Plan, TaskSpec
from trainfit.core.records import Record, Scalar
from trainfit.measuring.timing import ratio_interval, rounds_interval
from trainfit.tuning.tuned_cache import Interval, Status, Trial, TrialCandidate

NAIVE_BATCH = 8
"""Sequences at a time where nobody has thought about it: Trainer's default."""
FUSIBLE = ("sdpa", "varlen")
"""Attention paths that begin as scaled_dot_product_attention on padded rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Naive(Record):
    """Habits of a naive loop, and what else a trial does that trainfit has no setting for."""

    eager: bool = True
    """Attention by matrix products and a softmax."""
    shuffled: bool = True
    """Sequences in random order, padded to the longest of a batch."""
    zeroed: bool = True
    """Gradients are kept and filled with zeros."""
    epoch_steps: int | None = None
    """Epochs of so few steps, to see what starting one costs."""
    liger: bool = False
    """Layers of transformers' models are Liger's."""


THOUGHTFUL = Naive(eager=False, shuffled=False, zeroed=False)
"""What trainfit does by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One optimization."""

    name: str
    what: str
    plan: dict[str, Any] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)
    naive: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Rungs without which it cannot be."""
    replaces: tuple[str, ...] = ()
    """Rungs that change nothing any more where this one is."""
    trades: bool = False
    """It gives something up for something else, so nothing is built on it."""
    between_epochs: bool = False
    """It changes nothing but the start of an epoch."""

    def is_in(self, plan: Plan) -> bool:
        """Whether the plan has it."""
        wanted = ((plan, self.plan), (plan.runtime, self.runtime))
        return all(getattr(has, name) == value for has, it in wanted for name, value in it.items())


def naive_plan(best: Plan) -> Plan:
    """The baseline: the same job as `best`, without a thought."""
    return replace(
        best,
        precision="fp32",
        runtime=replace(best.runtime, tf32=False, cudnn_benchmark=False),
        packed=False,
        attention="sdpa" if best.attention in FUSIBLE else "own",
        batch_size=min(NAIVE_BATCH, best.effective_batch_size),
        micro_batch_tokens=NAIVE_BATCH * best.workload.max_length,
        gradient_accumulation_steps=math.ceil(best.effective_batch_size / NAIVE_BATCH),
        gradient_checkpointing="none",
        compile=False,
        compile_mode="default",
        optimizer="adamw",
        num_workers=0,
        pin_memory=False,
        persistent_workers=False,
        prefetch_factor=None,
    )


def naive_habits(best: Plan) -> Naive:
    """Those that make a difference to the job."""
    return Naive(eager=best.attention in FUSIBLE, shuffled=len(set(best.workload.lengths)) > 1)


def setting(best: Plan, rungs: Iterable[Rung]) -> tuple[Plan, Naive]:
    """The baseline with these rungs."""
    plan, naive = naive_plan(best), naive_habits(best)
    for rung in rungs:
        runtime = replace(plan.runtime, **rung.runtime)
        plan = replace(plan, runtime=runtime, **rung.plan)
        naive = replace(naive, **rung.naive)
    return plan, naive


def describe(plan: Plan, naive: Naive) -> str:
    """The baseline in words, from what `setting` gives without a rung."""
    parts = [
        "fp32 without TF32",
        "eager attention" if naive.eager else "the model's own attention",
        "AdamW weight by weight",
        "gradients zeroed",
        f"{plan.batch_size} of {plan.effective_batch_size} sequences at a time",
        *(["in random order, padded to the longest of them"] if naive.shuffled else []),
        "no loader process",
        "unpinned",
    ]
    return ", ".join(parts)


BASELINE = "baseline"


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderStep(Record):
    """One optimization on top of those before it, or the best without one of them."""

    name: str
    what: str
    """What it changes."""
    status: Status
    samples_per_second: Interval | None = None
    speedup: Interval | None = None
    """Against the baseline."""
    gain: Interval | None = None
    """Against the step before it; of the best without something, against the best."""
    peak_memory_gib: float | None = None
    """Allocated on the GPU, or held by the process where there is none."""
    kept: bool = True
    """Whether the steps after it have it too."""
    note: str = ""
    settings: dict[str, Scalar] = field(default_factory=dict)
    """What was set otherwise than in the plan that the ladder leads to."""
    step_seconds: tuple[tuple[float, ...], ...] = ()
    """Of every timed step, round by round; none is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotApplicable(Record):
    """An optimization of the documents that has no place here, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder(Record):
    """From the naive baseline to the plan, one optimization after another."""

    title: str = ""
    device: str
    torch: str
    taken: str
    """The day."""
    samples_per_step: int
    """Sequences of an optimizer step, the same in every row."""
    steps: tuple[LadderStep, ...]
    """The baseline first."""
    without: tuple[LadderStep, ...] = ()
    """The best, with one thing removed at a time."""
    not_applicable: tuple[NotApplicable, ...] = ()
    drift: Interval | None = None
    """How fast the baseline was the last time, as a multiple of the first."""
    rounds: int = 1
    seconds: float = 0.0
    ended: Literal["finished", "time is up", "interrupted"] = "finished"

    @property
    def best(self) -> LadderStep:
        """The last step that the others build on: everything that was kept."""
        return [step for step in self.steps if step.kept][-1]


Timed = list[tuple[int, float]]
"""Sequences and seconds of each timed step of a trial."""
NAIVE_FACTORY = "trainfit.tuning.ladder.naive:trial"


@dataclass(slots=True, eq=False, kw_only=True)
class LadderRow:
    """A setting, its trials, and the row that it is compared with."""

    name: str
    what: str
    plan: Plan
    naive: Naive
    before: LadderRow | None = None
    trials: list[Trial] = field(default_factory=list)
    kept: bool = True
    note: str = ""
    twin: LadderRow | None = None
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

    def candidate(self, task: TaskSpec, best: Plan) -> TrialCandidate:
        """What is tried."""
        if self.naive != THOUGHTFUL:
            arguments = {"inner": codec.encode(task), "naive": codec.encode(self.naive)}
            task = TaskSpec(factory=NAIVE_FACTORY, arguments=arguments)
        return TrialCandidate(settings=self.settings(best), plan=self.plan, task=task)

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
