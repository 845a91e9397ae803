"""What the plots of a study show, as plain data: history, importance, parallel coordinates.

Written into the study's folder as figures.json. Nothing is drawn here.
"""

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

from trainfit import codec
from trainfit.files import write_whole

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
