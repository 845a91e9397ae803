"""What a study asks of a job: its plan, a fold's training, and the final model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from trainfit.conf import Composed
from trainfit.core.errors import BadInput, did_you_mean
from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile, RunResult
from trainfit.engine.observers import Observer

MINIMISED = ("loss", "val_loss")
"""Metrics of which less is better."""


class Objective(Protocol):
    """A job as a study sees it. One is made per process and keeps the data between trials."""

    metrics: tuple[str, ...]
    """What an evaluation gives."""

    @property
    def folds(self) -> int:
        """How many there are; 1 without cross-validation."""

    @property
    def sequences(self) -> int:
        """Of the first fold's training part."""

    def plan(self, composed: Composed) -> Plan:
        """The plan of a configuration, which may say that it does not fit."""

    def train(
        self,
        composed: Composed,
        plan: Plan,
        fold: int,
        folder: Path,
        observers: Sequence[Observer],
    ) -> RunResult:
        """Train a fold for its validation score, and keep nothing of it but its log."""

    def final(self, composed: Composed) -> tuple[str, dict[str, float]]:
        """Train the model to keep; returns its run folder and its scores on the held-out test."""


def is_greater_better(metric: str) -> bool:
    """Whether a study looks for the largest value."""
    return metric not in MINIMISED


def room_on(profile: HardwareProfile, share: float) -> float | None:
    """GiB of the GPU that a share of it is; None: all of it, or there is none."""
    if share == 1.0 or not profile.gpus:
        return None
    return share * profile.gpus[0].memory_gib


def check_metric(metric: str, objective: Objective) -> None:
    """Refuse a metric that no evaluation gives, before the first one."""
    if metric not in objective.metrics:
        listed = f"use one of {', '.join(objective.metrics)}"
        raise BadInput(f"hpo.metric is {metric!r}", did_you_mean(metric, objective.metrics, listed))


def open_objective(
    composed: Composed, metric: str, *, share: float = 1.0, show: Any = None
) -> Objective:
    """The job of a configuration; `share` is what it may take of the GPU's memory."""
    if composed.task == "gpt":
        from trainfit.hpo.gpt_objective import GptObjective

        return GptObjective(composed, metric, share=share, show=show)
    from trainfit.hpo.encoder_objective import EncoderObjective

    return EncoderObjective(composed, metric, share=share, show=show)
