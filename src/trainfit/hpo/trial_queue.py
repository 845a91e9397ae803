"""Queue of a study's trials: each is handed out once and finished once.

A study of N trials ends with exactly N that are complete or pruned. Under the study's lock a worker
first fails the trials of dead workers and queues them again with their parameters, then counts the
finished and running ones, and takes a new one only while there are fewer than N. A worker's result
counts only if its trial was not given to another meanwhile.
"""

from __future__ import annotations

import os
import platform
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
import psutil
from optuna import Study
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from trainfit.conf.search_space_files import HpoConfig
from trainfit.hpo.objective import Space, suggest
from trainfit.hpo.storage import Database

Worker = dict[str, Any]


def this_worker() -> Worker:
    """Identity of this process among those of all machines."""
    return {
        "machine": _machine(),
        "pid": os.getpid(),
        "born": round(psutil.Process().create_time(), 1),
    }


def is_gone(worker: Worker) -> bool:
    """Tell if the process has certainly ended; False for one on another machine."""
    if worker["machine"] != _machine():
        return False
    try:
        process = psutil.Process(worker["pid"])
        same = abs(process.create_time() - worker["born"]) < 1
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _machine() -> str:
    """Identity of the host since it started, and of its process namespace."""
    parts = [platform.node(), str(psutil.boot_time())]
    try:
        parts[1] = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        pass
    return " ".join(parts)


@contextmanager
def beating(beat: Callable[[], None], seconds: float, parent: int | None) -> Iterator[None]:
    """Call `beat` every `seconds` in a thread while the block runs.

    Where the process `parent` has gone, this process stops itself, since its work is not needed.
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            beat()
            if parent is not None and os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
WORKER, REASON, FOLDS = "worker", "reason", "folds"
"""User attributes of a trial: its worker, why it ended, and the values of its folds."""
_RETRY_OF, _DEATHS, _STOPPED = "retry_of", "deaths", "stopped"
PUT_BACK = ("stopped", "crowded")
"""Outcomes of a trial that goes back to the queue through no fault of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of a trial in this process."""

    kind: Literal["complete", "pruned", "stopped", "crowded", "failed", "lost"]
    """stopped: by a signal, another worker continues it; crowded: it has too little memory beside
    other trials; lost: another worker has it already."""
    value: float | None = None
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A trial to run, with its parameters."""

    trial: Trial
    params: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialQueue:
    """Queue of the trials of one study."""

    study: Study
    database: Database
    hpo: HpoConfig
    seed: int
    space: Space
    values: Mapping[str, Any]
    """Configured values, for the conditions of the space."""
    steps_per_fold: int
    """Number of values that a fold reports."""
    begun: float = field(default_factory=time.monotonic)

    def claim(self) -> Claim | Literal["wait", "done"]:
        """Take a trial; or wait, since others' trials may come back; or done."""
        with self.database.locked(self.study.study_name), quiet():
            self._fail_the_dead()
            self._queue_again()
            counts = self.counts()
            finished = sum(counts[state] for state in FINISHED)
            if finished >= self.hpo.trials or self._is_late():
                return "done"
            if finished + counts[TrialState.RUNNING] >= self.hpo.trials:
                return "wait"
            self.study.sampler = self._sampler()
            trial = self.study.ask()
            params = suggest(trial, self.space, self.values)
            # In this order: a trial that names its worker has a heartbeat, and one that runs
            # without a name, seen under the lock, was left by a process that died right here.
            self.beat(trial)
            trial.set_user_attr(WORKER, this_worker())
            return Claim(trial=trial, params=params)

    def tell(self, trial: Trial, outcome: Outcome) -> bool:
        """Record the outcome of a trial; False where another worker has it meanwhile."""
        with self.database.locked(self.study.study_name), quiet():
            state = self.database.storage.get_trial(trial._trial_id).state
            if state != TrialState.RUNNING or outcome.kind == "lost":
                return False
            for name, value in outcome.facts.items():
                trial.set_user_attr(name, value)
            if outcome.reason:
                trial.set_user_attr(REASON, outcome.reason)
            if outcome.kind == "complete":
                self.study.tell(trial, outcome.value)
            elif outcome.kind == "pruned":
                self.study.tell(trial, state=TrialState.PRUNED)
            else:
                trial.set_user_attr(_STOPPED, outcome.kind in PUT_BACK)
                self.study.tell(trial, state=TrialState.FAIL)
                self._queue_again()
            self.database.ended(trial._trial_id)
            return True

    def beat(self, trial: Trial) -> None:
        """Record a heartbeat; a database that cannot be reached for a moment is ignored."""
        with suppress(optuna.exceptions.StorageInternalError, OSError):
            self.database.beat(trial._trial_id)

    def counts(self) -> Counter[TrialState]:
        return Counter(trial.state for trial in self.study.get_trials(deepcopy=False))

    def _is_late(self) -> bool:
        hours = self.hpo.hours
        return hours is not None and time.monotonic() - self.begun >= 3600 * hours

    def _sampler(self) -> TPESampler:
        """Sampler seeded by the trial's place among those that are no retries.

        A trial's sample follows from the seed and the trials before it, also after a restart.
        """
        trials = self.study.get_trials(deepcopy=False)
        place = sum(_RETRY_OF not in trial.user_attrs for trial in trials)
        [seed] = np.random.SeedSequence([self.seed, place]).generate_state(1)
        return TPESampler(seed=int(seed), n_startup_trials=self.hpo.sampler_startup)

    def _fail_the_dead(self) -> None:
        for trial in left_by_the_dead(self.study, self.database, unnamed=True):
            self.database.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
            self.database.ended(trial._trial_id)

    def _queue_again(self) -> None:
        """Queue each failed trial once more, with its parameters and the folds it had done."""
        trials = self.study.get_trials(deepcopy=False)
        again = {trial.user_attrs.get(_RETRY_OF) for trial in trials}
        for trial in trials:
            if trial.state == TrialState.FAIL and trial.number not in again:
                died = not trial.user_attrs.get(_STOPPED, False)
                deaths = trial.user_attrs.get(_DEATHS, 0) + died
                if deaths <= self.hpo.retries:
                    self._requeue(trial, deaths)

    def _requeue(self, trial: FrozenTrial, deaths: int) -> None:
        folds = trial.user_attrs.get(FOLDS, [])
        done = len(folds) * self.steps_per_fold
        self.study.add_trial(
            optuna.create_trial(
                state=TrialState.WAITING,
                params=trial.params,
                distributions=trial.distributions,
                user_attrs={FOLDS: folds, _RETRY_OF: trial.number, _DEATHS: deaths},
                system_attrs=trial.system_attrs,
                intermediate_values={
                    step: value for step, value in trial.intermediate_values.items() if step < done
                },
            )
        )


def left_by_the_dead(
    study: Study, database: Database, *, unnamed: bool = False
) -> list[FrozenTrial]:
    """Trials that count as running, whose worker is gone or silent.

    With `unnamed`, under the lock alone, those too that no worker has put its name to.
    """
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    silent = database.silent(study, [trial._trial_id for trial in running])
    return [
        trial
        for trial in running
        if trial._trial_id in silent
        or (is_gone(worker) if (worker := trial.user_attrs.get(WORKER)) else unnamed)
    ]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Optuna's warnings on heartbeats."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "Heartbeat of storage")
        yield
