"""Where a run stands: all of a checkpoint that is neither tensors nor random state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainfit import codec
from trainfit.records import Event


@dataclass(kw_only=True)
class Window:
    """The steps since the last line of the log."""

    losses: tuple[float, ...] = ()
    grad_norm: float | None = None
    """Of the latest step."""
    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """In steps: evaluations and checkpoints are not in it."""
    waited: float = 0.0
    """In which the device stood still for want of data."""
    compiling: float = 0.0
    ideal_seconds: float = 0.0
    """What the steps would take at the device's peak."""


@dataclass(kw_only=True)
class Progress:
    """The state of the loop between two steps."""

    step: int = 0
    """Optimizer steps taken, with those that were skipped."""
    epoch: int = 0
    step_in_epoch: int = 0
    rung: int = 0
    """Of the ladder of cuts."""
    cuts: tuple[tuple[int, int], ...] = ((0, 0),)
    eval_batch_size: int = 1
    evaluated_step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    evaluations_without_better: int = 0
    skipped_in_row: int = 0
    seconds: float = 0.0
    """Over all the times that the run was started."""
    peak_memory: int = 0
    """In bytes."""
    events: tuple[Event, ...] = ()
    window: Window = field(default_factory=Window)

    def to_data(self) -> dict[str, Any]:
        """As plain JSON data."""
        data: dict[str, Any] = codec.encode(self)
        return data

    @classmethod
    def from_data(cls, data: Any, source: str) -> Progress:
        """What `to_data` gave."""
        return codec.decode(cls, data, source)

    def use_rung(self, rung: int) -> None:
        """Cut by this rung, from the step to come on."""
        if rung != self.rung:
            earlier = tuple(change for change in self.cuts if change[0] < self.step)
            self.rung = rung
            self.cuts = (*earlier, (self.step, rung))
