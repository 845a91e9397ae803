"""The processes that trials run in, one for each way of compiling.

A process stays for the next trial, since imports take seconds. One that crashes, hangs, fails or
runs out of memory leaves a record and is replaced, so that it affects no other trial. Each is in a
session of its own, so that the parent alone handles Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TextIO

from trainfit.core.errors import RunFailed
from trainfit.core.libraries import end_with_parent, search_path
from trainfit.core.plan_records import Plan
from trainfit.core.records import Record
from trainfit.planning.estimator.estimate import end, exchange, start_child
from trainfit.tuning.tuned_cache import Status, Trial, TrialCandidate, folder_prefix

READY = "ready"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRequest(Record):
    """A trial to run, as it is sent to a child."""

    candidate: TrialCandidate
    steps: int
    warm_up: int
    most_seconds: float | None = None


def main(modules: list[str]) -> None:
    """Run a child: import `modules`, report readiness, then answer one request per line."""
    answers = _own_pipe()
    end_with_parent()  # a killed search cannot end it, and a trial may hang
    for module in modules:  # first: one that cannot be imported is told before torch is
        importlib.import_module(module)
    from trainfit.tuning.trial import run_trial

    _say(answers, READY)
    for line in sys.stdin:
        request = TrialRequest.from_json(line, "the search")
        trial = run_trial(
            request.candidate,
            steps=request.steps,
            warm_up=request.warm_up,
            most_seconds=request.most_seconds,
        )
        _say(answers, trial.to_json(indent=None))


def _own_pipe() -> TextIO:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _say(answers: TextIO, line: str) -> None:
    answers.write(line + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

START_SECONDS = 180.0
"""Time limit for a child's imports, which a slow disk delays."""
_EXIT_SECONDS = 20.0
"""Time for a process that closed its output to end, on a busy machine."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Prefixes of variables that make a process a rank; a child of a rank must be none."""
_HELD_GIB = 0.8
"""GPU memory of an idle child: CUDA's context and its libraries."""


def mode_of(plan: Plan) -> str:
    """Compile mode of the plan, or 'eager'."""
    return plan.compile_mode if plan.compile else "eager"


RunTrial = Callable[..., Trial]
"""Runs one trial, as Children.run does; whatever goes wrong is its status."""


class Children:
    """Runs trials in child processes, one per compile mode, and ends them on exit."""

    def __init__(self, modules: Sequence[str] = (), *, at_most: int = 4) -> None:
        """Children import `modules` when they start; at most `at_most` of them live at a time."""
        self._modules, self._at_most = list(modules), at_most
        self._children: dict[str, _Child] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.end()
        self._children.clear()

    def start(self, modes: Sequence[str]) -> None:
        """Start children for these compile modes; no trial is timed while they import."""
        for mode in modes[: self._at_most]:
            self._child(mode)

    def run(
        self,
        candidate: TrialCandidate,
        *,
        steps: int,
        warm_up: int,
        limit: float,
        most_seconds: float | None = None,
    ) -> Trial:
        """Run a trial, and kill it after `limit` seconds.

        Waits for every child that is still importing, since that would distort the timing.
        """
        began = time.monotonic()
        mode = mode_of(candidate.plan)
        child = self._child(mode)
        self._make_room(mode, candidate.plan)
        for each in self._children.values():
            each.wait_until_ready()
        limit -= time.monotonic() - began
        if limit <= 0:
            note = "the time was over before it began"
            return Trial(settings=candidate.settings, status="skipped", note=note)
        request = TrialRequest(
            candidate=candidate, steps=steps, warm_up=warm_up, most_seconds=most_seconds
        )
        line, failure = child.ask(request.to_json(indent=None), limit)
        if failure is None:
            trial = Trial.from_json(line, "a trial")
        else:
            status, note = failure
            spent = time.monotonic() - began
            trial = Trial(settings=candidate.settings, status=status, note=note, seconds=spent)
        if trial.status != "ok":  # its state cannot be trusted any more
            self._children.pop(mode).end()
        return trial

    def _make_room(self, mode: str, plan: Plan) -> None:
        """End idle children, oldest first, where the trial needs nearly all the memory."""
        if plan.memory is None:
            return
        spare = plan.memory.capacity_gib - plan.memory.peak_reserved_gib
        others = [name for name in self._children if name != mode]
        while others and spare < _HELD_GIB * len(others):
            self._children.pop(others.pop(0)).end()

    def _child(self, mode: str) -> _Child:
        if mode not in self._children:
            while len(self._children) >= self._at_most:
                self._children.pop(next(iter(self._children))).end()
            self._children[mode] = _Child(self._modules)
        return self._children[mode]


class _Child:
    """A child process for one trial after another."""

    def __init__(self, modules: Sequence[str]) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_TORCHRUN)}
        # The child must find every module that the parent can import.
        environment["PYTHONPATH"] = search_path()
        words = ("-m", "trainfit.tuning.children", *modules)
        self._process = start_child(*words, env=environment, session=True)
        self._ready = False

    def wait_until_ready(self) -> None:
        """Wait for its imports, or raise RunFailed."""
        if self._ready:
            return
        began = time.monotonic()
        if exchange(self._process, None, START_SECONDS, self._kill) != f"{READY}\n":
            late = time.monotonic() - began >= START_SECONDS
            how = "it is still at its imports" if late else self._how_it_ended()
            self.end()
            fix = "set TRAINFIT_TRACEBACK=1 to see why"
            raise RunFailed(f"a process for trials did not start ({how})", fix)
        self._ready = True

    def ask(self, line: str, limit: float) -> tuple[str, tuple[Status, str] | None]:
        """Send a request; return the answer, or the status and reason of a failure."""
        began = time.monotonic()
        if answer := exchange(self._process, line, limit, self._kill):
            return answer, None
        if time.monotonic() - began >= limit:
            return "", ("hung", f"killed: not done after {limit:.0f} s")
        return "", ("crashed", f"the process died ({self._how_it_ended()})")

    def end(self) -> None:
        """Kill the process with its loader workers, and remove its temporary folders."""
        self._kill()
        end(self._process)
        for left in Path(tempfile.gettempdir()).glob(folder_prefix(self._process.pid) + "*"):
            shutil.rmtree(left, ignore_errors=True)

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "it does not end"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
