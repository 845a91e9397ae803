"""Where a study stands, as plain data: its trials, the best so far, and how long it will take."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna import Study
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import FrozenTrial, TrialState

from trainfit.core import codec
from trainfit.core.files import write_whole
from trainfit.core.records import Record
from trainfit.hpo.studies import OpenStudy
from trainfit.hpo.trial_queue import FINISHED, FOLDS, REASON


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow(Record):
    """A trial."""

    number: int
    state: str
    value: float | None
    """Of a trial that was pruned: its last estimate."""
    folds: tuple[float, ...]
    seconds: float | None
    reason: str
    params: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyStatus(Record):
    """A study."""

    study: str
    task: str
    metric: str
    direction: str
    wanted: int
    counts: dict[str, int]
    """By state. A trial that failed was begun again as another, unless it failed too often."""
    best: TrialRow | None
    eta_seconds: float | None
    """With the workers there are now; None where nothing runs or has finished."""
    trials: tuple[TrialRow, ...]

    @property
    def finished(self) -> int:
        """Trials that count."""
        return self.counts.get("complete", 0) + self.counts.get("pruned", 0)


def status_of(open_study: OpenStudy) -> StudyStatus:
    """The study as it is now."""
    setting, study = open_study.setting, open_study.study
    trials = study.get_trials(deepcopy=False)
    best = best_of(study, trials)
    return StudyStatus(
        study=setting.name,
        task=setting.task,
        metric=setting.hpo.metric,
        direction=study.direction.name.lower(),
        wanted=setting.hpo.trials,
        counts=count_states(trials),
        best=None if best is None else row_of(best),
        eta_seconds=_eta(trials, setting.hpo.trials),
        trials=tuple(row_of(trial) for trial in trials),
    )


def count_states(trials: Sequence[FrozenTrial]) -> dict[str, int]:
    """How many trials are in each state that there is."""
    names = [trial.state.name.lower() for trial in trials]
    return {name: names.count(name) for name in dict.fromkeys(sorted(names))}


def best_of(study: Study, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The complete trial with the best value; the earlier of two alike."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    sign = 1 if study.direction.name == "MAXIMIZE" else -1
    return max(complete, key=lambda t: (sign * (t.value or 0.0), -t.number), default=None)


def row_of(trial: FrozenTrial) -> TrialRow:
    """A trial as plain data."""
    last = trial.last_step
    estimate = None if last is None else trial.intermediate_values[last]
    return TrialRow(
        number=trial.number,
        state=trial.state.name.lower(),
        value=trial.value if trial.state == TrialState.COMPLETE else estimate,
        folds=tuple(trial.user_attrs.get(FOLDS, ())),
        seconds=None if trial.duration is None else trial.duration.total_seconds(),
        reason=trial.user_attrs.get(REASON, ""),
        params=trial.params,
    )


def _eta(trials: Sequence[FrozenTrial], wanted: int) -> float | None:
    finished = [t for t in trials if t.state in FINISHED and t.duration is not None]
    running = sum(trial.state == TrialState.RUNNING for trial in trials)
    if not finished or not running:
        return None
    each = sum(t.duration.total_seconds() for t in finished if t.duration) / len(finished)
    return each * max(0, wanted - len(finished)) / running


_LEAST = 4
"""Complete trials below which an importance is noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A trial in the history."""

    number: int
    state: str
    value: float | None
    best: float | None
    """Of the trials up to this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The data of a study's plots."""

    study: str
    metric: str
    direction: str
    history: tuple[Point, ...]
    importance: dict[str, float]
    """How much of the value each parameter explains; empty where trials are too few."""
    parallel: tuple[dict[str, Any], ...]
    """A row for each complete trial: number, value, and its parameters."""
    curves: dict[int, dict[int, float]]
    """By trial and step: what it reported on the way."""


def figures_of(study: Study, metric: str) -> Figures:
    """The plots' data of a study as it is now."""
    trials = study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return Figures(
        study=study.study_name,
        metric=metric,
        direction=study.direction.name.lower(),
        history=tuple(_history(study, trials)),
        importance=_importance(study, complete),
        parallel=tuple({"number": t.number, "value": t.value, **t.params} for t in complete),
        curves={t.number: dict(t.intermediate_values) for t in trials if t.intermediate_values},
    )


def write_figures(folder: Path, figures: Figures) -> None:
    """As figures.json."""
    write_whole(folder / "figures.json", json.dumps(codec.encode(figures), indent=2) + "\n")


def _history(study: Study, trials: Sequence[FrozenTrial]) -> list[Point]:
    better = max if study.direction.name == "MAXIMIZE" else min
    points: list[Point] = []
    best: float | None = None
    for trial in trials:
        value = trial.value if trial.state == TrialState.COMPLETE else None
        if value is not None:
            best = value if best is None else better(best, value)
        state = trial.state.name.lower()
        points.append(Point(number=trial.number, state=state, value=value, best=best))
    return points


def _importance(study: Study, complete: Sequence[FrozenTrial]) -> dict[str, float]:
    if len(complete) < _LEAST or len({trial.value for trial in complete}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(value) for name, value in found.items()}
