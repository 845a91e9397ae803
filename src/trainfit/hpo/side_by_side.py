"""Trials side by side on one GPU: planned by memory and speed, then measured.

This process runs trials itself. Helpers, each a process with a CUDA context of its own, run others
of the same study where a trial leaves room on the GPU. The steps of this process are timed without
helpers and with them. Helpers that gain too little are stopped, and their trials go back to the
queue, as does a trial that ran out of memory beside others.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Literal

from optuna import Study

from trainfit.core import codec
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan
from trainfit.core.records import Gpu, HardwareProfile, Record
from trainfit.engine.observers import Observer, TrainRow
from trainfit.hpo.fleet import Seat, Tell, start_worker, stop_workers, work
from trainfit.hpo.objective import Objective, fits_beside, room_on
from trainfit.hpo.run_trial import run_trial
from trainfit.hpo.search_space import BATCH
from trainfit.hpo.studies import OpenStudy
from trainfit.hpo.trial_queue import FINISHED, WORKER, Claim, Outcome

SIDE_BY_SIDE = "side_by_side"
"""Name of the study's attribute with a `SideBySide`."""
_MOST = 4
_SATURATED = 0.35
"""MFU of steps that keep a GPU busy; steps of a smaller one wait for the CPU between kernels."""
_LEAST_GAIN = 1.1
_ALONE, _TOGETHER = 1.0, 6.0
"""Seconds of steps to time before helpers start, and before they are judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySide(Record):
    """Trials side by side in a study's last command."""

    planned: int
    kept: int
    """As planned, or fewer where they gained too little or memory ran out."""
    gain: float | None
    """Steps of all of them in the time that one takes for a step alone; None: too few to tell."""


def share_of(gpu: Gpu, workers: int) -> float:
    """Return each worker's share of a GPU's memory, without what other programs take."""
    others = gpu.state.memory_used_by_others_gib or 0.0
    return max(0.0, 1 - others / gpu.memory_gib) / workers


def plan_workers(plan: Plan, profile: HardwareProfile, trials: int) -> int:
    """Number of trials side by side: by memory, cores, and the time a step leaves to the GPU.

    The outputs of a frozen encoder are shared within a process, so its trials stay in one.
    """
    gpu = profile.gpu
    if gpu is None or plan.workload.method == "frozen":
        return 1
    mfu = plan.time.mfu if plan.time else None
    by_speed = 1 + math.ceil(_SATURATED / mfu) if mfu else 2
    by_cores = profile.cpu.cores // (2 + plan.num_workers)
    counts = range(min(_MOST, trials, by_speed, by_cores), 1, -1)
    fitting = (n for n in counts if fits_beside(plan, room_on(gpu, share_of(gpu, n))))
    return next(fitting, 1)


def work_side_by_side(
    opened: OpenStudy, objective: Objective, *, tell: Tell, say: Callable[[str], None]
) -> Literal["done", "stopped"]:
    """Run trials until none is left, with helpers beside them where the GPU has room."""
    workers, share = _planned(opened, objective)
    if workers == 1:
        return work(opened.desk(), partial(run_trial, opened, objective), tell=tell)
    objective.share, objective.beside = share, True
    say(f"up to {workers} trials side by side: the plan leaves room for them on the GPU")
    start, batch = partial(_start, opened, share), opened.setting.values[BATCH]
    with closing(Helpers(opened.study, workers, start, say)) as helpers:
        run = partial(_run_beside, opened, objective, helpers, batch)
        ended = work(opened.desk(), run, tell=tell)
        if ended == "done":
            helpers.wait()  # where the time is up, theirs may have begun before
            opened.study.set_user_attr(SIDE_BY_SIDE, codec.encode(helpers.result()))
    return ended


def _planned(opened: OpenStudy, objective: Objective) -> tuple[int, float]:
    """Number of trials side by side, and the share of the GPU's memory that each has."""
    gpu, trials = objective.profile.gpu, opened.study.get_trials(deepcopy=False)
    left = opened.setting.hpo.trials - sum(trial.state in FINISHED for trial in trials)
    if gpu is None or left < 2:
        return 1, 1.0
    try:
        plan = objective.plan(opened.setting.composed)
    except BadInput:  # the trial itself will say so
        return 1, 1.0
    workers = plan_workers(plan, objective.profile, left)
    return workers, share_of(gpu, workers)


def _start(opened: OpenStudy, share: float, number: int) -> subprocess.Popen[bytes]:
    seat = Seat(number=number, share=share, variables={})
    logs = opened.setting.folder / "workers"
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"worker-{number}.log").open("a") as log:
        return start_worker(opened.setting, seat, log.fileno(), "--beside")


def _run_beside(
    opened: OpenStudy, objective: Objective, helpers: Helpers, batch: int, claim: Claim
) -> Outcome:
    """Run a trial, and once more with the whole GPU where there is no room beside others."""
    helpers.begin(int(claim.params.get(BATCH, batch)))
    outcome = run_trial(opened, objective, claim, lambda *_: (helpers,))
    if outcome.kind != "crowded":
        return outcome
    helpers.stop(f"trial {claim.trial.number} has too little memory beside others")
    objective.share, objective.beside = 1.0, False
    return run_trial(opened, objective, claim)


class Helpers(Observer):
    """Processes that run other trials beside this one's, while that gains enough."""

    def __init__(
        self,
        study: Study,
        workers: int,
        start: Callable[[int], subprocess.Popen[bytes]],
        say: Callable[[str], None],
    ) -> None:
        """`workers` counts this process; `start` makes the helper of a number, from 2 on."""
        self._study, self._planned, self._start, self._say = study, workers, start, say
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped = False
        self._batch: int | None = None
        self._step: int | None = None
        """Step of the last row of this fold."""
        self._timed: dict[tuple[int, int], tuple[int, float]] = {}
        """Steps and seconds by effective batch and number of trials under way."""
        self._judged: tuple[int, float | None] = (workers, None)
        """Number of trials side by side and their gain, as last measured."""

    def begin(self, batch: int) -> None:
        """Begin a trial; the helpers start with the second one at the latest."""
        if self._batch is not None:
            self._start_all()
        self._batch = batch

    def on_start(self, _step: int, _total_steps: int) -> None:
        """Begin a fold; its first row is not timed, since it has the warm-up."""
        self._step = None

    def on_log(self, row: TrainRow) -> None:
        """Time the steps of this process; start, judge or stop the helpers."""
        last, self._step = self._step, row.step
        workers = self._under_way()
        if last is None or workers is None or row.compile_seconds or self._batch is None:
            return
        steps, seconds = self._timed.get((self._batch, workers), (0, 0.0))
        new = row.step - last
        spent = seconds + new * row.step_seconds
        self._timed[self._batch, workers] = (steps + new, spent)
        if workers > 1:
            self._judge(workers)
        elif spent >= _ALONE:
            self._start_all()

    def gain(self, workers: int) -> float | None:
        """Steps of so many trials in the time of one step alone, at the same batch sizes."""
        both = [batch for batch, n in self._timed if n == workers and (batch, 1) in self._timed]
        spent = sum(self._timed[batch, workers][1] for batch in both)
        if spent < _TOGETHER:
            return None
        alone = 0.0
        for batch in both:
            steps, seconds = self._timed[batch, 1]
            alone += self._timed[batch, workers][0] * seconds / steps
        return workers * alone / spent

    def stop(self, why: str) -> None:
        """Stop the helpers for good; their trials go back to the queue."""
        self._stopped = True
        if self._alive():
            self._say(f"{why}: one at a time from here")
        self.close()

    def wait(self) -> None:
        """Wait for the helpers to end by themselves."""
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        """End the helpers."""
        stop_workers(self._processes)

    def result(self) -> SideBySide:
        """Return the number of trials side by side, and what it gained."""
        workers, gain = self._judged
        return SideBySide(planned=self._planned, kept=1 if self._stopped else workers, gain=gain)

    def _start_all(self) -> None:
        if not self._processes and not self._stopped:
            self._processes = [self._start(number) for number in range(2, self._planned + 1)]

    def _alive(self) -> set[int]:
        return {process.pid for process in self._processes if process.poll() is None}

    def _under_way(self) -> int | None:
        """Trials under way, this process's included; None while a helper warms up."""
        helpers = self._alive()
        if not helpers:
            return 1
        reported: dict[int, bool] = {}
        for trial in self._study.get_trials(deepcopy=False):
            pid = trial.user_attrs.get(WORKER, {}).get("pid")
            if pid in helpers:
                reported[pid] = reported.get(pid, False) or trial.last_step is not None
        if not reported:  # they import and read the data
            return 1
        return 1 + len(helpers) if list(reported.values()) == [True] * len(helpers) else None

    def _judge(self, workers: int) -> None:
        gain = self.gain(workers)
        if gain is None:
            return
        told = self._judged[0] == workers and self._judged[1] is not None
        self._judged = (workers, gain)
        text = f"{workers} trials side by side take {gain:.2f} times the steps of one"
        if gain < _LEAST_GAIN:
            self.stop(text)
        elif not told:
            self._say(text)
