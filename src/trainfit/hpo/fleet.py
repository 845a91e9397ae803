"""Several workers on this machine: a process each, on a GPU of its own or sharing one.

A worker runs the same command line, so that nothing it was told is lost on the way. It writes to a
file and not into a pipe that someone would have to read, and what it does is seen in the study.
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
from typing import Literal

from trainfit.engine.signals import stop_on_signals
from trainfit.errors import BadInput, RunFailed
from trainfit.hardware.cpu import allowed_by_affinity
from trainfit.hpo.objective import Objective
from trainfit.hpo.setting import STORAGE, Setting
from trainfit.hpo.studies import OpenStudy

COMMAND = (sys.executable, "-m", "trainfit")
_POLL = 0.5
_STOPPED = 130
_PATIENCE = 60.0
"""Seconds that workers have to finish their step when someone asks them to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where a worker sits."""

    number: int
    share: float
    """Of its GPU's memory."""
    variables: Mapping[str, str]


def seats(count: int, gpus: int, environment: Mapping[str, str]) -> list[Seat]:
    """A place for each worker: GPUs in turn, or a share of the cores."""
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
    open_study: OpenStudy, objective: Callable[[float], Objective], taken: Sequence[Seat]
) -> None:
    """Refuse more workers on a GPU than the plan of the configured values has room for."""
    share = min(seat.share for seat in taken)
    if share == 1.0:
        return
    plan = objective(share).plan(open_study.setting.composed)
    if not plan.fits:
        need = f"{plan.memory.peak_reserved_gib:.1f} GiB" if plan.memory else "more"
        raise BadInput(
            f"--workers {len(taken)}: a worker would have {share:.0%} of its GPU and needs {need}",
            "start fewer workers, or make the job smaller",
        )


def run_fleet(
    setting: Setting, taken: Sequence[Seat], look: Callable[[], None]
) -> Literal["done", "stopped"]:
    """Start the workers and wait for them; `look` is called every now and then.

    They are told the database by the environment: anyone on the machine can read a process's words.
    A worker that dies leaves its trial to the others.
    """
    logs = setting.folder / "workers"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack, stop_on_signals() as request:
        workers = []
        for seat in taken:
            log = stack.enter_context((logs / f"worker-{seat.number}.log").open("a"))
            workers.append(_start(setting, seat, log.fileno()))
            stack.callback(_end, workers[-1])
        while request.name is None and any(worker.poll() is None for worker in workers):
            look()
            time.sleep(_POLL)
        if request.name is not None:
            for worker in workers:
                worker.terminate()
            _wait_for(workers)
    look()
    return _verdict([worker.returncode for worker in workers], request.name is not None, logs)


def _start(setting: Setting, seat: Seat, log: int) -> subprocess.Popen[bytes]:
    options = ["--worker", str(os.getpid()), "--share", str(seat.share)]
    return subprocess.Popen(
        [*COMMAND, "hpo", setting.task, *setting.words, *options],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, STORAGE: setting.storage, **seat.variables},
    )


def _wait_for(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + _PATIENCE
    while any(worker.poll() is None for worker in workers) and time.monotonic() < until:
        time.sleep(0.1)


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
