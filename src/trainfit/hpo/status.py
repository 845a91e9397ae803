"""Where a study stands, as plain data: its trials, the best so far, and how long it will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from trainfit.hpo.desk import FINISHED, FOLDS, REASON
from trainfit.hpo.studies import OpenStudy
from trainfit.records import Record


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
