"""A job as a study sees it: its plan, a fold's training, and the final model.

Data is read once for all trials that share it, and a frozen encoder runs once. A fold's own part
chooses the epoch and gives the value. The held-out test is in none of them; the
final model alone meets it. A job without a test set is scored on its validation data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainfit.conf import Composed
from trainfit.core.errors import BadInput, did_you_mean
from trainfit.core.plan_records import Plan
from trainfit.core.records import Gpu, RunResult
from trainfit.engine.observers import Observer
from trainfit.jobs import job_plan, registry
from trainfit.jobs.job import less_is_better
from trainfit.jobs.run import Prepared, Show, compare_run
from trainfit.planning.estimator.estimate import CONTEXT_GIB

_NOT_DATA = ("training.", "optimization.", "device.", "model.", "runs_dir", "tracking", "tune")
_OF_THE_MODEL = ("model.name", "model.weights")
"""Keys of `model.` that decide the tokens; others may differ between trials that share data."""
_MARGIN = 1.1
"""Memory of a trial beside others, over the predicted peak."""
_CACHED = 2
"""Prepared data sets in memory, where the study searches over settings of the data."""


class Objective:
    """A job in a study. One is made per process and keeps the data between trials."""

    def __init__(
        self, composed: Composed, metric: str, *, share: float = 1.0, show: Show | None = None
    ) -> None:
        """`composed` is the configuration that the trials vary; `show` is for the final model.

        `share` is the part of the GPU's memory that a trial may take.
        """
        self.share, self.beside = share, False
        """`beside`: a trial for which the share is too small can have the whole GPU later."""
        self._job = registry.job_module(composed.task)
        self._base, self._metric, self._show = composed, metric, show
        self.profile = job_plan.machine(composed)
        self._cache: dict[str, Prepared] = {}
        self._greater = is_greater_better(metric, composed.task)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that an evaluation gives."""
        found: tuple[str, ...] = self._prepare(self._base).metrics
        return found

    @property
    def folds(self) -> int:
        """Number of folds; 1 without cross-validation."""
        return self._prepare(self._base).folds

    @property
    def sequences(self) -> int:
        """Number of training sequences of the first fold."""
        return self._prepare(self._base).sequences

    def plan(self, composed: Composed) -> Plan:
        """Return the plan of a configuration, cached for all that take the same memory.

        In a share of a GPU it is the plan of a trial alone where that fits, since the same plan
        gives the same bits; and never one of another method.
        """
        job = self._prepare(composed).typical().tuned_job(self.profile)
        make = partial(job_plan.answer, composed, job.question, self.profile, here=True)
        gpu = self.profile.gpu
        if gpu is None or self.share == 1.0:
            return make()
        room = room_on(gpu, self.share)
        alone = make(memory_gib=room_on(gpu))
        if fits_beside(alone, room):
            return alone
        shared = make(memory_gib=room)
        same = shared.workload.method == alone.workload.method
        return shared if same else replace(alone, fits=False)

    def train(
        self, composed: Composed, plan: Plan, fold: int, folder: Path, observers: Sequence[Observer]
    ) -> RunResult:
        """Train a fold for its validation score, and keep nothing of it but its log."""
        return compare_run(
            self._prepare(composed),
            plan,
            self.profile,
            fold,
            folder,
            observers,
            metric=self._metric,
            greater_is_better=self._greater,
        )

    def final(self, composed: Composed) -> tuple[str, dict[str, float]]:
        """Train the model to keep; return its run folder and its scores on the held-out test."""
        config: Any = composed.config
        if hasattr(config, "cv"):
            config = replace(config, cv=replace(config.cv, folds=None))
        result = self._job.train(replace(composed, config=config), self._show)
        if result.status == "stopped":
            return result.run, {}
        return result.run, {n: v for n, v in result.metrics.items() if isinstance(v, float)}

    def _prepare(self, composed: Composed) -> Prepared:
        values = composed.values()
        key = repr(
            [v for k, v in values.items() if k in _OF_THE_MODEL or not k.startswith(_NOT_DATA)]
        )
        found: Prepared = (
            self._cache.pop(key)
            if key in self._cache
            else self._job.prepare(composed, nested=False)
        )
        self._cache = dict(list(self._cache.items())[1 - _CACHED :]) | {key: found}
        return found.configured(composed)


def is_greater_better(metric: str, task: str = "") -> bool:
    """Tell whether a study looks for the largest value of a metric."""
    own = registry.direction(task, metric) if registry.is_own(task) else None
    return not less_is_better(metric) if own is None else own


def room_on(gpu: Gpu, share: float = 1.0) -> float:
    """Return the GiB that a share of a GPU has beside a process's CUDA context."""
    return max(share * gpu.memory_gib - CONTEXT_GIB, 0.1)


def fits_beside(plan: Plan, room: float) -> bool:
    """Tell if a plan for more memory needs no more than `room` GiB, with a margin."""
    need = math.inf if plan.memory is None else _MARGIN * plan.memory.peak_reserved_gib
    return plan.fits and need <= room


def check_metric(metric: str, objective: Objective) -> None:
    """Raise BadInput for a metric that no evaluation gives, before the first one."""
    if metric not in objective.metrics:
        listed = f"use one of {', '.join(objective.metrics)}"
        raise BadInput(f"hpo.metric is {metric!r}", did_you_mean(metric, objective.metrics, listed))
