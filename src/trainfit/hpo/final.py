"""End of a study: write the best configuration, train it, and score it on the test set once.

No trial sees the held-out test set. The command that sees the last trial end trains the best
configuration on all other data and scores it there. The scores are stored in the study, so that
the next command reads them instead of using the test set again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from optuna.trial import FrozenTrial

from trainfit.conf import Composed
from trainfit.core import codec
from trainfit.core.errors import RunFailed, redact_values, redact_words
from trainfit.core.files import text_facts, write_whole
from trainfit.core.records import Record
from trainfit.hpo.objective import Objective
from trainfit.hpo.search_space import as_words
from trainfit.hpo.side_by_side import SIDE_BY_SIDE, SideBySide
from trainfit.hpo.status import best_of, figures_of, status_of, write_figures
from trainfit.hpo.studies import OpenStudy, configure
from trainfit.hpo.trial_queue import REASON, beating, is_gone, this_worker

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
    from trainfit.hpo.studies import open_study, read_setting
    from trainfit.hpo.workers import run_trial, work
    from trainfit.jobs.registry import check_job, name_of

    begun, name = time.perf_counter(), name_of(task)
    check_job(name)
    with using_database():
        setting = read_setting(name, words)
        objective = Objective(setting.composed, setting.hpo.metric, alike=setting.alike)
        opened = open_study(setting, lambda: objective)
        ended = work(opened.desk(), partial(run_trial, opened, objective))
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
    write_config(open_study, best, composed)
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


def write_config(open_study: OpenStudy, best: FrozenTrial, composed: Composed) -> Path:
    """Write best.yaml: a Hydra experiment, with the command that trains it."""
    setting = open_study.setting
    command = ["trainfit", "train", setting.task, *setting.job_words, *as_words(best.params)]
    head = f"# @package _global_\n# Trial {best.number} of {setting.name}: {best.value}\n"
    head += f"# {' '.join(redact_words(command))}\n"
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
    write_figures(folder, figures_of(open_study.study, metric))
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
