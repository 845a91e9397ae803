"""Files are written whole or not at all, and only regular files are read."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from html import escape
from io import BufferedReader
from pathlib import Path
from typing import Any, TextIO

from trainfit.core.errors import BadInput, TrainfitWarning, brief, reason

LARGEST_TEXT = 256 << 20
"""Maximum bytes of a file that is read at once; records and caches are smaller."""
LARGEST_LOG = 2 << 30
"""Maximum bytes of a file that grows with a run."""
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_KERNEL = (Path("/proc"), Path("/sys"))
"""File systems whose files are generated while they are read: no size, and some never end."""
_NAME = re.compile(r"\w(?:[\w .,+=@-]*[\w+=@-])?")
_LONGEST = 100
"""Maximum bytes of a name, of 255 in file systems: endings and numbers are added to it."""
_LONGEST_PART = 255


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one; OSError for anything else, which might never end."""
    _check_kind(path, path.stat())
    # Between the two calls another process may put a pipe there: it must not block.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    try:
        _check_kind(path, os.fstat(handle))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def open_to_append(path: Path) -> TextIO:
    """Open a text file to write at its end; OSError for a pipe, which would wait for a reader.

    A link is refused too: in a run folder from elsewhere it may lead to any file of the user's.
    """
    if path.exists():
        open_regular(path).close()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")


def read_text(path: Path, most: int = LARGEST_TEXT, errors: str = "strict") -> str:
    """Read the text of a regular file of at most `most` bytes; OSError or ValueError if not."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"over {most >> 20} MiB", str(path))
    return data.decode(errors=errors)


def read_own_yaml(path: Path) -> Any:
    """Read a YAML file of the package itself."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it is built
    return yaml.load(path.read_text(encoding="utf-8"), loader)


def is_file(path: Path) -> bool:
    """Tell if a regular file is there; False for a name that is too long for any."""
    try:
        return path.is_file()
    except OSError:  # too long
        return False


def checksum(path: Path) -> str:
    """SHA-256 of a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_regular(path: Path, fix: str = "give a regular file") -> Path:
    """Return the path of a readable file, or raise BadInput that names what is there instead."""
    try:
        open_regular(path).close()
    except FileNotFoundError:
        raise BadInput(f"no file {path}", fix) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadInput(f"cannot read {str(path)!r} ({reason(error)})", fix) from None
    return path


def _check_kind(path: Path, found: os.stat_result) -> None:
    for is_kind, name in _KINDS:
        if is_kind(found.st_mode):
            raise OSError(errno.EINVAL, f"it is {name}, not a regular file", str(path))
    for folder in _KERNEL:
        if folder.is_dir() and folder.stat().st_dev == found.st_dev:
            raise OSError(errno.EINVAL, f"it is a file of {folder}, not a regular file", str(path))


def write_whole(path: Path, content: str | bytes, *, parents: bool = True) -> None:
    """Write `content` to `path` so that a reader, or a crash, never sees half of it.

    Without `parents`, a missing folder is an error and not made: a folder that someone removed
    must not come back with part of its files. Half of a surrogate pair, which a damaged file or a
    file name may bring, becomes a question mark.
    """
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync(path.parent)


def check_name(name: str, key: str) -> str:
    """Return a name that can be one part of a path, or raise BadInput that names its `key`."""
    if _NAME.fullmatch(name) and len(name.encode()) <= _LONGEST:
        return name
    shown = name if len(name) <= 40 else f"{name[:40]}…"
    fix = f"use letters, digits, spaces and .,+=@_- in {_LONGEST} bytes at most"
    raise BadInput(f"{key} is {shown!r}, which cannot name a folder", fix)


def check_path(path: str | Path, key: str) -> Path:
    """Return the path of a folder, or raise BadInput for one that no file system takes."""
    text = str(path)
    longest = max(len(os.fsencode(part)) for part in re.split(r"[\\/]", text))
    if not text or "\0" in text or longest > _LONGEST_PART:
        shown = text if len(text) <= 40 else f"{text[:40]}…"
        raise BadInput(f"{key} is {shown!r}, which is no path", "give the path of a folder")
    return Path(path)


def sync(path: Path) -> None:
    """Flush a file to the disk, or the names in a folder; Windows has no such call."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_output(path: Path, fix: str = "give another --output") -> Path:
    """Return the path of a file to write, or raise BadInput where it cannot be written."""
    try:
        there = path.exists()
        if there and not path.is_file():
            raise OSError(errno.EINVAL, "it is there, and not a regular file", str(path))
        if not there and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link to nowhere", str(path))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadInput(f"cannot write {str(path)!r} ({reason(error)})", fix) from None
    return path


def write_output(path: Path, content: str | bytes, fix: str = "give another --output") -> None:
    """Write a file that the user named; BadInput where it cannot be written."""
    check_output(path, fix)
    try:
        write_whole(path, content)
    except OSError as error:
        raise BadInput(f"cannot write {str(path)!r} ({reason(error)})", fix) from None


@contextmanager
def prints_aside() -> Iterator[None]:
    """Send what a job prints to standard error: standard output is for a command's answer."""
    with redirect_stdout(sys.stderr):
        yield


def cache_folder() -> Path:
    """Folder of trainfit's caches: $TRAINFIT_CACHE, else the user's cache folder.

    Where no folder can be made there, a temporary one of this process, with one warning.
    """
    if chosen := os.environ.get("TRAINFIT_CACHE"):
        return _usable(Path(chosen).absolute())
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _usable(Path(base, "trainfit"))


def keeps_cache() -> bool:
    """Tell if the cache folder outlives this process."""
    folder = cache_folder()
    return not _temporary.cache_info().currsize or folder != Path(_temporary().name)


@cache
def _usable(folder: Path) -> Path:
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home folder
        what = f"nothing is kept in the cache {brief(str(folder))} ({reason(error)})"
        fix = "set TRAINFIT_CACHE to a folder that can be written"
        warnings.warn(f"{what}; {fix}", TrainfitWarning, stacklevel=4)
        return Path(_temporary().name)
    return folder


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Make a folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="trainfit-cache-")


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


_MOST = 8
"""Items of a list that are shown: a data set may have thousands of lengths."""
_WIDTH = 100
"""Longest line of a table in a terminal."""
_NESTED = (Mapping, list, tuple)
_LEFT = ' style="text-align:left"'


def html_table(data: Any) -> str:
    """Format a mapping as two columns, a list of mappings as rows; everything is escaped."""
    if isinstance(data, Mapping):
        rows = "".join(
            f"<tr><th{_LEFT}>{_name(key)}</th><td{_LEFT}>{html_table(value)}</td></tr>"
            for key, value in data.items()
        )
        return f"<table>{rows}</table>"
    if isinstance(data, Sequence) and not isinstance(data, str):
        if data and all(isinstance(item, Mapping) for item in data):
            return _rows(data)
        shown = ", ".join(map(html_table, data[:_MOST]))
        return shown if len(data) <= _MOST else f"{shown}, … ({len(data):,} in all)"
    return escape(_scalar(data))


def _rows(items: Sequence[Mapping[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for item in items for key in item))
    heads = "".join(f"<th{_LEFT}>{_name(key)}</th>" for key in keys)
    rows = "".join(
        f"<tr>{''.join(f'<td{_LEFT}>{html_table(item.get(key))}</td>' for key in keys)}</tr>"
        for item in items
    )
    return f"<table><tr>{heads}</tr>{rows}</table>"


def _name(key: str) -> str:
    return escape(key.replace("_", " "))


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def text_facts(title: str, facts: Mapping[str, Any]) -> str:
    """Format a title with the numbers and words below it; lists and nested facts are left out."""
    rows = [(name, _scalar(v)) for name, v in facts.items() if not isinstance(v, _NESTED)]
    return f"{title}\n{text_table(rows)}".rstrip()


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns, each line cut at the width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in lines)
