"""Outcome of a study: its status at any time; the best configuration, trained and scored once.

No trial sees the held-out test set. The command that sees the last trial end trains the best
configuration on all other data and scores it there. The scores are stored in the study, so that
the next command reads them instead of using the test set again.
"""

from __future__ import annotations

import json
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna import Study
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import FrozenTrial, TrialState

from trainfit.conf import Composed
from trainfit.core import codec
from trainfit.core.errors import RunFailed, redact_values, redact_words
from trainfit.core.files import text_facts, write_whole
from trainfit.core.records import Record
from trainfit.hpo.objective import Objective, as_words
from trainfit.hpo.side_by_side import SIDE_BY_SIDE, SideBySide
from trainfit.hpo.studies import OpenStudy, configure, open_study, read_setting
from trainfit.hpo.trial_queue import (
    FINISHED,
    FOLDS,
    REASON,
    beating,
    is_gone,
    left_by_the_dead,
    this_worker,
)

_FINAL, _CLAIM = "final", "final_claim"


@dataclass(frozen=True, kw_only=True, slots=True)
class Best(Record):
    """Best trial of a study, and its model's scores on the held-out test set."""

    trial: int
    params: dict[str, Any]
    value: float
    test: dict[str, float]
    run: str
    """The folder of the final model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyResult(Record):
    """Result of a study."""

    study: str
    best: Best | None
    """Best trial; None where the command was stopped before the end."""
    trials: dict[str, int]
    seconds: float
    side_by_side: SideBySide | None = None
    """Trials that ran at the same time on one GPU; None where they ran one after another."""

    def __repr__(self) -> str:
        """Trials by their state, and the best one, for a terminal."""
        best = self.best
        found = {"value": best.value, "run": best.run} | best.params if best is not None else {}
        return text_facts(f"Study {self.study}", self.trials | found)


def search(task: str | type, *words: str) -> StudyResult:
    """Run the trials of a study in this process, and train its final model."""
    from trainfit.hpo.storage import using_database
    from trainfit.hpo.workers import run_trial, work
    from trainfit.jobs.registry import check_job, name_of

    begun, name = time.perf_counter(), name_of(task)
    check_job(name)
    with using_database():
        setting = read_setting(name, words)
        objective = Objective(setting.composed, setting.hpo.metric, alike=setting.alike)
        opened = open_study(setting, lambda: objective)
        ended = work(opened.queue(), partial(run_trial, opened, objective))
        best = finish(opened, lambda: objective) if ended == "done" else None
        return summarise(opened, best, time.perf_counter() - begun)


def finish(
    open_study: OpenStudy, objective: Callable[[], Objective], words: Sequence[str] = ()
) -> Best | None:
    """Best configuration with its final model, trained now unless the study has it.

    `words` change that configuration; such a model is not stored in the study. None where the
    training was stopped.
    """
    best = find_best(open_study)
    composed = best_config(open_study, best, words)
    write_config(open_study, best, composed, words)
    if words:
        return _train(best, composed, objective())
    while (final := _claimed(open_study, best)) is None:
        time.sleep(1)  # another command trains it
    if isinstance(final, Best):
        return final
    hpo, beat = open_study.setting.hpo, _beat(open_study, best)
    with beating(beat, hpo.heartbeat, None):
        trained = _train(best, composed, objective())
    with open_study.database.locked(open_study.study.study_name):
        open_study.study.set_user_attr(_CLAIM, None)
        if trained is not None:
            open_study.study.set_user_attr(_FINAL, codec.encode(trained))
    return trained


def find_best(open_study: OpenStudy) -> FrozenTrial:
    """Best complete trial, or RunFailed."""
    trials = open_study.study.get_trials(deepcopy=False)
    best = best_of(open_study.study, trials)
    if best is None:
        reasons = [t.user_attrs[REASON] for t in trials if REASON in t.user_attrs]
        last = f" (the last one was {reasons[-1]})" if reasons else ""
        raise RunFailed(
            f"no trial of {open_study.setting.name} is complete{last}",
            "run more trials, or search where they fit",
        )
    return best


def best_config(open_study: OpenStudy, best: FrozenTrial, words: Sequence[str]) -> Composed:
    """Configuration of the job with the best parameters and then `words`."""
    setting = open_study.setting
    return configure(setting.task, [*setting.job_words, *as_words(best.params), *words])


def write_config(
    open_study: OpenStudy, best: FrozenTrial, composed: Composed, words: Sequence[str] = ()
) -> Path:
    """Write best.yaml: a Hydra experiment, with the command that trains it."""
    setting = open_study.setting
    given = (*setting.job_words, *as_words(best.params), *words)
    command = redact_words(["trainfit", "train", setting.task, *given])
    head = f"# @package _global_\n# Trial {best.number} of {setting.name}: {best.value}\n"
    head += f"# {shlex.join(command)}\n"
    data = redact_values(codec.encode(composed.config))
    path = setting.folder / "best.yaml"
    write_whole(path, head + yaml.safe_dump(data, sort_keys=False))
    return path


def summarise(open_study: OpenStudy, best: Best | None, seconds: float) -> StudyResult:
    """Result of a command; also written to the study's folder, with the data of its plots."""
    beside = open_study.study.user_attrs.get(SIDE_BY_SIDE)
    result = StudyResult(
        study=open_study.setting.name,
        best=best,
        trials=status_of(open_study).counts,
        seconds=seconds,
        side_by_side=None if beside is None else codec.decode(SideBySide, beside),
    )
    folder, metric = open_study.setting.folder, open_study.setting.hpo.metric
    figures = codec.encode(study_figures(open_study.study, metric))
    write_whole(folder / "figures.json", json.dumps(figures, indent=2) + "\n")
    if best is not None:
        text = json.dumps(codec.encode(result), indent=2) + "\n"
        write_whole(folder / "result.json", text)
    return result


def _train(best: FrozenTrial, composed: Composed, objective: Objective) -> Best | None:
    run, test = objective.final(composed)
    if not test:
        return None
    value = best.value
    assert value is not None
    return Best(trial=best.number, params=best.params, value=value, test=test, run=run)


def _claimed(open_study: OpenStudy, best: FrozenTrial) -> Best | bool | None:
    """Stored result; True where this process has to train it; None while another does."""
    study, grace = open_study.study, open_study.setting.hpo.grace
    with open_study.database.locked(study.study_name):
        kept = study.user_attrs
        if (final := kept.get(_FINAL)) is not None and final["trial"] == best.number:
            return codec.decode(Best, final)
        claim = kept.get(_CLAIM)
        if claim is not None and claim["trial"] == best.number:
            late = time.time() - claim["time"] > grace
            if not late and not is_gone(claim["worker"]):
                return None
        _beat(open_study, best)()
        return True


def _beat(open_study: OpenStudy, best: FrozenTrial) -> Callable[[], None]:
    me = this_worker()

    def beat() -> None:
        claim = {"trial": best.number, "worker": me, "time": time.time()}
        open_study.study.set_user_attr(_CLAIM, claim)

    return beat


# ── status and figures ────────────────────────────────────────────────────────────────────────────


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
        counts=dict(sorted(Counter(row.state for row in rows).items())),
        best=None if best is None else row_of(best),
        eta_seconds=_eta(trials, setting.hpo.trials, len(lost)),
        trials=rows,
    )


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


def study_figures(study: Study, metric: str) -> Figures:
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
