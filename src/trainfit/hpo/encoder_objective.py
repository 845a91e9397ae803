"""NLI and text classification as a study sees them.

Data is read and tokenised once for all trials that share it, and a frozen encoder runs once. Folds
are plain ones: a fold's own part chooses the epoch and gives the value. The held-out test is in
none of them; the final model alone meets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from trainfit.conf import Composed
from trainfit.core.plan_records import Plan
from trainfit.core.records import RunResult
from trainfit.engine.observers import Observer
from trainfit.hpo.objective import is_greater_better, room_on
from trainfit.jobs import encoder_run, job_plan
from trainfit.jobs.configuration import EncoderConfig
from trainfit.jobs.encoder_setup import Prepared
from trainfit.jobs.frozen import SharedFeatures

_DATA = ("data", "cv", "seed", "model.name", "model.weights")
"""What the prepared data depends on; everything else may differ between trials that share it."""
_DROPOUTS = ("head_dropout", "attention_dropout", "feed_forward_dropout", "lora_dropout")
_SOME = 0.1
"""A step takes the same memory and time whatever the dropout is, as long as there is some."""
_KEPT = 2
"""Prepared data sets in memory, where the study searches over settings of the data."""


class EncoderObjective:
    """A classification job."""

    metrics: tuple[str, ...] = ("f1", "accuracy", "precision", "recall", "macro_f1", "auc", "loss")

    def __init__(
        self,
        composed: Composed,
        metric: str,
        *,
        share: float = 1.0,
        show: encoder_run.Show | None = None,
    ) -> None:
        """`composed` is the configuration that the trials vary; `show` is for the final model."""
        self._job = import_module(f"trainfit.jobs.{composed.task}.train")
        self._base, self._metric, self._share, self._show = composed, metric, share, show
        self._profile = job_plan.machine(composed)
        self._prepared: dict[str, Prepared] = {}
        self._features = SharedFeatures()

    @property
    def folds(self) -> int:
        """How many there are; 1 without cross-validation."""
        return len(self._prepare(self._base).datasets)

    @property
    def sequences(self) -> int:
        """Of the first fold's training part."""
        return len(self._prepare(self._base).datasets[0].train)

    def plan(self, composed: Composed) -> Plan:
        """Worked out once for settings that take the same memory, and kept on disk."""
        lengths = self._prepare(composed).datasets[0].train.lengths.tolist()
        question = job_plan.question(_typical(composed), lengths)
        room = room_on(self._profile, self._share)
        return job_plan.answer(composed, question, self._profile, memory_gib=room)

    def train(
        self,
        composed: Composed,
        plan: Plan,
        fold: int,
        folder: Path,
        observers: Sequence[Observer],
    ) -> RunResult:
        """Train a fold for its validation score."""
        with encoder_run.comparing(
            self._prepare(composed),
            plan,
            self._profile,
            metric=self._metric,
            greater_is_better=is_greater_better(self._metric),
            features=self._features,
        ) as train:
            return train(fold, folder, observers)

    def final(self, composed: Composed) -> tuple[str, dict[str, float]]:
        """One model on all but the held-out test, and its scores there."""
        config = composed.config
        assert isinstance(config, EncoderConfig)
        single = replace(composed, config=replace(config, cv=replace(config.cv, folds=None)))
        result = self._job.train(single, self._show)
        numbers = {n: v for n, v in result.metrics.items() if isinstance(v, float)}
        return result.run, numbers

    def _prepare(self, composed: Composed) -> Prepared:
        values = composed.values()
        key = repr([v for name, v in values.items() if name.startswith(_DATA)])
        found = self._prepared.pop(key, None) or self._job.prepare(composed, nested=False)
        self._prepared = dict(list(self._prepared.items())[1 - _KEPT :]) | {key: found}
        return replace(found, composed=composed)


def _typical(composed: Composed) -> Composed:
    """The configuration with one dropout for all, so that trials that differ in it share a plan."""
    config: Any = composed.config
    model = config.model
    some = {name: _SOME for name in _DROPOUTS if getattr(model, name)}
    return replace(composed, config=replace(config, model=replace(model, **some)))
