"""Folds that train beside others: in processes of their own, on idle cores or on other GPUs.

A small model is fastest on few threads. Once the first steps have shown that a fold takes its time,
the last ones are trained by further processes, in the folder of the same run and to the same bits:
one on each idle core, and another where an odd fold would leave all cores but one without work.
Where the job has several GPUs (environment.py), they start at once. A fold that such a process
leaves undone is trained here.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

import psutil

from trainfit.core.libraries import search_path
from trainfit.core.plan_records import Plan, TaskSpec
from trainfit.core.records import HardwareProfile
from trainfit.engine.distributed import stop_on_signals
from trainfit.engine.observers import Observer
from trainfit.hardware.host import memory_left
from trainfit.jobs.configuration import configured_by
from trainfit.jobs.job_times import START, deal_folds
from trainfit.jobs.registry import job_module
from trainfit.jobs.run import Run, Show, check_same_data, opened
from trainfit.planning.cpu_choice import dismiss, hand_over
from trainfit.runtime.environment import other_gpus

if TYPE_CHECKING:
    from trainfit.jobs.encoder import PreparedEncoder

_FIRST, _TIMED = 10, 20
"""Steps that are not timed, and then those that are, to tell how long a fold takes."""
_ROOM = 2.0
"""Memory that must be free for a process, as a multiple of what this one takes."""
_MAIN = "import gc; gc.disable(); from trainfit.jobs.side_folds import main; main()"
"""Program of a process: it imports in three quarters of the time without looking for garbage."""
_PATIENCE = 60.0
"""Seconds that a process has for its checkpoint when it is asked to stop."""


@dataclass
class SideFolds:
    """The processes, by the folds that they train."""

    run: Run
    current: int = 0
    """Fold that is under way here."""
    processes: dict[int, subprocess.Popen[Any]] = field(default_factory=dict)

    def consider(self, seconds: float, left: Sequence[int]) -> None:
        """Start processes for the last of the folds that are left, if it is worth it."""
        gpus = other_gpus()
        cores, most = (len(gpus) + 1,) * 2 if gpus else _room(self.run)
        if self.processes or min(most, len(left)) < 2:
            return
        # A GPU that is idle costs nothing, so whatever is saved counts.
        own, *others = deal_folds(len(left), cores, most, seconds, -1.0 if gpus else START)
        rest = left[own:]
        for worker, count in enumerate(others):
            given, rest = rest[:count], rest[count:]
            process = _start(self.run, given, gpus[worker] if gpus else {})
            self.processes |= dict.fromkeys(given, process)
        if not others:
            return
        named = " and ".join(f"fold {number + 1}" for number in self.processes)
        where = "on other GPUs" if gpus else "on idle cores"
        self.run.show.note(f"{where} meanwhile: {named}")

    def wait(self, number: int) -> Literal["ours", "done", "left", "stopped"]:
        """Wait until a fold in another process is done or given up, or a signal asks to stop."""
        self.current = number
        process = self.processes.get(number)
        if process is None:
            return "ours"
        with stop_on_signals() as request:
            if not self._done(number):
                self.run.show.prepare()
            while process.poll() is None and not self._done(number):
                if request.name is not None:
                    return "stopped"
                time.sleep(0.05)
        return "done" if self._done(number) else "left"

    def end(self) -> None:
        """Ask the processes that are not done to stop, and wait for all."""
        for number, process in self.processes.items():
            if not self._done(number) and process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _done(self, number: int) -> bool:
        return (self.run.folder / f"fold-{number + 1}" / "scores.json").is_file()


class _FoldClock(Observer):
    """Tells the seconds of a fold after its first steps."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._timed_from, self._began, self._steps = 0, 0.0, 0

    def on_start(self, step: int, total_steps: int) -> None:
        self._timed_from, self._steps = step + _FIRST, total_steps

    def on_step(self, step: int) -> None:
        if step == self._timed_from:
            self._began = time.monotonic()
        elif step == self._timed_from + _TIMED:
            self._tell((time.monotonic() - self._began) / _TIMED * self._steps)


@contextmanager
def side_folds(run: Run, count: int) -> Iterator[SideFolds]:
    """Give some of `count` folds to other processes inside a block; none of them outlives it."""
    made, show = SideFolds(run), run.show

    def tell(seconds: float) -> None:
        made.consider(seconds, range(made.current, count))

    if min(*_room(run), count) > 1:
        run.show = replace(show, watch=lambda title: [*show.watch(title), _FoldClock(tell)])
    else:
        dismiss()
    try:
        yield made
    finally:
        run.show = show
        made.end()


def _room(run: Run) -> tuple[int, int]:
    """Count the processes that the cores have room for, and those that the memory has."""
    quiet = run.prepared.config.tracking == "none"  # a tracker sees one process
    if run.device.type != "cpu" or run.world.size > 1 or not quiet:
        return 1, 1
    cores = run.profile.cpu.cores
    places = cores // min(cores, run.plan.runtime.num_threads or cores)
    free = memory_left() / (_ROOM * psutil.Process().memory_info().rss)
    return places, 1 + (int(free) if places > 1 else 0)


def _start(run: Run, folds: Sequence[int], variables: Mapping[str, str]) -> subprocess.Popen[Any]:
    """Start a process, or take the one that timed steps for the plan: it has imported the most."""
    words = {"run": str(run.folder), "task": run.prepared.composed.task, "folds": list(folds)}
    task = TaskSpec(factory=f"{__name__}:train", arguments=words)
    handed = None if variables else hand_over(task)
    return handed or subprocess.Popen(
        [sys.executable, "-P", "-c", _MAIN, task.to_json(indent=None)],
        stdin=subprocess.PIPE,  # it ends with this process, also if that is killed
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": search_path(), **variables},
    )


# ── in the other process ──────────────────────────────────────────────────────────────────────


def main() -> None:
    """Train the folds that the first argument says."""
    train(**TaskSpec.from_json(sys.argv[1]).arguments)


def train(run: str, task: str, folds: Sequence[int]) -> None:
    """Train folds of a run that this process's parent leads."""
    Thread(target=_end_with_parent, daemon=True).start()
    gc.disable()
    folder, composed = Path(run), configured_by(Path(run), task)
    prepared: PreparedEncoder = job_module(task).prepare(composed)
    gc.freeze()  # what was imported is no garbage
    gc.enable()
    check_same_data(folder, prepared)
    plan, profile = Plan.load(folder / "plan.json"), HardwareProfile.load(folder / "hardware.json")
    with opened(prepared, plan, profile, folder, show=Show(), beside=True) as beside:
        for number in folds:
            if prepared.fold(beside, number, resume=True) is None:
                return


def _end_with_parent() -> None:
    os.read(0, 1)  # ends when the other end is closed; sys.stdin would be locked at the exit
    os._exit(1)
