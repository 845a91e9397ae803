"""The one reader of a run folder: rows, events, results and records, and no text of the data.

A file that is missing, half written or damaged is left out, and `problems` says so: the report of
a run that died is the one that is wanted most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainfit.core import codec
from trainfit.core.errors import TrainfitError, reason, redact_values
from trainfit.core.files import LARGEST_LOG, open_regular, read_text
from trainfit.core.plan_records import Plan
from trainfit.core.records import Event, HardwareProfile, Receipt
from trainfit.runs import timeline
from trainfit.runs.opening import RunSetup
from trainfit.runs.run_folder import EVENTS, METRICS, SETUP, as_event, parse_row

Row = Mapping[str, Any]
Floats = NDArray[np.float64]
Columns = Mapping[str, Floats]
"""Figures of rows by name: one number per row, NaN where the row has none."""

STRETCHES = 300
"""Stretches of a line that keep two points each: more than a plot has pixels to tell apart."""
_MOST_BYTES = 1 << 28
"""Bytes of a growing file that are read at once; the next look continues from there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPart:
    """One training: a run without folds, or one of its folds."""

    name: str
    folder: Path
    train: Columns = field(default_factory=dict)
    evaluations: Columns = field(default_factory=dict)
    gpus: Mapping[str, Columns] = field(default_factory=dict)
    """The driver's samples by GPU, each with its step."""
    setup: RunSetup | None = None
    """Settings in effect; None for a run of an older version."""
    event_rows: tuple[Row, ...] = ()
    """Events with their figures, such as micro_batches after memory ran out."""
    result: Row = field(default_factory=dict)
    scores: Row = field(default_factory=dict)

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(event for row in self.event_rows if (event := as_event(row)) is not None)

    @property
    def status(self) -> str:
        """finished, stopped, failed or unfinished."""
        if not self.result or _is_newer(self.folder / METRICS, self.folder / "result.json"):
            return "unfinished"
        return str(self.result.get("status", "unfinished"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """Contents of a run folder, with its folds."""

    folder: Path
    config: Row
    """task, hardware, experiment, config, origins."""
    environment: Row
    data: Row
    parts: tuple[RunPart, ...]
    results: Row
    plan: Plan | None = None
    hardware: HardwareProfile | None = None
    receipt: Receipt | None = None
    ladder: Row = field(default_factory=dict)
    timeline: tuple[Row, ...] = ()
    """Rows of stages with their seconds."""
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def status(self) -> str:
        """finished, stopped, failed or unfinished, of all parts together."""
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


def read_run(folder: Path) -> RunFiles:
    """Read all of a run that is readable."""
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
    stages = tuple(reader.rows(folder / timeline.FILE))
    problems = tuple(reader.problems)
    return RunFiles(
        folder=folder, parts=read, timeline=stages, problems=problems, **objects, **records
    )


def read_object(path: Path) -> Row:
    """The object in a JSON file; empty where there is none that is whole."""
    return _Reader().object(path)


def read_part(folder: Path) -> RunPart:
    """Read the training in `folder`, without the rest of its run."""
    return _read_part("", folder, _Reader())


def _read_part(name: str, folder: Path, reader: _Reader) -> RunPart:
    rows = reader.rows(folder / METRICS)
    events = reader.rows(folder / EVENTS)
    result = reader.object(folder / "result.json")
    told = result.get("events")
    older = told if isinstance(told, list) else []  # a version that wrote no events.jsonl
    return RunPart(
        name=name,
        folder=folder,
        train=columns(row for row in rows if row.get("kind") == "train"),
        evaluations=columns(row for row in rows if row.get("kind") == "evaluation"),
        gpus=gpu_columns(reader.rows(folder / "gpus.jsonl")),
        setup=setup_in(events),
        event_rows=tuple(row for row in events or older if isinstance(row, dict)),
        result=result,
        scores=reader.object(folder / "scores.json"),
    )


def setup_in(rows: Iterable[Row]) -> RunSetup | None:
    """The last setup among rows of events.jsonl; None where there is none of this version."""
    found = [row.get("setup") for row in rows if row.get("kind") == SETUP]
    try:
        return codec.decode(RunSetup, found[-1]) if found else None
    except TrainfitError:
        return None


def columns(rows: Iterable[Row]) -> Columns:
    """Rows of numbers by figure; of a step that was taken again, the last row counts."""
    kept: dict[float, Row] = {}
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


def finite(table: Columns, name: str, start: int = 0) -> Floats:
    """Finite values of a column in order, from row `start` on; none where there is no column."""
    values = table.get(name, np.empty(0))[start:]
    return values[np.isfinite(values)]


def settled(table: Columns, name: str) -> Floats:
    """Finite values of a column without the first row, the warm-up, unless it is the only one."""
    return finite(table, name, start=1 if len(table.get("step", ())) > 1 else 0)


def gpu_columns(rows: Iterable[Row]) -> dict[str, Columns]:
    """The samples of gpus.jsonl, by GPU."""
    each: dict[str, list[Row]] = {}
    for row in rows:
        for gpu in gpus_in(row):
            each.setdefault(f"GPU {gpu.get('index')}", []).append({**gpu, "step": row.get("step")})
    return {name: columns(samples) for name, samples in each.items()}


def gpus_in(row: Row) -> list[dict[str, Any]]:
    """The GPUs of a row of gpus.jsonl."""
    found = row.get("gpus")
    return [gpu for gpu in found if isinstance(gpu, dict)] if isinstance(found, list) else []


def number(value: Any) -> float:
    """A JSON value as a number; NaN for any other value."""
    if type(value) is float:  # nearly all of them, and a long run has millions
        return value
    try:
        return codec.decode(float, value)
    except TrainfitError:
        return float("nan")


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


class Tail:
    """Reads on in a growing .jsonl file, and from its start again where it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._identity, self._offset = path, (0, 0), 0

    def rows(self) -> tuple[list[dict[str, Any]], bool]:
        """The rows since the last look; True where the file is new and earlier rows are void."""
        try:
            with open_regular(self._path) as file:
                about = self._path.stat()
                identity = (about.st_dev, about.st_ino)
                anew = identity != self._identity or about.st_size < self._offset
                if anew:
                    self._identity, self._offset = identity, 0
                file.seek(self._offset)
                whole, end, _ = file.read(_MOST_BYTES).rpartition(b"\n")
        except OSError:
            return [], False
        self._offset += len(whole) + len(end)
        lines = whole.decode(errors="replace").splitlines()
        return [row for line in lines if (row := parse_row(line)) is not None], anew


def _is_newer(one: Path, other: Path) -> bool:
    """True for a run that was continued after its end: its metrics are newer than its result."""
    try:
        return one.stat().st_mtime > other.stat().st_mtime
    except OSError:
        return False


class _Reader:
    """Reads files and collects their problems."""

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

    def object(self, path: Path) -> Row:
        text = self.text(path)
        found = parse_row(text) if text else {}
        if found is None:
            self.problems.append(f"{path.name} is damaged, and left out")
        shown: Row = redact_values(found or {})  # older runs hold it as it was typed
        return shown

    def rows(self, path: Path) -> list[dict[str, Any]]:
        lines = self.text(path).splitlines()
        return [row for line in lines if (row := parse_row(line)) is not None]

    def record(self, kind: Any, path: Path) -> Any:
        if not (path.exists() or path.is_symlink()):
            return None
        try:
            return kind.load(path)
        except TrainfitError as error:
            self.problems.append(f"{path.name} is left out: {reason(error)}")
            return None
