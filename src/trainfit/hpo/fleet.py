"""Several workers on this machine: a process each, on a GPU of its own or sharing one.

A worker runs the same command line and writes to a log file; its progress is read from the study.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainfit.core.errors import BadInput, RunFailed, redact
from trainfit.engine.distributed import StopRequest, stop_on_signals
from trainfit.hardware.host import allowed_by_affinity
from trainfit.hpo.objective import GpuShare, Objective
from trainfit.hpo.studies import OpenStudy
from trainfit.hpo.study_settings import STORAGE, StudySettings
from trainfit.hpo.trial_queue import PUT_BACK, Claim, Outcome, TrialQueue, beating
from trainfit.jobs.models.sources import kept_in_memory

COMMAND = (sys.executable, "-m", "trainfit")
_POLL = 0.5
_STOPPED = 130
_PATIENCE = 60.0
"""Seconds that workers get to finish their step when they are asked to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """GPU, or cores, of a worker."""

    number: int
    share: float
    """Share of its GPU's memory."""
    variables: Mapping[str, str]


def seats(count: int, gpus: int, environment: Mapping[str, str]) -> list[Seat]:
    """Seats for the workers: GPUs in turn, or an equal share of the cores."""
    if not gpus:
        threads = str(max(1, allowed_by_affinity() // count))
        own = {} if "OMP_NUM_THREADS" in environment else {"OMP_NUM_THREADS": threads}
        return [Seat(number=n, share=1.0, variables=own) for n in range(1, count + 1)]
    named = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = [name for name in named.split(",") if name] or [str(n) for n in range(gpus)]
    on_each = [sum(k % gpus == n for k in range(count)) for n in range(gpus)]
    return [
        Seat(
            number=k + 1,
            share=1 / on_each[k % gpus],
            variables={"CUDA_VISIBLE_DEVICES": names[k % gpus]},
        )
        for k in range(count)
    ]


def check_room(
    open_study: OpenStudy, objective: Callable[[], Objective], taken: Sequence[Seat]
) -> None:
    """Raise BadInput where the plan of the configured values does not fit a worker's share."""
    share = min(seat.share for seat in taken)
    if share == 1.0:
        return
    objective().room = GpuShare(share=share)
    plan = objective().plan(open_study.setting.composed)
    if not plan.fits:
        need = f"{plan.memory.peak_reserved_gib:.1f} GiB" if plan.memory else "more"
        raise BadInput(
            f"--workers {len(taken)}: a worker would have {share:.0%} of its GPU and needs {need}",
            "start fewer workers, or make the job smaller",
        )


def run_fleet(
    setting: StudySettings, taken: Sequence[Seat], look: Callable[[], None]
) -> Literal["done", "stopped"]:
    """Start the workers and wait for them; `look` is called while waiting.

    The database URL is passed in the environment, since any user of the machine can read command
    lines. Other workers take over the trial of a worker that dies.
    """
    logs = setting.folder / "workers"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack, stop_on_signals() as request:
        workers = []
        for seat in taken:
            log = stack.enter_context((logs / f"worker-{seat.number}.log").open("a"))
            workers.append(start_worker(setting, seat, log.fileno()))
            stack.callback(_end, workers[-1])
        while request.name is None and any(worker.poll() is None for worker in workers):
            look()
            time.sleep(_POLL)
        if request.name is not None:
            stop_workers(workers)
    look()
    return _verdict([worker.returncode for worker in workers], request.name is not None, logs)


def start_worker(
    setting: StudySettings, seat: Seat, log: int, *more: str
) -> subprocess.Popen[bytes]:
    """Start a worker of this process, with `more` options."""
    options = ["--worker", str(os.getpid()), "--share", str(seat.share), *more]
    return subprocess.Popen(
        [*COMMAND, "hpo", setting.task, *setting.words, *options],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, STORAGE: setting.storage, **seat.variables},
    )


def stop_workers(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Have the workers put their trials back after their step, and wait for them to end."""
    for worker in workers:
        worker.terminate()
    until = time.monotonic() + _PATIENCE
    while any(worker.poll() is None for worker in workers) and time.monotonic() < until:
        time.sleep(0.1)
    for worker in workers:
        _end(worker)


def _end(worker: subprocess.Popen[bytes]) -> None:
    if worker.poll() is None:
        worker.kill()
    worker.wait()


def _verdict(codes: Sequence[int | None], asked: bool, logs: Path) -> Literal["done", "stopped"]:
    if asked or _STOPPED in codes:
        return "stopped"
    if 0 in codes:
        return "done"
    said = [_last_line(path) for path in sorted(logs.glob("*.log"))]
    reason = next((text for text in said if text), f"exit codes {list(codes)}")
    raise RunFailed(
        f"all workers ended early ({reason})", f"see {logs}; the same command goes on from here"
    )


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


_TRIAL_POLL = 1.0
"""Seconds between two checks for a trial that a dead worker left."""

Run = Callable[[Claim], Outcome]
Tell = Callable[[int, dict[str, Any], Outcome], None]
"""Called with number, parameters and outcome of each trial that ended."""


def work(
    desk: TrialQueue, run: Run, *, parent: int | None = None, tell: Tell | None = None
) -> Literal["done", "stopped"]:
    """Run trials until none is left, or until the process `parent` is gone.

    A pretrained model is read once for all of them.
    """
    with stop_on_signals() as request, kept_in_memory():
        while request.name is None:
            claim = desk.claim()
            if claim == "done":
                return "done"
            if claim == "wait":
                _wait(request, parent)
            elif _work_on(desk, claim, run, request, parent, tell) in PUT_BACK:
                return "stopped"
    return "stopped"


def _wait(request: StopRequest, parent: int | None) -> None:
    if parent is not None and os.getppid() != parent:
        request.name = "SIGTERM"
    else:
        time.sleep(_TRIAL_POLL)


def _is_asked(request: StopRequest) -> bool:
    """Tell if a signal has arrived; a function, since the type checker cannot know."""
    return request.name is not None


def _work_on(
    desk: TrialQueue,
    claim: Claim,
    run: Run,
    request: StopRequest,
    parent: int | None,
    tell: Tell | None,
) -> str:
    if _is_asked(request):  # while the trial was being claimed
        desk.tell(claim.trial, Outcome(kind="stopped"))
        return "stopped"
    try:
        with beating(lambda: desk.beat(claim.trial), desk.hpo.heartbeat, parent):
            outcome = run(claim)
    except KeyboardInterrupt:
        desk.tell(claim.trial, Outcome(kind="stopped"))
        return "stopped"
    except Exception as error:
        if _is_asked(request):  # a Ctrl-C reaches helper processes too, which die of it
            desk.tell(claim.trial, Outcome(kind="stopped"))
            return "stopped"
        reason = f"{type(error).__name__}: {(redact(str(error)).splitlines() or [''])[0]}"
        desk.tell(claim.trial, Outcome(kind="failed", reason=reason))
        raise
    if not desk.tell(claim.trial, outcome):
        outcome = Outcome(kind="lost", reason="another worker has it")
    if tell is not None:
        tell(claim.trial.number, claim.params, outcome)
    return outcome.kind
