"""A run folder has one writer: a lock that a process that dies lets go of, and errors of the disk.

RUN/run.lock      locked by the process of the first rank; readers do not look at it
RUN/writer.json   that process, for the message to a second one
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from trainfit.engine.distributed import World, first_writes
from trainfit.engine.relaunch import Process, this_process
from trainfit.errors import BadInput, RunFailed, reason

_LOCK, _WRITER = "run.lock", "writer.json"
_PATIENCE = 20.0
"""Seconds to wait for a lock whose holder is dead: its data loader's workers notice in five."""


@contextmanager
def writing(run: Path, world: World) -> Iterator[None]:
    """A block that writes to a run, which no other process does meanwhile.

    One inside another, in the same process, changes nothing. Errors of the disk become RunFailed.
    """
    lock = FileLock(run.absolute() / _LOCK, is_singleton=True)
    with _telling(run):
        with first_writes(world) as writes:
            if writes:
                _take(lock, run)
        try:
            yield
        finally:
            if world.first and lock.is_locked:
                if lock.lock_counter == 1:  # the outermost block
                    (run / _WRITER).unlink(missing_ok=True)
                lock.release()


def _take(lock: FileLock, run: Path) -> None:
    """Lock the folder, made where there is none, or raise with the process that holds it."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        if not lock.is_locked:
            _acquire(lock, run)
            this_process().save(run / _WRITER)
        else:
            lock.acquire()
    except NotImplementedError:  # a disk without locks
        return
    except OSError as error:
        raise BadInput(
            f"cannot write in {run} ({reason(error)})", "make it writable, or use another folder"
        ) from None


def _acquire(lock: FileLock, run: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            holder = _holder(run)
            if time.monotonic() < deadline and holder is not None and _is_dead(holder):
                time.sleep(0.2)
                continue
            who = "another process"
            if holder is not None:
                who = f"process {holder.pid} on {holder.host}"
            raise BadInput(
                f"{run} is written to by {who}", "wait until it ends, or stop it first"
            ) from None
        else:
            return


def _holder(run: Path) -> Process | None:
    try:
        return Process.load(run / _WRITER)
    except BadInput:
        return None


def _is_dead(holder: Process) -> bool:
    """Tell that a process of this machine is gone; of another machine nobody here knows."""
    if holder.host != this_process().host:
        return False
    try:
        found = psutil.Process(holder.pid)
        own = Process(host=holder.host, pid=holder.pid, started=found.create_time())
        return not own.same(holder) or found.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


@contextmanager
def _telling(run: Path) -> Iterator[None]:
    """A block whose errors of the disk are told in one line, with what to do."""
    try:
        yield
    except BrokenPipeError:  # whoever read what is printed has gone
        raise
    except OSError as error:
        place = error.filename or run
        what = f"cannot read or write {place} ({reason(error)})"
        raise RunFailed(what, disk_fix(error, run)) from error


def disk_fix(error: BaseException, run: Path) -> str:
    """Fix for an error of the disk under a run."""
    with suppress(OSError):
        if not run.is_dir():
            return "the run's folder was removed while it was written to: start a new run"
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    cure = "free some space" if full or "No space left" in str(error) else "make it writable"
    return f"{cure} and go on with --resume {run}; the checkpoints before are as they were"
