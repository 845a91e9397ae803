"""Status of a study as plain data: its trials, the best so far, and the time left."""

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
from trainfit.hpo.trial_queue import FINISHED, FOLDS, REASON, left_by_the_dead


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow(Record):
    """A trial as plain data."""

    number: int
    state: str
    value: float | None
    """Value of a complete trial, or the last estimate of a pruned one."""
    folds: tuple[float, ...]
    seconds: float | None
    reason: str
    params: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyStatus(Record):
    """A study as plain data."""

    study: str
    task: str
    metric: str
    direction: str
    wanted: int
    counts: dict[str, int]
    """Number of trials by state; a failed trial was queued again, unless it failed too often.

    lost: its worker has died, and the next claim queues it again.
    """
    best: TrialRow | None
    eta_seconds: float | None
    """Time left with the present workers; None where nothing runs or has finished."""
    trials: tuple[TrialRow, ...]

    @property
    def finished(self) -> int:
        """Number of complete or pruned trials."""
        return self.counts.get("complete", 0) + self.counts.get("pruned", 0)


def status_of(open_study: OpenStudy) -> StudyStatus:
    """Read the status of a study."""
    setting, study = open_study.setting, open_study.study
    trials = study.get_trials(deepcopy=False)
    lost = {trial.number for trial in left_by_the_dead(study, open_study.database)}
    rows = tuple(row_of(t, "lost" if t.number in lost else "") for t in trials)
    best = best_of(study, trials)
    return StudyStatus(
        study=setting.name,
        task=setting.task,
        metric=setting.hpo.metric,
        direction=study.direction.name.lower(),
        wanted=setting.hpo.trials,
        counts=count_states([row.state for row in rows]),
        best=None if best is None else row_of(best),
        eta_seconds=_eta(trials, setting.hpo.trials, len(lost)),
        trials=rows,
    )


def count_states(names: Sequence[str]) -> dict[str, int]:
    """Number of trials by state."""
    return {name: names.count(name) for name in dict.fromkeys(sorted(names))}


def best_of(study: Study, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Complete trial with the best value; of two equal ones, the earlier."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    sign = 1 if study.direction.name == "MAXIMIZE" else -1
    return max(complete, key=lambda t: (sign * (t.value or 0.0), -t.number), default=None)


def row_of(trial: FrozenTrial, state: str = "") -> TrialRow:
    """Convert a trial to plain data; `state` where it is another than the study has."""
    last = trial.last_step
    estimate = None if last is None else trial.intermediate_values[last]
    return TrialRow(
        number=trial.number,
        state=state or trial.state.name.lower(),
        value=trial.value if trial.state == TrialState.COMPLETE else estimate,
        folds=tuple(trial.user_attrs.get(FOLDS, ())),
        seconds=None if trial.duration is None else trial.duration.total_seconds(),
        reason=trial.user_attrs.get(REASON, ""),
        params=trial.params,
    )


def _eta(trials: Sequence[FrozenTrial], wanted: int, lost: int) -> float | None:
    finished = [t for t in trials if t.state in FINISHED and t.duration is not None]
    running = sum(trial.state == TrialState.RUNNING for trial in trials) - lost
    if not finished or not running:
        return None
    each = sum(t.duration.total_seconds() for t in finished if t.duration) / len(finished)
    return each * max(0, wanted - len(finished)) / running


_LEAST = 4
"""Least number of complete trials for parameter importances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A trial in the history plot."""

    number: int
    state: str
    value: float | None
    best: float | None
    """Best value of the trials up to this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Data of a study's plots."""

    study: str
    metric: str
    direction: str
    history: tuple[Point, ...]
    importance: dict[str, float]
    """Importance of each parameter; empty where trials are too few."""
    parallel: tuple[dict[str, Any], ...]
    """A row for each complete trial: number, value, and its parameters."""
    curves: dict[int, dict[int, float]]
    """Reported values by trial and step."""


def figures_of(study: Study, metric: str) -> Figures:
    """Read the data of a study's plots."""
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
    """Write figures.json."""
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
