"""Restarts by torchrun (the run to continue, what to change), and the lock on a run's folder.

When a process dies, torchrun (--max-restarts) ends the others and starts the same command again,
which must continue the run and not begin another. So launch.json in the run's folder names the
torchrun agents and the process that began it: another process of one of these agents is a
restart. otherwise.json holds changes for the next start, such as a finer cut.
"""

from __future__ import annotations

import errno
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from trainfit.core import codec
from trainfit.core.errors import BadInput, RunFailed, reason
from trainfit.core.files import read_text
from trainfit.core.records import Record
from trainfit.engine.distributed import World, first_writes, gather
from trainfit.runs import run_folder

_LAUNCH = "launch.json"
_OTHERWISE = "otherwise.json"
_CLOCK = 60.0
"""Largest difference in seconds between two readings of a process's start time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process(Record):
    """A process, identified by host, number and start time."""

    host: str
    pid: int
    started: float

    def same(self, other: Process) -> bool:
        """Compare two records; start times may differ slightly."""
        near = abs(self.started - other.started) < _CLOCK
        return near and (self.host, self.pid) == (other.host, other.pid)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch(Record):
    """Processes that started the current ranks."""

    first: Process
    """Process of the first rank."""
    agents: tuple[Process, ...]
    """torchrun processes of all machines; empty without torchrun."""

    def note(self, run: Path) -> None:
        """Save launch.json, where torchrun started the run."""
        if self.agents:
            self.save(run / _LAUNCH, parents=False)

    def is_restart(self, run: Path) -> bool:
        """True where an earlier process of the same torchrun began this run."""
        try:
            before = Launch.load(run / _LAUNCH)
        except BadInput:
            return False
        ours = any(agent.same(other) for agent in self.agents for other in before.agents)
        return ours and not self.first.same(before.first)

    def find_run(self, root: Path, config: Any) -> Path | None:
        """Find the newest run under `root` with this configuration that is to be continued."""
        wanted = run_folder.written_config(config)
        found = [
            path.parent
            for path in root.glob(f"*/{_LAUNCH}")
            if self.is_restart(path.parent) and _text(path.parent / "config.json") == wanted
        ]
        return max(found, key=lambda run: (run / _LAUNCH).stat().st_mtime_ns, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartChanges(Record):
    """Changes for the next start, after memory ran out and recovery in place was impossible."""

    rung: int = 0
    """Smallest index in the ladder of cuts."""
    eval_batch_size: int | None = None
    """Largest batch size of evaluations; None for no limit."""

    def leave(self, run: Path) -> None:
        """Save these changes for the next restart."""
        self.save(run / _OTHERWISE, parents=False)


def _text(path: Path) -> str | None:
    try:
        return read_text(path)
    except (OSError, ValueError):
        return None


def find_launch(world: World) -> Launch:
    """Collect the processes that started these ranks; every rank calls this."""
    own = [this_process()]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        own.append(_process(os.getppid()))
    said = [
        codec.loads(tuple[Process, ...], text)
        for text in gather(world, codec.dumps(own, indent=None))
    ]
    agents: list[Process] = []
    for _, *above in said:
        agents += [agent for agent in above if not any(agent.same(other) for other in agents)]
    return Launch(first=said[0][0], agents=tuple(agents))


def restarts_left() -> int:
    """Number of restarts that torchrun has left."""
    names = ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
    most, done = (int(os.environ.get(name, "0")) for name in names)
    return most - done


def read_changes(run: Path) -> RestartChanges:
    """Read the changes that an earlier process saved."""
    path = run / _OTHERWISE
    return RestartChanges.load(path) if path.is_file() else RestartChanges()


def this_process() -> Process:
    """Identify this process."""
    return _process(os.getpid())


def _process(pid: int) -> Process:
    return Process(host=platform.node(), pid=pid, started=psutil.Process(pid).create_time())


_LOCK, _WRITER = "run.lock", "writer.json"
_PATIENCE = 20.0
"""Seconds to wait for a dead process's lock: its loader's workers hold it for about five."""


@contextmanager
def writing(run: Path, world: World) -> Iterator[None]:
    """Lock a run's folder for a block, so that no other process writes to it.

    A nested block in the same process changes nothing. Disk errors become RunFailed.
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
    """Lock the folder, creating it if needed; raise BadInput that names the process holding it."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        if not lock.is_locked:
            _acquire(lock, run)
            this_process().save(run / _WRITER)
        else:
            lock.acquire()
    except NotImplementedError:  # a file system without locks
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
            return
        except Timeout:
            holder = _holder(run)
            if time.monotonic() < deadline and holder is not None and _is_dead(holder):
                time.sleep(0.2)
                continue
            who = f"process {holder.pid} on {holder.host}" if holder else "another process"
            raise BadInput(
                f"{run} is written to by {who}", "wait until it ends, or stop it first"
            ) from None


def _holder(run: Path) -> Process | None:
    try:
        return Process.load(run / _WRITER)
    except BadInput:
        return None


def _is_dead(holder: Process) -> bool:
    """Check for a dead process on this machine; processes of other machines count as alive."""
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
    """Convert disk errors of a block to RunFailed with a fix."""
    try:
        yield
    except BrokenPipeError:  # the reader of our output has closed it
        raise
    except OSError as error:
        place = error.filename or run
        what = f"cannot read or write {place} ({reason(error)})"
        raise RunFailed(what, disk_fix(error, run)) from error


def disk_fix(error: BaseException, run: Path) -> str:
    """Suggest a fix for a disk error in a run's folder."""
    with suppress(OSError):
        if not run.is_dir():
            return "the run's folder was removed while it was written to: start a new run"
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    shared = full and getattr(error, "filename", None) is None  # maybe of a loader's workers
    cure = "free some space" if full or "No space left" in str(error) else "make it writable"
    cure = f"{cure} there or in /dev/shm" if shared else cure
    return f"{cure} and continue with --resume {run}; the checkpoints before are as they were"
