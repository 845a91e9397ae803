"""A run folder read for the doctor: what was planned, what was measured, what happened."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trainfit import codec
from trainfit.catalogue import GpuSpec, find
from trainfit.errors import BadInput, TrainfitError, reason
from trainfit.files import LARGEST_LOG, read_text
from trainfit.records import Event, Plan

_EVENT = re.compile(r"[\d-]{10} [\d:]{8} ([a-z][a-z ]*) at step (\d+): (.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One training: a run without folds, or one of its folds."""

    name: str = ""
    plan: Plan | None = None
    rows: tuple[Mapping[str, Any], ...] = ()
    """The lines of metrics.jsonl about training."""
    evaluations: tuple[Mapping[str, Any], ...] = ()
    gpus: tuple[Mapping[str, Any], ...] = ()
    """What the driver said of each GPU, again and again."""
    events: tuple[Event, ...] = ()

    def figures(self, name: str, rows: Iterable[Mapping[str, Any]] | None = None) -> list[float]:
        """The finite values of a figure, in the order of their rows."""
        values = (_number(row.get(name)) for row in (self.rows if rows is None else rows))
        return [value for value in values if math.isfinite(value)]

    def usual(self, name: str) -> float | None:
        """The median of a figure, without the first row, in which things are still warming up."""
        values = self.figures(name, self.rows[1:] or self.rows)
        return median(values) if values else None

    @property
    def where(self) -> str:
        """Which fold this is, before what is said of it."""
        return f"{self.name}: " if self.name else ""

    @property
    def steps(self) -> int:
        """Optimizer steps that were logged."""
        return int(max(self.figures("step"), default=0))

    @property
    def spec(self) -> GpuSpec | None:
        """The catalogue's row of the GPU that the run was planned for."""
        if self.plan is None or self.plan.gpu is None:
            return None
        try:
            return find(self.plan.gpu)
        except TrainfitError:  # a plan of another version's catalogue
            return None

    @property
    def on_gpu(self) -> bool:
        """Whether it was planned for a GPU, or one was watched."""
        return bool(self.gpus) or (self.plan is not None and self.plan.gpu is not None)

    def said(self, kind: str) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if event.kind == kind]


def read_run(part: Path, folder: Path) -> RunFacts:
    """The facts of one training in `part`, of the run in `folder`."""
    rows = [row for row in _rows(part / "metrics.jsonl") if "step" in row]
    result = _object(part / "result.json")
    return RunFacts(
        name="" if part == folder else part.name,
        plan=_plan(folder / "plan.json"),
        rows=tuple(row for row in rows if row.get("kind") == "train"),
        evaluations=tuple(row for row in rows if row.get("kind") == "evaluation"),
        gpus=tuple(gpu for row in _rows(part / "gpus.jsonl") for gpu in _gpus(row)),
        events=_events(part / "train.log", result),
    )


def _gpus(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = row.get("gpus")
    return [gpu for gpu in found if isinstance(gpu, dict)] if isinstance(found, list) else []


def parts(folder: Path) -> list[Path]:
    """The folders that hold a training: the run's own, or those of its folds."""
    folds = sorted(folder.glob("fold-*/"), key=lambda fold: (len(fold.name), fold.name))
    parts = [part for part in (folds or [folder]) if (part / "train.log").is_file()]
    if not parts:
        raise BadInput(f"{folder} holds no training", "give the folder of a run that has begun")
    return parts


def _events(log: Path, result: Mapping[str, Any]) -> tuple[Event, ...]:
    """Of the result; of the log, where the run has not ended or was killed."""
    try:
        if events := result.get("events"):
            return codec.decode(tuple[Event, ...], events)
    except TrainfitError:  # an older run's form
        pass
    found = []
    try:
        text = read_text(log, LARGEST_LOG, errors="replace")
    except OSError as error:
        what = f"cannot read {log} ({reason(error)})"
        raise BadInput(what, "give the folder of a run that has begun") from None
    for line in text.splitlines():
        match = _EVENT.fullmatch(line)
        if match and match[1] != "evaluation":
            found.append(Event(kind=match[1], step=int(match[2]), seconds=0.0, text=match[3]))
    return tuple(found)


def _plan(path: Path) -> Plan | None:
    try:
        return Plan.load(path)
    except TrainfitError:  # none, or that of another version
        return None


def _object(path: Path) -> dict[str, Any]:
    try:
        return codec.read_object(path)
    except (OSError, ValueError):
        return {}


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file, without what a killed process left half written."""
    try:
        return codec.read_rows(path)
    except OSError:
        return []


def _number(value: Any) -> float:
    try:
        return codec.decode(float, value)
    except TrainfitError:
        return math.nan
