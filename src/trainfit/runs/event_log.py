"""The files that grow with a run: metrics.jsonl for programs, train.log for people.

Only the first rank writes. A process that is killed may leave half a line, and lines of steps that
the resumed run takes again: both go when it goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from trainfit.core import codec
from trainfit.core.errors import RunFailed, reason, redact
from trainfit.core.files import open_regular, write_whole

Tracker = Callable[[Mapping[str, Any]], None]
"""Takes each row of metrics.jsonl as it is written."""


class Journal:
    """Appends rows and lines; without a folder it only hands rows to the trackers."""

    def __init__(self, run: Path | None, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = trackers
        self._metrics = self._log = None
        if run is not None:
            self._metrics = _append_to(run / "metrics.jsonl")
            self._log = _append_to(run / "train.log")

    def row(self, kind: str, values: Mapping[str, Any]) -> None:
        """A row of numbers: kind is train or evaluation."""
        row = {"kind": kind, **values}
        if self._metrics is not None:
            _write(self._metrics, json.dumps(codec.encode(row), allow_nan=False))
            for tracker in self._trackers:
                tracker(row)

    def line(self, text: str) -> None:
        """A line for people, with the time."""
        if self._log is not None:
            _write(self._log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {redact(text)}")

    def close(self) -> None:
        """Close the files."""
        for file in (self._metrics, self._log):
            if file is not None:
                file.close()


def forget_after(run: Path, step: int) -> None:
    """Drop the rows of steps after `step`, and a last one that is cut off."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return
    with open_regular(path) as file:
        lines = file.read().decode(errors="replace").splitlines()
    kept = [line for line in lines if _step_of(line) <= step]
    write_whole(path, "".join(f"{line}\n" for line in kept), parents=False)


def _step_of(line: str) -> float:
    try:
        return float(codec.parse(line)["step"])
    except (ValueError, KeyError, TypeError, IndexError):
        return float("inf")


def _append_to(path: Path) -> TextIO:
    try:
        if path.exists():
            open_regular(path).close()  # a pipe would wait for a reader
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise RunFailed(f"cannot write {path} ({reason(error)})", "make it writable") from error


def _write(file: TextIO, line: str) -> None:
    try:
        file.write(line + "\n")
        file.flush()
    except OSError as error:
        what = f"cannot write {file.name} ({error.strerror})"
        raise RunFailed(what, "free some space and go on with --resume") from error
