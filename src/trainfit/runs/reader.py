"""A run folder read back: everything that a report or a watcher needs, and no text of the data.

Whatever is missing, half written or damaged is left out, and `problems` says so: a report of a
run that died is the one that is wanted most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainfit.core import codec
from trainfit.core.errors import TrainfitError, reason, redact_values
from trainfit.core.files import LARGEST_LOG, read_text
from trainfit.core.plan_records import Plan
from trainfit.core.records import Event, HardwareProfile, Receipt

_STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
_EVENT = re.compile(_STAMP + r"([a-z][a-z ]*) at step (\d+): (.*)")
_NOT_EVENTS = ("evaluation",)
_OPENING = re.compile(
    _STAMP
    + r"((?:Device|TF32|Precision|SDPA|Attention|Frozen encoder|Using|DataLoader|Steps of)\b.*)"
)
_MOST_LINES = 12


def events_of(log: str, result: Mapping[str, Any]) -> tuple[Event, ...]:
    """What happened in a run, by its result or, while there is none, by its log."""
    try:
        recorded = codec.decode(tuple[Event, ...], result.get("events", []))
    except TrainfitError:
        recorded = ()
    return tuple(recorded) or tuple(_logged(log))


def _logged(log: str) -> Iterator[Event]:
    for line in log.splitlines():
        if (found := event_in(line)) is not None:
            yield found


def event_in(line: str) -> Event | None:
    """The event that a line of the log tells of; when it was is not in it."""
    found = _EVENT.fullmatch(line)
    if found is None or found[1] in _NOT_EVENTS:
        return None
    return Event(kind=found[1], step=int(found[2][:18]), seconds=float("nan"), text=found[3])


def opening_of(log: str) -> tuple[str, ...]:
    """The first lines, about what is really set."""
    head = log.splitlines()[:_MOST_LINES]
    found = (_OPENING.fullmatch(line) for line in head)
    return tuple(dict.fromkeys(match[1] for match in found if match))


Floats = NDArray[np.float64]

STRETCHES = 300
"""Two points each, which is more than a plot has pixels to tell apart."""


def thin(x: Floats, y: Floats, stretches: int = STRETCHES) -> tuple[Floats, Floats]:
    """At most `2 * stretches + 2` points of a line, with its ends and all of its extremes."""
    if len(x) <= 2 * stretches:
        return x, y
    kept = {0, len(x) - 1}
    bounds = np.linspace(0, len(x), stretches + 1).astype(int)
    for start, end in pairwise(bounds):
        part = y[start:end]
        finite = np.flatnonzero(np.isfinite(part))
        if not finite.size:
            kept.add(int(start))  # a gap stays one
            continue
        kept.add(int(start + finite[part[finite].argmin()]))
        kept.add(int(start + finite[part[finite].argmax()]))
    chosen = np.array(sorted(kept))
    return x[chosen], y[chosen]


Columns = Mapping[str, Floats]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One training: a run without folds, or one of its folds."""

    name: str
    folder: Path
    train: Columns
    """By name of the figure: one number per line of the log, NaN where it has none."""
    evaluations: Columns
    gpus: Mapping[str, Columns]
    """By GPU: what the driver said of it, beside the step."""
    events: tuple[Event, ...]
    opening: tuple[str, ...]
    """What was really set, as the run's first lines say."""
    result: Mapping[str, Any]
    scores: Mapping[str, Any]

    @property
    def status(self) -> str:
        """How it ended: finished, stopped, failed, or not yet."""
        if not self.result or _is_newer(self.folder / "metrics.jsonl", self.folder / "result.json"):
            return "unfinished"
        return str(self.result.get("status", "unfinished"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run with its folds."""

    folder: Path
    config: Mapping[str, Any]
    """task, hardware, experiment, config, origins."""
    environment: Mapping[str, Any]
    data: Mapping[str, Any]
    parts: tuple[Part, ...]
    results: Mapping[str, Any]
    plan: Plan | None = None
    hardware: HardwareProfile | None = None
    receipt: Receipt | None = None
    ladder: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def status(self) -> str:
        """How it ended."""
        if self.results:
            return str(self.results.get("status", "finished"))
        states = [part.status for part in self.parts]
        for state in ("failed", "unfinished", "stopped"):
            if state in states:
                return state
        return "unfinished" if len(self.parts) != 1 else states[0]

    def setting(self, path: str) -> Any:
        """A value of the configuration by its dotted name, or None."""
        value: Any = self.config.get("config", {})
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def read_run(folder: Path) -> Run:
    """All of a run that can be read."""
    reader = _Reader()
    found = [path for path in folder.glob("fold-*/") if path.name[5:].isdigit()]
    folds = sorted(found, key=lambda path: int(path.name[5:]))
    parts = [(fold.name.replace("-", " "), fold) for fold in folds] or [("", folder)]
    records: dict[str, Any] = {
        name: reader.record(kind, folder / f"{name}.json")
        for name, kind in (("plan", Plan), ("hardware", HardwareProfile), ("receipt", Receipt))
    }
    if records["receipt"] is None and folds:
        records["receipt"] = reader.record(Receipt, folds[0] / "receipt.json")
    objects: dict[str, Any] = {
        name: reader.object(folder / f"{name}.json")
        for name in ("config", "environment", "data", "results", "ladder")
    }
    read = tuple(_read_part(name, path, reader) for name, path in parts)
    return Run(folder=folder, parts=read, **objects, **records, problems=tuple(reader.problems))


def _read_part(name: str, folder: Path, reader: _Reader) -> Part:
    rows = list(reader.rows(folder / "metrics.jsonl"))
    result = reader.object(folder / "result.json")
    log = reader.text(folder / "train.log")
    return Part(
        name=name,
        folder=folder,
        train=columns(row for row in rows if row.get("kind") == "train"),
        evaluations=columns(row for row in rows if row.get("kind") == "evaluation"),
        gpus=gpu_columns(reader.rows(folder / "gpus.jsonl")),
        events=events_of(log, result),
        opening=opening_of(log),
        result=result,
        scores=reader.object(folder / "scores.json"),
    )


def columns(rows: Iterable[Mapping[str, Any]]) -> Columns:
    """Rows of numbers by figure; a step that was taken again counts as it was the last time."""
    kept: dict[float, Mapping[str, Any]] = {}
    for row in rows:
        step = number(row.get("step"))
        if np.isfinite(step):
            kept.pop(step, None)
            kept[step] = row
    steps = sorted(kept)
    names = dict.fromkeys(name for row in kept.values() for name in row)
    table = {
        name: np.array([number(kept[step].get(name)) for step in steps], dtype=np.float64)
        for name in names
        if name != "kind"
    }
    return {name: values for name, values in table.items() if np.isfinite(values).any()}


def gpu_columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, Columns]:
    """The samples of gpus.jsonl, by GPU."""
    each: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        for gpu in gpus_in(row):
            each.setdefault(f"GPU {gpu.get('index')}", []).append({**gpu, "step": row.get("step")})
    return {name: columns(samples) for name, samples in each.items()}


def gpus_in(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The GPUs of a row of gpus.jsonl."""
    found = row.get("gpus")
    return [gpu for gpu in found if isinstance(gpu, dict)] if isinstance(found, list) else []


def number(value: Any) -> float:
    """A JSON value as a number; NaN for everything that is none."""
    if type(value) is float:  # nearly all of them, and a long run has millions
        return value
    try:
        return codec.decode(float, value)
    except TrainfitError:
        return float("nan")


def parsed(line: str) -> Mapping[str, Any] | None:
    """A row of a .jsonl file; None for what a killed process left half written."""
    try:
        row = codec.parse(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _is_newer(one: Path, other: Path) -> bool:
    """Whether a run that had ended is going on: its log is younger than its result."""
    try:
        return one.stat().st_mtime > other.stat().st_mtime
    except OSError:
        return False


class _Reader:
    """Reads what is there and remembers what was wrong."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def text(self, path: Path) -> str:
        try:
            return read_text(path, LARGEST_LOG, errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            self.problems.append(f"{path.name} cannot be read ({reason(error)})")
            return ""

    def object(self, path: Path) -> Mapping[str, Any]:
        text = self.text(path)
        found = parsed(text) if text else {}
        if found is None:
            self.problems.append(f"{path.name} is damaged, and left out")
        shown: Mapping[str, Any] = redact_values(found or {})  # older runs hold it as it was typed
        return shown

    def rows(self, path: Path) -> Iterable[Mapping[str, Any]]:
        return [row for line in self.text(path).splitlines() if (row := parsed(line)) is not None]

    def record(self, kind: Any, path: Path) -> Any:
        if not (path.exists() or path.is_symlink()):
            return None
        try:
            return kind.load(path)
        except TrainfitError as error:
            self.problems.append(f"{path.name} is left out: {reason(error)}")
            return None
