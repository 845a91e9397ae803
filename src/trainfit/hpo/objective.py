"""A job as a study sees it: its search space, its plan, a fold's training, and the final model.

Data is read once for all trials that share it, and a frozen encoder runs once. A fold's own part
chooses the epoch and gives the value. The held-out test is in none of them; the
final model alone meets it. A job without a test set is scored on its validation data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, WilcoxonPruner
from optuna.trial import Trial

from trainfit.conf import Composed
from trainfit.conf.composition import as_word
from trainfit.conf.search_space_files import Dimension, HpoConfig
from trainfit.core.errors import BadInput, did_you_mean
from trainfit.core.files import prints_aside
from trainfit.core.plan_records import Plan
from trainfit.core.records import Gpu, RunResult
from trainfit.engine.loop import Shared
from trainfit.engine.observers import Observer
from trainfit.jobs import job_plan, registry
from trainfit.jobs.registry import less_is_better
from trainfit.jobs.run import Prepared, Show, opened
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
    """Part of the memory that other programs leave of the GPU."""
    used: float = 1.0
    """Measured peak over the planned one, where a trial was measured."""
    beside: bool = False
    """A trial for which this is too small can have the whole GPU later."""

    def gib(self, gpu: Gpu) -> float:
        """Return the GiB that are left beside a process's CUDA context."""
        free = gpu.memory_gib - (gpu.state.memory_used_by_others_gib or 0.0)
        return max(self.share * free - CONTEXT_GIB, 0.1)

    def holds(self, plan: Plan, gpu: Gpu) -> bool:
        """Tell if a plan for more memory needs no more than this, with a margin."""
        need = math.inf if plan.memory is None else plan.memory.peak_reserved_gib
        return plan.fits and _MARGIN * self.used * need <= self.gib(gpu)


class Objective:
    """A job in a study. One is made per process and keeps the data between trials."""

    def __init__(
        self, composed: Composed, metric: str, *, alike: int = 1, show: Show | None = None
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

    def suppose(self, others_gib: float) -> None:
        """Plan as if other programs took this much of the GPU.

        Trials beside this one are none of them: each has a share of its own, and with the memory
        that they happened to hold as this process started, its plans would be other ones.
        """
        gpu = self.profile.gpu
        if gpu is not None:
            state = replace(gpu.state, memory_used_by_others_gib=others_gib)
            gpus = (replace(gpu, state=state), *self.profile.gpus[1:])
            self.profile = replace(self.profile, gpus=gpus)

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

    @prints_aside()
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
        prepared, changes = self._prepare(composed), {"keep_checkpoints": 0, "profile_step": False}
        with opened(
            prepared,
            plan,
            self.profile,
            folder,
            show=Show(watch=lambda _title: observers),
            changes=changes | {"metric": self._metric, "greater_is_better": self._greater},
            shared=shared or Shared(),
        ) as run:
            return run.train(fold, folder, "", resume=False)

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


# ── the search space ──────────────────────────────────────────────────────────────────────────────


Space = dict[str, Dimension]
BATCH, RATE = "training.effective_batch_size", "training.learning_rate"


def fit_space(
    space: Mapping[str, Dimension], values: Mapping[str, Any], *, sequences: int, least_steps: int
) -> tuple[Space, list[str]]:
    """Fit a space to the configured `values` and the data; also return notes on the changes.

    A range is widened to include the configured value, which the sampler could not place otherwise.
    Batches too large for the data are left out.
    """
    fitted: Space = {}
    notes = []
    for name, one in space.items():
        if name == BATCH and one.kind == "categorical":
            one, note = _without_large(one, sequences, least_steps)
            notes += note
        if applies(one, values):
            one, note = _including(name, one, values[name])
            notes += note
        fitted[name] = one
    return fitted, notes


def _without_large(one: Dimension, sequences: int, least_steps: int) -> tuple[Dimension, list[str]]:
    smallest = min(one.choices)
    kept = tuple(c for c in one.choices if c == smallest or sequences / c >= least_steps)
    if kept == one.choices:
        return one, []
    out = ", ".join(str(c) for c in one.choices if c not in kept)
    note = f"{BATCH}: {out} left out, under {least_steps} steps in {sequences:,} sequences"
    return replace(one, choices=kept), [note]


def _including(name: str, one: Dimension, value: Any) -> tuple[Dimension, list[str]]:
    note = [f"{name}: the search includes the configured {json.dumps(value)}"]
    if one.kind == "categorical":
        if any(_same(value, choice) for choice in one.choices):
            return one, []
        return replace(one, choices=(value, *one.choices)), note
    assert one.low is not None
    assert one.high is not None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadInput(
            f"{name} is searched from {one.low:g} to {one.high:g}, and set to {json.dumps(value)}",
            f"give {name} a number, which is trial 0",
        )
    if one.low <= value <= one.high:
        return one, []
    if one.kind == "log" and not value > 0:
        raise BadInput(
            f"{name} is searched by its logarithm, and set to {value}",
            f"give {name} a number above 0, or search it uniformly",
        )
    return replace(one, low=min(one.low, value), high=max(one.high, value)), note


def _same(one: Any, other: Any) -> bool:
    """Tell if two values are equal and of one type, so that true is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def applies(one: Dimension, values: Mapping[str, Any]) -> bool:
    """Tell if a dimension is searched where the other keys have these values."""
    return all(
        any(_same(values.get(key), option) for option in options)
        for key, options in one.when.items()
    )


def suggest(trial: Trial, space: Space, values: Mapping[str, Any]) -> dict[str, Any]:
    """Sample a value for every searched key; those with a condition come last."""
    chosen: dict[str, Any] = {}
    for name in sorted(space, key=lambda name: bool(space[name].when)):
        if applies(space[name], {**values, **chosen}):
            chosen[name] = _suggest(trial, name, space[name])
    return chosen


def _suggest(trial: Trial, name: str, one: Dimension) -> Any:
    if one.kind == "categorical":
        return trial.suggest_categorical(name, one.choices)
    assert one.low is not None
    assert one.high is not None
    if one.kind == "int":
        return trial.suggest_int(name, int(one.low), int(one.high))
    return trial.suggest_float(name, one.low, one.high, log=one.kind == "log")


def defaults(space: Space, values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of trial 0: the searched keys as they are configured."""
    return {name: values[name] for name, one in space.items() if applies(one, values)}


def as_words(params: Mapping[str, Any]) -> list[str]:
    """Sampled values as words of a command."""
    return [as_word(name, value) for name, value in params.items()]


_POINTS = 10
"""Reports per fold where the epochs are too few or too many to report each."""


def steps_per_fold(hpo: HpoConfig, epochs: float) -> int:
    """Number of values that a fold reports to the pruner."""
    if hpo.pruner == "wilcoxon":
        return 1
    return math.ceil(epochs) if 3 <= epochs <= 100 else _POINTS


def make_pruner(hpo: HpoConfig, folds: int, steps: int) -> BasePruner:
    """Make the configured pruner; `steps` is the result of steps_per_fold."""
    match hpo.pruner:
        case "median":
            return MedianPruner(hpo.pruner_startup, hpo.pruner_warmup)
        case "hyperband":
            return HyperbandPruner(max(1, hpo.pruner_warmup), max(1, folds * steps))
        case "wilcoxon":
            return WilcoxonPruner(p_threshold=hpo.pruner_threshold)
    return NopPruner()


def note_on(hpo: HpoConfig, folds: int) -> str | None:
    """Warning about a pruner that cannot prune with this number of folds, or None."""
    least = 0.5**folds
    if hpo.pruner == "wilcoxon" and least >= hpo.pruner_threshold:
        return (
            f"hpo.pruner=wilcoxon never prunes with {folds} folds: their p-value is {least:.3f} "
            f"at the least, and hpo.pruner_threshold {hpo.pruner_threshold:g}"
        )
    return None


class Reporter(Observer):
    """Reports a trial's scores to the study, and ends it where the pruner decides so."""

    def __init__(
        self, trial: Trial, metric: str, *, greater: bool, by_fold: bool, folds: int, steps: int
    ) -> None:
        """`steps` is the number of reports per fold; with `by_fold` only its end is reported."""
        self._trial, self._metric, self._greater = trial, metric, greater
        self._by_fold, self._steps, self._end = by_fold, steps, folds * steps - 1
        self._folds: list[float] = []
        self._best: float | None = None
        self._total = 1
        self._last = -1

    def begin(self, done: list[float]) -> None:
        """Begin a fold, after finished ones with these values."""
        self._folds, self._best = list(done), None
        self._last = len(done) * self._steps - 1

    def on_start(self, _step: int, total_steps: int) -> None:
        """Take in the length of the fold."""
        self._total = total_steps

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report an evaluation's score to the pruner, and stop the trial where it loses."""
        value = metrics[self._metric]
        if math.isfinite(value):
            better = max if self._greater else min
            self._best = value if self._best is None else better(self._best, value)
        place = math.ceil(self._steps * step / self._total) - 1
        if not self._by_fold and place < self._steps - 1:  # the last one is the fold's end
            self._report(self._estimate(), len(self._folds) * self._steps + place)

    def ended(self, value: float) -> None:
        """Report the value of a finished fold."""
        self._best = value
        estimate = value if self._by_fold else self._estimate()
        self._report(estimate, (len(self._folds) + 1) * self._steps - 1)

    def _estimate(self) -> float | None:
        return None if self._best is None else mean([*self._folds, self._best])

    def _report(self, value: float | None, step: int) -> None:
        if value is None or step <= self._last:
            return
        self._last = step
        self._trial.report(value, step)
        if step < self._end and self._trial.should_prune():  # at its end nothing is saved
            fold = step // self._steps + 1
            raise optuna.TrialPruned(f"by the pruner in fold {fold}, at {value:.4f}")


def mean(values: list[float]) -> float:
    """Mean of one or more values."""
    return math.fsum(values) / len(values)
