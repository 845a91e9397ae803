"""Who works on a trial, whether they still live, and their signs of life."""

from __future__ import annotations

import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

Worker = dict[str, Any]


def this_worker() -> Worker:
    """What tells this process from all others, on any machine."""
    return {
        "machine": _machine(),
        "pid": os.getpid(),
        "born": round(psutil.Process().create_time(), 1),
    }


def is_gone(worker: Worker) -> bool:
    """Whether the process has certainly ended; on another machine nobody can tell from here."""
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
    """The host since it started, and the name space of its process numbers: containers differ."""
    parts = [platform.node(), str(psutil.boot_time())]
    try:
        parts[1] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        pass
    return " ".join(parts)


@contextmanager
def beating(beat: Callable[[], None], seconds: float, parent: int | None) -> Iterator[None]:
    """Call `beat` every so many seconds in a thread, for the length of a block.

    Where the process `parent` started this one and has gone, nobody waits for the work: the
    process asks itself to stop.
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
