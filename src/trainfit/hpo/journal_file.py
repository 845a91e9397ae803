"""A study in one file of a shared folder: Optuna's journal, with locks and heartbeats.

Locks are the kernel's, which end with their process, here and over NFS; Optuna's own lock files
outlive a killed worker. Heartbeats are times of files, given by the server of the folder, so that
clocks of machines need not agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from filelock import FileLock
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from trainfit.core.errors import BadInput

KIND = "journal"
_ENDINGS = (".journal", ".log")


def journal_path(word: str) -> Path | None:
    """Path of a journal that a word names: journal:PATH, or a path by its ending."""
    if word.startswith(f"{KIND}:"):
        path = word.removeprefix(f"{KIND}:").removeprefix("//")
        return Path(path).expanduser().absolute() if path.strip("/") else None
    return Path(word).expanduser().absolute() if word.endswith(_ENDINGS) else None


def open_journal(path: Path) -> JournalStorage:
    """Open a journal, or make an empty one; OSError where it cannot be written."""
    with path.open("ab"):
        pass
    return JournalStorage(JournalFileBackend(str(path), lock_obj=cast(Any, _AppendLock(path))))


@contextmanager
def kernel_lock(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock of a file; filelock's Timeout after so many seconds."""
    lock = FileLock(path, timeout=seconds)
    try:
        lock.acquire()
    except NotImplementedError:
        raise BadInput(
            f"the file system of {path.parent} has no locks",
            "give another folder, or a database (hpo.storage)",
        ) from None
    try:
        yield
    finally:
        lock.release()


class _AppendLock:
    """Lock under which lines are appended; the torn line of a killed process is removed first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(f"{path}.append.lock")

    def acquire(self) -> bool:
        self._lock.acquire()
        _remove_torn_line(self._path)
        return True

    def release(self) -> None:
        self._lock.release()


def _remove_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        end = file.seek(0, 2)
        if not end:
            return
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


class Beats:
    """Heartbeats of trials: files beside the journal, whose times the file system keeps."""

    def __init__(self, journal: Path) -> None:
        self._folder = journal.with_name(f"{journal.name}.beats")

    def beat(self, trial: int) -> None:
        """Record that a trial runs."""
        self._touch(str(trial))

    def end(self, trial: int) -> None:
        """Forget a trial that has ended."""
        with suppress(OSError):
            (self._folder / str(trial)).unlink()

    def silent(self, trial: int, grace: float) -> bool:
        """Tell if a trial has a heartbeat, and the last one is older than `grace` seconds."""
        try:
            last = (self._folder / str(trial)).stat().st_mtime
        except FileNotFoundError:
            return False
        return self._touch("now") - last > grace

    def _touch(self, name: str) -> float:
        path = self._folder / name
        self._folder.mkdir(exist_ok=True)
        path.write_bytes(b".")  # a write has the server's time, where touch may have ours
        return path.stat().st_mtime
