"""Database of a study, or a journal in a shared folder, and the lock for handing out trials.

Optuna's storage makes single changes atomic, but handing out a trial takes several. They are made
under a lock that a dying process releases: a file lock beside SQLite and a journal, an advisory
lock in PostgreSQL.

The journal's locks are the kernel's, which end with their process, here and over NFS; Optuna's own
lock files outlive a killed worker. Its heartbeats are times of files, given by the server of the
folder, so that clocks of machines need not agree.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import optuna
from filelock import FileLock, Timeout
from optuna import Study
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    IntegrityError,
    NoSuchModuleError,
    SQLAlchemyError,
)

from trainfit.core.errors import MALFORMED, BadInput, RunFailed, reason, redact_word

_KINDS = ("sqlite", "postgresql")
_PATIENCE = 120
"""Seconds to wait for a lock, which is usually held for milliseconds."""
_TRIES = 10
"""Attempts to open tables that other processes are making."""


@dataclass(frozen=True, slots=True)
class Database:
    """An open database, or an open journal."""

    storage: RDBStorage | JournalStorage
    url: URL
    grace: int
    """Seconds without a heartbeat after which a trial's worker counts as dead."""

    @property
    def shown(self) -> str:
        """URL without its credentials."""
        return _shown(self.url)

    def beat(self, trial: int) -> None:
        """Record a heartbeat of a trial."""
        if isinstance(self.storage, RDBStorage):
            self.storage.record_heartbeat(trial)
            self.storage.remove_session()
        else:
            self._beats.beat(trial)

    def ended(self, trial: int) -> None:
        """Forget the heartbeats of a trial that has ended."""
        if isinstance(self.storage, JournalStorage):
            self._beats.end(trial)

    def silent(self, study: Study, trials: Sequence[int]) -> set[int]:
        """Trials among these, which run, that have sent no heartbeat for too long."""
        if isinstance(self.storage, RDBStorage):
            return set(self.storage._get_stale_trial_ids(study._study_id)).intersection(trials)
        return {trial for trial in trials if self._beats.silent(trial, self.grace)}

    @property
    def _beats(self) -> Beats:
        return Beats(Path(str(self.url.database)))

    @contextmanager
    def locked(self, study: str) -> Iterator[None]:
        """Hold the lock of a study during the block."""
        if not isinstance(self.storage, RDBStorage) or self.url.get_backend_name() == "sqlite":
            try:
                with kernel_lock(Path(f"{self.url.database}.lock"), _PATIENCE):
                    yield
            except Timeout:
                raise _stuck(study) from None
            return
        key = int.from_bytes(hashlib.sha256(study.encode()).digest()[:8], signed=True)
        engine = self.storage.engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"SET lock_timeout = '{_PATIENCE}s'"))
            try:
                connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": key})
            except SQLAlchemyError:
                raise _stuck(study) from None
            try:
                yield
            finally:
                connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": key})


@contextmanager
def using_database() -> Iterator[None]:
    """Turn errors of the database or the disk into one line."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        raise
    except OSError as error:
        raise RunFailed(
            f"cannot read or write {error.filename2 or error.filename} ({reason(error)})",
            "make it writable and run the same command again: it continues where it was",
        ) from error
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        cause = error.__cause__ or error
        why = reason(getattr(cause, "orig", None) or cause)
        if "malformed" in why or "not a database" in why or "no such" in why:
            raise BadInput(
                f"the database of the study is damaged ({why})",
                "restore it, or give another one (hpo.storage)",
            ) from None
        raise RunFailed(
            f"the database of the study cannot be used ({why})",
            "look after it and run the same command again: it continues where it was",
        ) from None


@contextmanager
def reading_study() -> Iterator[None]:
    """Also report data of an unexpected form as a damaged database, while reading a study."""
    with using_database():
        try:
            yield
        except MALFORMED as error:
            raise BadInput(
                f"the database of the study is damaged ({type(error).__name__})",
                "restore it, or give another one (hpo.storage)",
            ) from None


def _stuck(study: str) -> RunFailed:
    return RunFailed(
        f"the study {study} has been locked for {_PATIENCE} s",
        "look for a worker that was stopped but not ended",
    )


def _shown(url: URL) -> str:
    if url.get_backend_name() == KIND:
        return f"{KIND}:{url.database}"
    return redact_word(url.render_as_string(hide_password=False))


def open_database(url: str, *, heartbeat: int = 10, grace: int = 60) -> Database:
    """Connect, and make Optuna's tables or the journal if needed."""
    parsed = _parsed(url)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    shown = _shown(parsed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = _opened(parsed, heartbeat, grace)
    except ImportError:
        raise BadInput(
            f"hpo.storage={shown} needs a driver that is not installed",
            "pip install 'trainfit[postgres]'",
        ) from None
    except (SQLAlchemyError, OSError) as error:
        cause = getattr(error, "orig", None) or error
        if parsed.host is None:
            folder = Path(str(parsed.database)).parent
            what = f"hpo.storage={shown} cannot be written ({reason(cause)})"
            fix = f"make {folder} a folder that you may write in, or give another one"
            raise BadInput(what, fix) from None
        raise BadInput(
            f"hpo.storage={shown} cannot be reached ({reason(cause)})",
            "start the database, or give another one",
        ) from None
    except (RuntimeError, ValueError, KeyError) as error:  # tables of another version of Optuna
        raise BadInput(f"hpo.storage={shown}: {reason(error)}", "give another database") from None
    return Database(storage, parsed, grace)


def open_existing(url: str) -> Database:
    """Connect to a database of studies; BadInput for a file that is not there."""
    parsed = _parsed(url)
    on_disk = parsed.get_backend_name() in ("sqlite", KIND)
    if on_disk and not Path(str(parsed.database)).exists():
        what = f"there is no database {_shown(parsed)}"
        raise BadInput(what, "give the hpo.storage that a study was begun with")
    return open_database(url)


def _opened(url: URL, heartbeat: int, grace: int) -> RDBStorage | JournalStorage:
    if url.get_backend_name() == KIND:
        return open_journal(Path(str(url.database)))
    return _connected(
        url.render_as_string(hide_password=False),
        engine_kwargs=_options(url),
        heartbeat_interval=heartbeat,
        grace_period=grace,
    )


def _connected(url: str, **options: Any) -> RDBStorage:
    """Open Optuna's storage, again if another process makes the tables at the same time."""
    for _ in range(_TRIES - 1):
        try:
            return RDBStorage(url, **options)
        except DatabaseError as error:
            if not isinstance(error, IntegrityError) and "already exists" not in str(error):
                raise
        time.sleep(0.3)
    return RDBStorage(url, **options)


def _parsed(url: str) -> URL:
    fix = "give sqlite:///FILE, journal:FILE or postgresql://USER@HOST/DATABASE"
    if path := journal_path(url):
        return URL.create(KIND, database=str(path))
    try:
        parsed = make_url(url)
        kind = parsed.get_backend_name()
    except (ArgumentError, NoSuchModuleError):
        raise BadInput("hpo.storage is no URL of a database", fix) from None
    if kind not in _KINDS:
        raise BadInput(f"hpo.storage is on {kind}", fix)
    if kind == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise BadInput("hpo.storage is in memory, where no worker finds it", fix)
        return parsed.set(database=str(Path(str(parsed.database)).expanduser().absolute()))
    return parsed.set(drivername="postgresql+psycopg")


def _options(url: URL) -> dict[str, Any]:
    if url.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": 60}}  # the others' writes take turns
    # A trial may take longer than a connection lives.
    return {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}


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
    """Hold the lock of a file; filelock's Timeout when `seconds` have passed."""
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
