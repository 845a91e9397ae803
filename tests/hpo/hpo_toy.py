"""A study of a function instead of a job, and a worker on it as a process of its own.

python hpo_toy.py URL NAME TRIALS SECONDS: works on the study until it is done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optuna
from optuna.trial import TrialState

from trainfit.conf.search_space_files import Dimension, compose_study
from trainfit.hpo.storage import open_database
from trainfit.hpo.trial_queue import FINISHED, Claim, Outcome, TrialQueue, quiet
from trainfit.hpo.workers import work

SPACE = {
    "x": Dimension(kind="uniform", low=-1.0, high=1.0),
    "rate": Dimension(kind="log", low=1e-5, high=1e-1),
    "layers": Dimension(kind="int", low=1, high=8),
    "kind": Dimension(kind="categorical", choices=("a", "b", None)),
}


def toy_queue(url: str, name: str = "toy", *, seed: int = 3, **settings: Any) -> TrialQueue:
    """The queue of a study that is made where it is not there."""
    hpo = compose_study("nli", []).hpo
    hpo = replace(hpo, **{"trials": 8, "heartbeat": 1, "grace": 60, **settings})
    database = open_database(url, heartbeat=hpo.heartbeat, grace=hpo.grace)
    with database.locked(name), quiet():
        study = optuna.create_study(
            storage=database.storage, study_name=name, direction="maximize", load_if_exists=True
        )
    return TrialQueue(
        study=study,
        database=database,
        hpo=hpo,
        seed=seed,
        space=SPACE,
        values={},
        steps_per_fold=1,
    )


def value_of(params: dict[str, Any]) -> float:
    return -((params["x"] - 0.3) ** 2) - 0.01 * params["layers"]


def run_toy(claim: Claim) -> Outcome:
    return Outcome(kind="complete", value=value_of(claim.params))


def slowly(seconds: float) -> Callable[[Claim], Outcome]:
    def run(claim: Claim) -> Outcome:
        time.sleep(seconds)
        return run_toy(claim)

    return run


def chains(queue: TrialQueue) -> list[list[Any]]:
    """Trials with their retries."""
    trials = queue.study.get_trials(deepcopy=False)
    found: dict[int, list[Any]] = {}
    root: dict[int, int] = {}
    for trial in trials:
        before = trial.user_attrs.get("retry_of")
        root[trial.number] = trial.number if before is None else root[before]
        found.setdefault(root[trial.number], []).append(trial)
    return list(found.values())


def finished(queue: TrialQueue) -> list[Any]:
    return [t for t in queue.study.get_trials(deepcopy=False) if t.state in FINISHED]


def running(queue: TrialQueue) -> list[Any]:
    return queue.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


if __name__ == "__main__":
    url, name, trials, seconds = sys.argv[1:]
    at_random = int(trials)  # the search itself is not what such a worker is for
    queue = toy_queue(url, name, trials=int(trials), sampler_startup=at_random)
    work(queue, slowly(float(seconds)))
