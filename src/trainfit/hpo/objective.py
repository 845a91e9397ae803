"""A job as a study sees it: its plan, a fold's training, and the final model.

Data is read once for all trials that share it, and a frozen encoder runs once. A fold's own part
chooses the epoch and gives the value. The held-out test is in none of them; the
final model alone meets it. A job without a test set is scored on its validation data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainfit.conf import Composed
from trainfit.core.errors import BadInput, did_you_mean
from trainfit.core.plan_records import Plan
from trainfit.core.records import Gpu, RunResult
from trainfit.engine.observers import Observer
from trainfit.engine.shared import Shared
from trainfit.jobs import job_plan, registry
from trainfit.jobs.job import less_is_better
from trainfit.jobs.run import Prepared, Show, compare_run
from trainfit.planning.estimator.estimate import CONTEXT_GIB

_NOT_DATA = ("training.", "optimization.", "device.", "model.", "runs_dir", "tracking", "tune")
_OF_THE_MODEL = ("model.name", "model.weights")
"""Keys of `model.` that decide the tokens; others may differ between trials that share data."""
_MARGIN = 1.1
"""Memory of a trial beside others, over the predicted peak."""
WORKERS = 4
"""Most processes on one GPU; each compiles for itself."""
_CACHED = 2
"""Prepared data sets in memory, where the study searches over settings of the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuShare:
    """Memory of a GPU that a trial may take."""

    share: float = 1.0
    """Part of the GPU's memory."""
    used: float = 1.0
    """Measured peak over the planned one, where a trial was measured."""
    beside: bool = False
    """A trial for which this is too small can have the whole GPU later."""

    def gib(self, gpu: Gpu) -> float:
        """Return the GiB that are left beside a process's CUDA context."""
        return max(self.share * gpu.memory_gib - CONTEXT_GIB, 0.1)

    def holds(self, plan: Plan, gpu: Gpu) -> bool:
        """Tell if a plan for more memory needs no more than this, with a margin."""
        need = math.inf if plan.memory is None else plan.memory.peak_reserved_gib
        return plan.fits and _MARGIN * self.used * need <= self.gib(gpu)


class Objective:
    """A job in a study. One is made per process and keeps the data between trials."""

    def __init__(
        self,
        composed: Composed,
        metric: str,
        *,
        alike: int = 1,
        show: Show | None = None,
    ) -> None:
        """`composed` is the configuration that the trials vary; `show` is for the final model.

        `alike` is the number of trials that share compiled code, over all processes.
        """
        self.room = GpuShare()
        self.latest: Plan | None = None
        """Plan of the running trial."""
        self._job = registry.job_module(composed.task)
        self._base, self._metric, self._alike, self._show = composed, metric, alike, show
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
        self.latest = self._plan(composed)
        return self.latest

    def _plan(self, composed: Composed) -> Plan:
        question = self._prepare(composed).typical().tuned_job(self.profile).question
        folds = question.workload.trainings
        shared = replace(question.workload, trainings=max(folds, folds * self._alike // WORKERS))
        asked = replace(question, workload=shared)
        make = partial(job_plan.answer, composed, asked, self.profile, here=True)
        gpu = self.profile.gpu
        if gpu is None or self.room.share == 1.0:
            return make()
        alone = make(memory_gib=gpu.memory_gib - CONTEXT_GIB)
        if self.room.holds(alone, gpu):
            return alone
        small = make(memory_gib=self.room.gib(gpu))
        same = small.workload.method == alone.workload.method
        same = same and small.quantization == alone.quantization
        return small if same else replace(alone, fits=False)

    def train(
        self,
        composed: Composed,
        plan: Plan,
        fold: int,
        folder: Path,
        observers: Sequence[Observer],
        shared: Shared | None = None,
    ) -> RunResult:
        """Train a fold for its validation score, and keep nothing of it but its log.

        The folds of a trial share a model.
        """
        return compare_run(
            self._prepare(composed),
            plan,
            self.profile,
            fold,
            folder,
            observers,
            shared or Shared(),
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


def check_metric(metric: str, objective: Objective) -> None:
    """Raise BadInput for a metric that no evaluation gives, before the first one."""
    if metric not in objective.metrics:
        listed = f"use one of {', '.join(objective.metrics)}"
        raise BadInput(f"hpo.metric is {metric!r}", did_you_mean(metric, objective.metrics, listed))
