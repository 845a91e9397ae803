"""What is tried, what came of each trial, and what a search found. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainfit.measuring.timing import Interval as Interval
from trainfit.records import Plan, Record, Scalar, TaskSpec

Status = Literal["ok", "oom", "crashed", "hung", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate(Record):
    """A complete plan to try, and how to build a training run by it."""

    settings: dict[str, Scalar]
    """What differs from the planner's own answer, by the plan's names; empty: nothing does."""
    plan: Plan
    task: TaskSpec
    """`factory(plan, **arguments)` returns a trial.Setup, or a tuple like one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial(Record):
    """What came of a candidate. Failures are records as well."""

    settings: dict[str, Scalar]
    status: Status
    samples_per_second: Interval | None = None
    """The median over the timed steps."""
    tokens_per_second: Interval | None = None
    """Of the data, without filler and padding."""
    peak_memory_gib: float | None = None
    """Allocated on the GPU in the timed steps, or held by the process where there is none. CUDA
    graphs take theirs while they are recorded, so with them it is that of all steps."""
    peak_reserved_gib: float | None = None
    step_seconds: tuple[float, ...] = ()
    """Of every timed step, in their order; none is left out."""
    step_samples: tuple[int, ...] = ()
    """Sequences of each of them."""
    first_steps_seconds: float | None = None
    """Of the first two steps, in which the compiler works."""
    seconds: float = 0.0
    """Of the whole trial, with building the model."""
    note: str = ""
    """Why it was skipped or failed, or what else to know."""
    rung: int = 0
    """Of the search: those that did well are tried again, longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneResult(Record):
    """The best that was found, and every trial behind it, those that failed included."""

    best: Plan
    """With what was measured, and a reason for each setting that the measuring changed."""
    trials: tuple[Trial, ...]
    seconds: float
    changes: dict[str, Scalar] = field(default_factory=dict)
    """What the best has other than the planner's own answer."""
    samples_per_second: Interval | None = None
    """Of the best, over all its trials; None where nothing could be measured."""
    planned_samples_per_second: Interval | None = None
    """Of the planner's own answer."""
    ended: Literal["finished", "time is up", "interrupted"] = "finished"
    notes: tuple[str, ...] = ()
    """What spoiled the measuring: the GPU was held back, or shared."""

    @property
    def gain(self) -> float | None:
        """How many times as fast as the planner's own answer."""
        if self.samples_per_second is None or self.planned_samples_per_second is None:
            return None
        return self.samples_per_second.value / self.planned_samples_per_second.value


def folder_prefix(process: int) -> str:
    """How the folder of a trial begins: what a process that is killed leaves, another can find."""
    return f"trainfit-trial-{process}-"
