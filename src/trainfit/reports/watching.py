"""A run as it grows: its files read on from where they were last read, and where it stands now."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit import codec
from trainfit.files import open_regular
from trainfit.records import Event, Record
from trainfit.reports.run_data import gpus_in, number, parsed
from trainfit.reports.run_log import event_in

_KEPT = 2000
"""Lines of the log that are remembered, which is more than a terminal is wide."""
_MOST = 1 << 28
"""Bytes that are read at a look; the next one goes on from there."""
_LONGEST = 1e12
"""Steps of a run, or seconds of one: more is damage."""
_QUIET = 60.0
"""Seconds without a line after which a person may want to know."""


class Tail:
    """The whole lines that a file has got since the last look; anew where it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._identity, self._offset = path, (0, 0), 0

    def lines(self) -> tuple[list[str], bool]:
        """The new lines, and whether they are all that there is: what was read before is void."""
        try:
            with open_regular(self._path) as file:
                about = self._path.stat()
                identity = (about.st_dev, about.st_ino)
                anew = identity != self._identity or about.st_size < self._offset
                if anew:
                    self._identity, self._offset = identity, 0
                file.seek(self._offset)
                whole, end, _ = file.read(_MOST).rpartition(b"\n")
        except OSError:
            return [], False
        self._offset += len(whole) + len(end)
        return whole.decode(errors="replace").splitlines(), anew


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing(Record):
    """Where a run stands."""

    run: str
    status: str
    """running, quiet (no line for a while), finished, stopped or failed."""
    part: str
    """The fold that is trained, and of how many."""
    step: int
    total_steps: int
    epoch: float | None
    eta_seconds: float | None
    """Of what is trained now."""
    whole_eta_seconds: float | None
    """Of all folds, if each takes as long."""
    figures: dict[str, float]
    """Of the last line of the log."""
    evaluation: dict[str, float]
    losses: tuple[float | None, ...]
    rates: tuple[float | None, ...]
    gpus: tuple[dict[str, Any], ...]
    """What the driver said last: one GPU for each rank on the machine that logs."""
    events: tuple[Event, ...]
    quiet_seconds: float | None
    """Since the last line."""


class Watcher:
    """Follows a run, from fold to fold."""

    def __init__(self, run: Path) -> None:
        """Follow the run in that folder."""
        self._run = run
        self._folder: Path | None = None

    def look(self) -> Standing:
        """Where the run stands now."""
        folder = _current(self._run)
        if folder != self._folder:
            self._begin(folder)
        self._read()
        return self._standing(folder)

    def _begin(self, folder: Path) -> None:
        self._folder = folder
        self._metrics, self._log = Tail(folder / "metrics.jsonl"), Tail(folder / "train.log")
        self._samples = Tail(folder / "gpus.jsonl")
        self._rows: list[Mapping[str, Any]] = []
        self._evaluation: Mapping[str, Any] = {}
        self._gpus: tuple[dict[str, Any], ...] = ()
        self._events: list[Event] = []

    def _read(self) -> None:
        lines, anew = self._metrics.lines()
        rows = [row for line in lines if (row := parsed(line)) is not None]
        if anew:
            self._rows, self._evaluation = [], {}
        self._rows = [*self._rows, *(row for row in rows if row.get("kind") == "train")][-_KEPT:]
        evaluations = [row for row in rows if row.get("kind") == "evaluation"]
        evaluations = [row for row in evaluations if math.isfinite(number(row.get("step")))]
        self._evaluation = evaluations[-1] if evaluations else self._evaluation
        lines, anew = self._log.lines()
        found = [event for line in lines if (event := event_in(line)) is not None]
        self._events = found if anew else [*self._events, *found]
        samples = [row for line in self._samples.lines()[0] if (row := parsed(line)) is not None]
        if samples:
            self._gpus = tuple(map(_sample, gpus_in(samples[-1])))

    def _standing(self, folder: Path) -> Standing:
        last = self._rows[-1] if self._rows else {}
        figures = {name: number(value) for name, value in last.items() if name != "kind"}
        done, total = _count(figures.get("step", 0)), _count(figures.get("total_steps", 0))
        status, quiet = _status(self._run, folder)
        rate = figures.get("step_seconds", math.nan)
        running = status in ("running", "quiet")
        eta = (total - done) * rate if running and 0 <= rate < _LONGEST else None
        at, folds = _place(self._run, folder)
        whole = None if eta is None or at is None else eta + (folds - at) * total * rate
        return Standing(
            run=str(self._run),
            status=status,
            part="" if at is None else f"fold {at} of {folds}" if folds else f"fold {at}",
            step=done,
            total_steps=total,
            epoch=figures.get("epoch"),
            eta_seconds=eta,
            whole_eta_seconds=whole if folds else None,
            figures={k: v for k, v in figures.items() if k not in ("step", "total_steps", "epoch")},
            evaluation={
                name: value
                for name, raw in self._evaluation.items()
                if name != "kind" and math.isfinite(value := number(raw))
            },
            losses=tuple(_finite(row.get("loss")) for row in self._rows),
            rates=tuple(_finite(row.get("tokens_per_second")) for row in self._rows),
            gpus=self._gpus,
            events=tuple(self._events),
            quiet_seconds=quiet,
        )


def _current(run: Path) -> Path:
    """The fold that was written to last, or the run itself where it has none."""
    folds = [path.parent for path in run.glob("fold-*/metrics.jsonl")]
    return max(folds, key=lambda fold: _changed(fold / "metrics.jsonl"), default=run)


def _place(run: Path, folder: Path) -> tuple[int | None, int]:
    """The number of the fold, and how many there will be; 0 where that is not known."""
    if folder == run:
        return None, 0
    folds = _object(run / "data.json").get("folds")
    return int(folder.name.partition("-")[2]), len(folds) if isinstance(folds, list) else 0


def _object(path: Path) -> dict[str, Any]:
    try:
        return codec.read_object(path)
    except (OSError, ValueError):
        return {}


def _status(run: Path, folder: Path) -> tuple[str, float | None]:
    """How the run is, and how long it has said nothing."""
    if (run / "results.json").is_file():
        return "finished", None
    result = folder / "result.json"
    spoken = max(_changed(folder / name) for name in ("metrics.jsonl", "train.log"))
    if _changed(result) >= _changed(folder / "metrics.jsonl") > 0:
        ended = str(_object(result).get("status", "finished"))
        if ended != "finished" or folder == run:
            return ended, None
    quiet = time.time() - spoken if spoken else None
    return ("quiet" if quiet is None or quiet > _QUIET else "running"), quiet


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _count(value: float) -> int:
    return int(value) if 0 <= value < _LONGEST else 0


def _sample(gpu: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers among what the driver said of a GPU."""
    figures = {name: _finite(value) for name, value in gpu.items() if value is not None}
    return {name: int(v) if v.is_integer() else v for name, v in figures.items() if v is not None}


def _finite(value: Any) -> float | None:
    found = number(value)
    return found if math.isfinite(found) else None
