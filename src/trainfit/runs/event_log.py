"""Files that grow with a run: metrics.jsonl and events.jsonl for programs, train.log for people.

Only the first rank writes. A process that is killed may leave half a line, and rows of steps that
the resumed run takes again: both are removed on resume.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from trainfit.core import codec
from trainfit.core.errors import RunFailed, TrainfitError, reason, redact, redact_values
from trainfit.core.files import open_regular, open_to_append, write_whole
from trainfit.core.records import Event
from trainfit.runs.opening import RunSetup

Tracker = Callable[[Mapping[str, Any]], None]
"""Takes each row of metrics.jsonl as it is written."""
METRICS, EVENTS, LOG = "metrics.jsonl", "events.jsonl", "train.log"
SETUP = "setup"
"""Kind of the row of events.jsonl that holds a RunSetup."""


class Journal:
    """Appends rows and lines; without a folder it writes nothing."""

    def __init__(self, run: Path | None, trackers: Sequence[Tracker] = ()) -> None:
        self._run, self._trackers = run, trackers
        self._files: dict[str, TextIO] = {}
        for name in (METRICS, LOG):  # at once: a folder that cannot be written to is known early
            self._file(name)

    def row(self, kind: str, values: Mapping[str, Any]) -> None:
        """Write a row of numbers; its kind is train, evaluation or fold."""
        row = {"kind": kind, **values}
        if self._write(METRICS, _json(row)):
            for tracker in self._trackers:
                tracker(row)

    def event(self, event: Event, figures: Mapping[str, int]) -> None:
        """Write an event with its figures as a row, and as a line for people."""
        self._write(EVENTS, _json(redact_values({**codec.encode(event), **figures})))
        self.line(f"{event.kind} at step {event.step}: {event.text}")

    def setup(self, setup: RunSetup, step: int) -> Iterator[str]:
        """Write the settings in effect as a row and as lines; yields the lines."""
        self._write(EVENTS, _json({"kind": SETUP, "step": step, "setup": codec.encode(setup)}))
        for text in setup.lines():
            self.line(text)
            yield text

    def line(self, text: str) -> None:
        """Write a line for people, with the time; programs get it from logging as `trainfit`."""
        if self._write(LOG, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {redact(text)}"):
            logging.getLogger("trainfit").info("%s", redact(text))

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> TextIO | None:
        if self._run is not None and name not in self._files:
            self._files[name] = _append_to(self._run / name)
        return self._files.get(name)

    def _write(self, name: str, line: str) -> bool:
        """Append a line; returns False where there is no folder."""
        file = self._file(name)
        if file is None:
            return False
        try:
            file.write(line + "\n")
            file.flush()
        except OSError as error:
            what = f"cannot write {file.name} ({error.strerror})"
            raise RunFailed(what, "free some space and go on with --resume") from error
        return True


def forget_after(run: Path, step: int, events: Sequence[Event]) -> None:
    """Drop rows of steps after `step`, a row that is cut off, and all events but `events`."""
    kept = [line for line, row in _lines(run / METRICS) if _step_of(row) <= step]
    if (run / METRICS).exists():
        write_whole(run / METRICS, "".join(f"{line}\n" for line in kept), parents=False)
    known = {event: line for line, row in _lines(run / EVENTS) if (event := as_event(row))}
    if events or known:
        rows = [known.get(event) or _json(redact_values(codec.encode(event))) for event in events]
        write_whole(run / EVENTS, "".join(f"{line}\n" for line in rows), parents=False)


def as_event(row: Mapping[str, Any]) -> Event | None:
    """The event in a row of events.jsonl, or None for a setup and for damage."""
    try:
        fields = {name: row[name] for name in ("kind", "step", "seconds", "text")}
        return codec.decode(Event, fields)
    except (KeyError, TrainfitError):
        return None


def parse_row(line: str) -> dict[str, Any] | None:
    """A row of a .jsonl file; None for a line that a killed process left half written."""
    try:
        row = codec.parse(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Whole lines of a .jsonl file with their rows; none where there is no file."""
    if not path.exists():
        return []
    with open_regular(path) as file:
        lines = file.read().decode(errors="replace").splitlines()
    return [(line, row) for line in lines if (row := parse_row(line)) is not None]


def _step_of(row: Mapping[str, Any]) -> float:
    try:
        return float(row["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _json(row: Any) -> str:
    return json.dumps(codec.encode(row), allow_nan=False)


def _append_to(path: Path) -> TextIO:
    try:
        return open_to_append(path)
    except OSError as error:
        raise RunFailed(f"cannot write {path} ({reason(error)})", "make it writable") from error
