"""What a ladder is made of: one row per optimization, lossless in JSON (`ladder.json`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainfit.records import Record, Scalar
from trainfit.tuning.records import Interval, Status

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
