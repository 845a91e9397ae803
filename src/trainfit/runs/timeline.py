"""The time line of a run: RUN/timeline.jsonl, a row for each stage that ended.

    {"stage": "evaluation", "fold": 2, "begin": 41.3, "seconds": 0.8}

`begin` counts from the start of the process. `seconds` are without those of stages inside, so the
rows of a process add up to its life until its last row. A resumed run appends the rows of its new
process. Work of threads and child processes counts where the main thread waits for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from trainfit.core.files import open_to_append

FILE = "timeline.jsonl"
FIRST_UPDATE = "first update"
"""Name of the row without seconds that marks the first finished update of a training."""
STAGES = (
    "start",
    "data",
    "plan",
    "build",
    "features",
    "capture",
    "compile",
    "steps",
    "receipt",
    "evaluation",
    "checkpoint",
    "judge",
    "export",
    "between folds",
    "baselines",
    "end",
    "report",
    "other",
)
"""Stages in the order in which they are shown."""


@dataclass(eq=False)
class _Open:
    """A running stage."""

    name: str
    fold: int | None
    begin: float
    inner: float = 0.0
    """Seconds of stages inside."""


@dataclass
class _Timeline:
    """Stages of this process; rows wait until the run has a folder."""

    origin: float
    stack: list[_Open] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    folder: Path | None = None

    def row(self, one: _Open, seconds: float) -> None:
        row = {
            "stage": one.name,
            "fold": one.fold,
            "begin": round(one.begin - self.origin, 4),
            "seconds": round(max(0.0, seconds - one.inner), 4),
        }
        self.waiting.append(json.dumps(row) + "\n")
        self.write()

    def write(self) -> None:
        if self.folder is None:
            return
        with suppress(OSError):  # no run fails for its time line
            with open_to_append(self.folder / FILE) as file:
                file.writelines(self.waiting)
            self.waiting.clear()

    def open(self, name: str, fold: int | None) -> _Open:
        now = time.monotonic()
        if len(self.stack) == 1 and self.stack[0].name == "start":  # the first stage ends the start
            self.close(now)
            self.stack.append(_Open("other", None, now))
        outer = self.stack[-1].fold if self.stack else None
        self.stack.append(_Open(name, outer if fold is None else fold, now))
        return self.stack[-1]

    def close(self, now: float) -> None:
        one = self.stack.pop()
        if self.stack:
            self.stack[-1].inner += now - one.begin
        self.row(one, now - one.begin)


_current: ContextVar[_Timeline | None] = ContextVar("timeline", default=None)


@contextmanager
def recording(*, from_process_start: bool = False) -> Iterator[None]:
    """Record the stages of a block; within another recording that one continues."""
    if _current.get() is not None:
        yield
        return
    origin = time.monotonic() - (_process_age() if from_process_start else 0.0)
    timeline = _Timeline(origin)
    timeline.stack.append(_Open("start", None, origin))
    token = _current.set(timeline)
    try:
        yield
    finally:
        while timeline.stack:
            timeline.close(time.monotonic())
        _current.reset(token)


def write_to(folder: Path) -> None:
    """Write the rows so far into a run's folder, and later ones as their stages end."""
    if (timeline := _current.get()) is not None:
        timeline.folder = folder
        timeline.write()


@contextmanager
def stage(name: str, fold: int | None = None) -> Iterator[None]:
    """Record a block, or a function where this is its decorator, as a stage."""
    timeline = _current.get()
    if timeline is None:
        yield
        return
    one = timeline.open(name, fold)
    try:
        yield
    finally:
        while one in timeline.stack:
            timeline.close(time.monotonic())


def took(name: str, seconds: float) -> None:
    """Record seconds of the running stage as those of another stage inside it."""
    timeline = _current.get()
    if timeline is None or seconds <= 0 or not timeline.stack:
        return
    outer = timeline.stack[-1]
    timeline.row(_Open(name, outer.fold, time.monotonic() - seconds), seconds)
    outer.inner += seconds


def elapsed() -> float | None:
    """Return the seconds since the recording began; None where nothing is recorded."""
    timeline = _current.get()
    return None if timeline is None else time.monotonic() - timeline.origin


def mark(name: str) -> None:
    """Record a moment: a row without seconds."""
    timeline = _current.get()
    if timeline is not None and timeline.stack:
        timeline.row(_Open(name, timeline.stack[-1].fold, time.monotonic()), 0.0)


def seconds_by_stage(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Add up the seconds of each stage, in the order of STAGES; unknown stages come last."""
    found = dict.fromkeys(STAGES, 0.0)
    for row in rows:
        name, seconds = str(row["stage"]), float(row["seconds"])
        found[name] = found.get(name, 0.0) + seconds
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _process_age() -> float:
    """Seconds since the system created this process."""
    try:  # psutil's answer on Linux is rounded to a whole second
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        begun = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun)
    except (OSError, ValueError, IndexError, AttributeError):
        return max(0.0, time.time() - psutil.Process().create_time())
