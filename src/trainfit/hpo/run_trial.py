"""Run one trial: compose its configuration, plan it, and train its folds.

A trial that does not fit is rejected before it starts; one that runs out of memory all the same
ends as pruned, and its memory is freed. Beside other trials on its GPU either goes back to the
queue instead. The study goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna

from trainfit.conf import Composed
from trainfit.core.errors import BadInput, OutOfMemory, TrainfitError
from trainfit.core.plan_records import Plan
from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory
from trainfit.engine.observers import Observer
from trainfit.engine.recovery import CannotGoOn
from trainfit.engine.shared import Shared
from trainfit.hpo.objective import Objective, is_greater_better
from trainfit.hpo.search_space import Reporter, mean
from trainfit.hpo.studies import OpenStudy
from trainfit.hpo.trial_queue import FOLDS, Claim, Outcome
from trainfit.runtime import forget_if_full

Watch = Callable[[int, int], Sequence[Observer]]
"""Observers of a fold, given the numbers of trial and fold."""


def run_trial(
    open_study: OpenStudy, objective: Objective, claim: Claim, watch: Watch | None = None
) -> Outcome:
    """Train the folds of a trial and return its outcome; only bugs and full disks raise."""
    facts: dict[str, Any] = {}
    try:
        return _run(open_study, objective, claim, watch or (lambda _t, _f: ()), facts)
    except optuna.TrialPruned as pruned:
        return Outcome(kind="pruned", reason=f"pruned {pruned}", facts=facts)
    except optuna.exceptions.UpdateFinishedTrialError:
        return Outcome(kind="lost")
    except Exception as error:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            reason = f"out of memory: {_first_line(error)}"
            if objective.room.beside:
                return Outcome(kind="crowded", reason=reason, facts=facts)
        elif isinstance(error, CannotGoOn):
            reason = f"diverged: {_first_line(error)}"
        else:
            raise
        return Outcome(kind="pruned", reason=reason, facts=facts)
    finally:
        # The error is gone here, and with it the frames that hold the model.
        give_back_memory()


def _run(
    open_study: OpenStudy, objective: Objective, claim: Claim, watch: Watch, facts: dict[str, Any]
) -> Outcome:
    setting, trial = open_study.setting, claim.trial
    composed = setting.compose(claim.params)
    plan = _plan(objective, composed)
    if isinstance(plan, str):
        return Outcome(kind="pruned", reason=f"rejected: {plan}")
    facts["plan"] = _in_short(plan)
    if plan.compile:
        forget_if_full()
    metric, start = setting.hpo.metric, time.perf_counter()
    reporter = Reporter(
        trial,
        metric,
        greater=is_greater_better(metric, open_study.setting.task),
        by_fold=setting.hpo.pruner == "wilcoxon",
        folds=open_study.folds,
        steps=open_study.steps,
    )
    shared = Shared()
    values: list[float] = list(trial.user_attrs.get(FOLDS, []))
    for fold in range(len(values), open_study.folds):
        reporter.begin(values)
        folder = trial_folder(setting.folder, trial.number) / f"fold-{fold + 1}"
        observers = (reporter, *watch(trial.number, fold))
        result = objective.train(composed, plan, fold, folder, observers, shared)
        facts["seconds"] = time.perf_counter() - start
        facts["peak_memory_gib"] = result.peak_memory_gib
        if result.status == "stopped":
            return Outcome(kind="stopped", facts=facts)
        value = result.metrics.get(metric, math.nan)
        if not math.isfinite(value):
            return Outcome(kind="pruned", reason=f"{metric} is not finite", facts=facts)
        reporter.ended(value)
        values.append(value)
        trial.set_user_attr(FOLDS, values)
    return Outcome(kind="complete", value=mean(values), facts=facts)


def _plan(objective: Objective, composed: Composed) -> Plan | str:
    """Plan of the trial, or the reason why it cannot run."""
    try:
        plan = objective.plan(composed)
    except BadInput as error:
        return str(error)
    if plan.fits:
        return plan
    need = f"needs {plan.memory.peak_reserved_gib:.1f} GiB" if plan.memory else "does not fit"
    if objective.room.beside:
        raise OutOfMemory(f"the plan {need} beside other trials", "run it alone")
    return "; ".join([f"the plan {need}", *plan.advice[:1]])


def _in_short(plan: Plan) -> dict[str, Any]:
    names = ("effective_batch_size", "batch_size", "gradient_accumulation_steps", "compile")
    return {name: getattr(plan, name) for name in names}


def trial_folder(study: Path, number: int) -> Path:
    """Folder of a trial's logs."""
    return study / "trials" / f"{number:04d}"


def _first_line(error: BaseException) -> str:
    said = error.what if isinstance(error, TrainfitError) else str(error).strip()
    return (said.splitlines() or [type(error).__name__])[0]
