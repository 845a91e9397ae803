"""Which trials are given up early: what they report, when, and who decides.

A trial reports its estimate of its own value: the mean over the folds so far, the current one with
its best evaluation. Folds are laid end to end and each is divided into the same number of steps,
so that trials are compared where they have seen as much, whatever their batch and their epochs.
The Wilcoxon test compares folds, so there every fold reports its own value, once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, WilcoxonPruner
from optuna.trial import Trial

from trainfit.conf.hpo import HpoConfig
from trainfit.engine.observers import Observer

_POINTS = 10
"""Steps of a fold where the epochs are too few or too many to be them."""


def steps_per_fold(hpo: HpoConfig, epochs: float) -> int:
    """Values that a fold reports."""
    if hpo.pruner == "wilcoxon":
        return 1
    return math.ceil(epochs) if 3 <= epochs <= 100 else _POINTS


def make_pruner(hpo: HpoConfig, folds: int, steps: int) -> BasePruner:
    """The pruner that the configuration names; `steps` as of steps_per_fold."""
    match hpo.pruner:
        case "median":
            return MedianPruner(hpo.pruner_startup, hpo.pruner_warmup)
        case "hyperband":
            return HyperbandPruner(max(1, hpo.pruner_warmup), max(1, folds * steps))
        case "wilcoxon":
            return WilcoxonPruner(p_threshold=hpo.pruner_threshold)
    return NopPruner()


def note_on(hpo: HpoConfig, folds: int) -> str | None:
    """What a person should know of the pruner with so many folds."""
    least = 0.5**folds
    if hpo.pruner == "wilcoxon" and least >= hpo.pruner_threshold:
        return (
            f"hpo.pruner=wilcoxon never prunes with {folds} folds: their p-value is {least:.3f} "
            f"at the least, and hpo.pruner_threshold {hpo.pruner_threshold:g}"
        )
    return None


class Reporter(Observer):
    """Tells the study how a trial is doing, and ends it where the pruner says so."""

    def __init__(
        self, trial: Trial, metric: str, *, greater: bool, by_fold: bool, folds: int, steps: int
    ) -> None:
        """`steps` are those of a fold; `by_fold` reports nothing in between."""
        self._trial, self._metric, self._greater = trial, metric, greater
        self._by_fold, self._steps, self._end = by_fold, steps, folds * steps - 1
        self._folds: list[float] = []
        self._best: float | None = None
        self._total = 1
        self._last = -1

    def begin(self, done: list[float]) -> None:
        """A fold begins, after those with these values."""
        self._folds, self._best = list(done), None
        self._last = len(done) * self._steps - 1

    def on_start(self, _step: int, total_steps: int) -> None:
        """How long the fold will be."""
        self._total = total_steps

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a score."""
        value = metrics[self._metric]
        if math.isfinite(value):
            better = max if self._greater else min
            self._best = value if self._best is None else better(self._best, value)
        place = math.ceil(self._steps * step / self._total) - 1
        if not self._by_fold and place < self._steps - 1:  # the last one is the fold's end
            self._report(self._estimate(), len(self._folds) * self._steps + place)

    def ended(self, value: float) -> None:
        """A fold ended with this value."""
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
    """Of one or more values."""
    return math.fsum(values) / len(values)
