"""Trials side by side on one GPU: planned by memory and speed, then measured.

This process runs trials itself. Once its first steps are timed, helpers run other trials of the
same study where a trial leaves room on the GPU, each a process with a CUDA context of its own. The
steps of this process are timed beside them as well. Helpers that gain too little are stopped, and
their trials go back to the queue, as does a trial that ran out of memory beside others.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from optuna import Study

from trainfit.core import codec
from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile, Record
from trainfit.engine.observers import Observer, TrainRow
from trainfit.hpo.objective import BATCH, WORKERS, GpuShare, Objective
from trainfit.hpo.studies import OpenStudy
from trainfit.hpo.trial_queue import FINISHED, WORKER, Claim, Outcome
from trainfit.hpo.workers import (
    Seat,
    Tell,
    others_on,
    run_trial,
    start_worker,
    stop_workers,
    work,
)

SIDE_BY_SIDE = "side_by_side"
"""Name of the study's attribute with a `SideBySide`."""
_SATURATED = 0.35
"""MFU of steps that keep a GPU busy; steps of a smaller one wait for the CPU between kernels."""
_UNSEEN = 1.15
"""Memory that the first steps have not shown, such as evaluations and the allocator's cache."""
_CORES = 3
"""Cores that a trial on a GPU keeps busy: its loop, and the loader's processes by turns."""
_LEAST_GAIN = 1.1
_ALONE, _TOGETHER = 1.0, 6.0
"""Seconds of steps to time before helpers start, and before they are judged."""
_LOOK_EVERY = 2.0
"""Seconds between two looks at the study, which would cost as much as a short step."""
Processes = list[subprocess.Popen[bytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySide(Record):
    """Trials side by side in a study's last command that ran some."""

    planned: int
    kept: int
    """As planned, or fewer where they gained too little or memory ran out."""
    gain: float | None
    """Steps of all of them in the time that one takes for a step alone; None: too few to tell."""


def plan_workers(
    plan: Plan, profile: HardwareProfile, trials: int, row: TrainRow | None = None
) -> tuple[int, GpuShare]:
    """Number of trials side by side, by memory, cores and idle time; and the room of each.

    Figures of the plan are replaced by those of a `row` of its log. The outputs of a frozen encoder
    are shared within a process, so its trials stay in one.
    """
    gpu = profile.gpu
    if gpu is None or plan.memory is None or plan.workload.method == "frozen":
        return 1, GpuShare()
    used, mfu = 1.0, plan.time.mfu if plan.time else None
    if row is not None:
        used = min(1.0, _UNSEEN * row.memory_gib / plan.memory.peak_reserved_gib)
        mfu = row.mfu or mfu
    by_speed = 1 + math.ceil(_SATURATED / mfu) if mfu else 2
    by_cores = profile.cpu.cores // _CORES
    for workers in range(min(WORKERS, trials, by_speed, by_cores), 1, -1):
        room = GpuShare(share=1 / workers, used=used, beside=True)
        if room.holds(plan, gpu):
            return workers, room
    return 1, GpuShare()


def work_side_by_side(
    opened: OpenStudy, objective: Objective, *, tell: Tell, say: Callable[[str], None]
) -> Literal["done", "stopped"]:
    """Run trials until none is left, with helpers beside them where the GPU has room."""
    helpers = Helpers(opened.study, partial(start_helpers, opened, objective), say)
    run = partial(_run_beside, opened, objective, helpers, opened.setting.values[BATCH])
    with closing(helpers):
        ended = work(opened.queue(), run, tell=tell)
        if ended == "done":
            helpers.wait()  # where the time is up, theirs may have begun before
            if helpers.result is not None:
                opened.study.set_user_attr(SIDE_BY_SIDE, codec.encode(helpers.result))
    return ended


def start_helpers(opened: OpenStudy, objective: Objective, row: TrainRow | None) -> Processes:
    """Start as many helpers as have room beside the running trial, and make room for them."""
    trials = opened.study.get_trials(deepcopy=False)
    left = opened.setting.hpo.trials - sum(trial.state in FINISHED for trial in trials)
    if objective.latest is None:
        return []
    workers, room = plan_workers(objective.latest, objective.profile, left, row)
    objective.room = room
    logs = opened.setting.folder / "workers"
    logs.mkdir(parents=True, exist_ok=True)
    others, started = next(iter(others_on(objective.profile.gpus)), None), []
    for number in range(2, workers + 1):
        seat = Seat(number=number, share=room.share, others=others, variables={})
        with (logs / f"worker-{number}.log").open("a", encoding="utf-8") as log:
            more = ("--beside", str(room.used))
            started.append(start_worker(opened.setting, seat, log.fileno(), *more))
    return started


def _run_beside(
    opened: OpenStudy, objective: Objective, helpers: Helpers, batch: int, claim: Claim
) -> Outcome:
    """Run a trial, and once more with the whole GPU where there is no room beside others."""
    helpers.begin(int(claim.params.get(BATCH, batch)))
    if not helpers.alive:
        objective.room = GpuShare()
    outcome = run_trial(opened, objective, claim, lambda *_: (helpers,))
    if outcome.kind != "crowded":
        return outcome
    helpers.stop(f"trial {claim.trial.number} has too little memory beside others")
    objective.room = GpuShare()
    return run_trial(opened, objective, claim)


class Helpers(Observer):
    """Processes that run other trials beside this one's, while that gains enough."""

    def __init__(
        self,
        study: Study,
        start: Callable[[TrainRow | None], Processes],
        say: Callable[[str], None],
    ) -> None:
        """`start` starts as many as have room, by the latest row of this process's log."""
        self._study, self._start, self._say = study, start, say
        self._processes: Processes | None = None
        self._batch: int | None = None
        self._step: int | None = None
        """Step of the last row of this fold."""
        self._timed: dict[tuple[int, int], tuple[int, float]] = {}
        """Steps and seconds by effective batch and number of running trials."""
        self._seen: tuple[float, int | None] = (-_LOOK_EVERY, 1)
        """Time of the last look at the study, and the trials that ran then."""
        self.result: SideBySide | None = None
        """Trials side by side; None while there are no helpers."""

    def begin(self, batch: int) -> None:
        """Begin a trial; the helpers start with the second one at the latest."""
        if self._batch is not None:
            self._start_all(None)
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
            self._start_all(row)

    def gain(self, workers: int) -> float | None:
        """Steps that `workers` trials take in the time of one step alone; None: not known yet."""
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
        if self.result is not None:
            self.result = replace(self.result, kept=1)
        if self.alive:
            self._say(f"{why}: one at a time from here")
        self.close()

    def wait(self) -> None:
        """Wait for the helpers to end by themselves."""
        for process in self._processes or ():
            process.wait()

    def close(self) -> None:
        """End the helpers; no others start."""
        self._processes = self._processes or []
        stop_workers(self._processes)

    def _start_all(self, row: TrainRow | None) -> None:
        if self._processes is not None:
            return
        self._processes = self._start(row)
        if workers := len(self._processes):
            self.result = SideBySide(planned=1 + workers, kept=1 + workers, gain=None)
            self._say(f"up to {1 + workers} trials side by side, as many as have room on the GPU")

    @property
    def alive(self) -> set[int]:
        """Process ids of the helpers that run."""
        return {process.pid for process in self._processes or () if process.poll() is None}

    def _under_way(self) -> int | None:
        """Running trials, this process's included; None while a helper warms up."""
        helpers = self.alive
        if not helpers:
            return 1
        if time.monotonic() - self._seen[0] < _LOOK_EVERY:
            return self._seen[1]
        self._seen = (time.monotonic(), self._count(helpers))
        return self._seen[1]

    def _count(self, helpers: set[int]) -> int | None:
        reported: dict[int, bool] = {}
        for trial in self._study.get_trials(deepcopy=False):
            pid = trial.user_attrs.get(WORKER, {}).get("pid")
            if pid in helpers:
                reported[pid] = reported.get(pid, False) or trial.last_step is not None
        if not reported:  # they import and read the data
            return 1
        return 1 + len(helpers) if list(reported.values()) == [True] * len(helpers) else None

    def _judge(self, workers: int) -> None:
        gain, before = self.gain(workers), self.result
        if gain is None or before is None:
            return
        self.result = replace(before, kept=workers, gain=gain)
        text = f"{workers} trials side by side take {gain:.2f} times the steps of one"
        if gain < _LEAST_GAIN:
            self.stop(text)
        elif before.gain is None or before.kept != workers:
            self._say(text)
