"""Search space of a study, fitted to the job; sampling, pruning and trial 0."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, WilcoxonPruner
from optuna.trial import Trial

from trainfit.conf.composition import as_word
from trainfit.conf.search_space_files import Dimension, HpoConfig
from trainfit.core.errors import BadInput
from trainfit.engine.observers import Observer

Space = dict[str, Dimension]
BATCH = "training.effective_batch_size"


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
