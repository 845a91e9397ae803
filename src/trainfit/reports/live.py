"""`trainfit watch`: the state of a running training, from its growing files, and its display."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainfit.core.records import Event, Record
from trainfit.reports import terminal
from trainfit.reports.model import MISSING, URGENT, duration, shown
from trainfit.reports.writers import spark
from trainfit.runs.reader import Tail, gpus_in, number, read_object
from trainfit.runs.run_folder import EVENTS, LOG, METRICS, as_event

_KEPT = 2000
"""Rows kept in memory: more than a terminal is wide."""
_LONGEST = 1e12
"""Largest believable number of steps or seconds; a larger one is a damaged row."""
_QUIET = 60.0
"""Seconds without a row after which a run counts as quiet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing(Record):
    """State of a run at one moment."""

    run: str
    status: str
    """running, quiet (no line for a while), finished, stopped or failed."""
    part: str
    """Fold in training, as in "fold 2 of 5"."""
    step: int
    total_steps: int
    epoch: float | None
    eta_seconds: float | None
    """Seconds left of this fold or run."""
    whole_eta_seconds: float | None
    """Seconds left of all folds, if each takes as long."""
    figures: dict[str, float]
    """Figures of the last row of metrics.jsonl."""
    evaluation: dict[str, float]
    losses: tuple[float | None, ...]
    rates: tuple[float | None, ...]
    gpus: tuple[dict[str, Any], ...]
    """Latest samples of the driver: one GPU for each rank on the machine that logs."""
    events: tuple[Event, ...]
    quiet_seconds: float | None
    """Seconds since the last row."""


class Watcher:
    """Follows a run, from fold to fold."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._folder: Path | None = None

    def look(self) -> Standing:
        """Read the state of the run now."""
        folder = _current(self._run)
        if folder != self._folder:
            self._begin(folder)
        self._read()
        return self._standing(folder)

    def _begin(self, folder: Path) -> None:
        self._folder = folder
        self._metrics, self._happened = Tail(folder / METRICS), Tail(folder / EVENTS)
        self._samples = Tail(folder / "gpus.jsonl")
        self._rows: list[Mapping[str, Any]] = []
        self._evaluation: Mapping[str, Any] = {}
        self._gpus: tuple[dict[str, Any], ...] = ()
        self._events: list[Event] = []

    def _read(self) -> None:
        rows, anew = self._metrics.rows()
        if anew:
            self._rows, self._evaluation = [], {}
        self._rows = [*self._rows, *(row for row in rows if row.get("kind") == "train")][-_KEPT:]
        evaluations = [row for row in rows if row.get("kind") == "evaluation"]
        evaluations = [row for row in evaluations if math.isfinite(number(row.get("step")))]
        self._evaluation = evaluations[-1] if evaluations else self._evaluation
        rows, anew = self._happened.rows()
        found = [event for row in rows if (event := as_event(row)) is not None]
        self._events = found if anew else [*self._events, *found]
        samples, _ = self._samples.rows()
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
    """Folder of the fold that was written to last, or of a run without folds."""
    folds = [path.parent for path in run.glob(f"fold-*/{METRICS}")]
    return max(folds, key=lambda fold: _changed(fold / METRICS), default=run)


def _place(run: Path, folder: Path) -> tuple[int | None, int]:
    """Number of the fold, and number of folds; 0 where that is not known."""
    if folder == run:
        return None, 0
    folds = read_object(run / "data.json").get("folds")
    return int(folder.name.partition("-")[2]), len(folds) if isinstance(folds, list) else 0


def _status(run: Path, folder: Path) -> tuple[str, float | None]:
    """Status of the run, and seconds since its last row."""
    if (run / "results.json").is_file():
        return "finished", None
    result = folder / "result.json"
    spoken = max(_changed(folder / name) for name in (METRICS, LOG))
    if _changed(result) >= _changed(folder / METRICS) > 0:
        ended = str(read_object(result).get("status", "finished"))
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
    """Finite numbers of a sample of a GPU."""
    figures = {name: _finite(value) for name, value in gpu.items() if value is not None}
    return {name: int(v) if v.is_integer() else v for name, v in figures.items() if v is not None}


def _finite(value: Any) -> float | None:
    found = number(value)
    return found if math.isfinite(found) else None


_STYLES = {"running": "green", "finished": "green", "failed": "bold red"}
_EVENTS = 6


def follow(watcher: Watcher, console: Console, every: float) -> Standing:
    """Draw until the run has ended; returns its last state."""
    standing = watcher.look()
    with Live(frame(standing), console=console, auto_refresh=False) as live:
        while standing.status in ("running", "quiet"):
            time.sleep(every)
            standing = watcher.look()
            live.update(frame(standing), refresh=True)
    return standing


def frame(now: Standing) -> RenderableType:
    """Panel for the terminal."""
    parts: list[RenderableType] = [_progress(now), "", _figures(now)]
    if now.evaluation:
        parts += ["", _validation(now)]
    if now.gpus:
        parts += ["", _gpus(now)]
    if now.events:
        parts += ["", *_events(now)]
    # A long path is cut off at its end.
    title = Text.assemble((_state(now), _STYLES.get(now.status, "yellow")), "  ", (now.run, "bold"))
    return Panel(Group(*parts), title=title, title_align="left", padding=(1, 2))


def _state(now: Standing) -> str:
    if now.status == "quiet" and now.quiet_seconds is not None:
        return f"no line for {duration(now.quiet_seconds)}"
    return "not begun" if now.status == "quiet" else now.status


def _progress(now: Standing) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    steps = f"step {now.step:,} of {now.total_steps:,}" if now.total_steps else "no step yet"
    epoch = "" if now.epoch is None else f"epoch {now.epoch:.2f}"
    left = "" if now.eta_seconds is None else f"{duration(now.eta_seconds)} left"
    if now.whole_eta_seconds is not None:
        left += f", {duration(now.whole_eta_seconds)} for all folds"
    bar = ProgressBar(total=max(now.total_steps, 1), completed=now.step, width=32)
    table.add_row(Text(now.part or "training"), bar, steps, epoch, left)
    return table


def _figures(now: Standing) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for title, name, form, beside in (
        ("loss", "loss", "{:.4f}", Text(spark(now.losses, 48), "cyan")),
        ("tokens/s", "tokens_per_second", "{:,.0f}", Text(spark(now.rates, 48), "cyan")),
        ("samples/s", "samples_per_second", "{:,.1f}", ""),
        ("MFU", "mfu", "{:.1%}", ""),
        ("memory", "memory_gib", "{:.2f} GiB", "the most so far"),
        ("learning rate", "learning_rate", "{:.2e}", ""),
        ("waiting for data", "wait_share", "{:.1%}", ""),
    ):
        value = now.figures.get(name, math.nan)
        table.add_row(title, form.format(value) if math.isfinite(value) else MISSING, beside)
    return table


def _validation(now: Standing) -> Text:
    scores = {k: v for k, v in now.evaluation.items() if k not in ("step", "seconds")}
    figures = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    return Text.assemble(
        ("validation", "dim"), f" at step {now.evaluation['step']:,.0f}: {figures}"
    )


def _gpus(now: Standing) -> Table:
    figures = ("", "temperature", "power", "memory in use")
    table = terminal.table("", ("GPU", "utilisation"), figures)
    for gpu in now.gpus:
        share = gpu.get("utilisation_percent")
        table.add_row(
            str(gpu.get("index")),
            ProgressBar(total=100, completed=share or 0, width=24),
            MISSING if share is None else f"{share}%",
            shown(gpu.get("temperature_c"), "celsius"),
            shown(gpu.get("power_w"), "watts"),
            shown(gpu.get("memory_used_gib"), "gib"),
        )
    return table


def _events(now: Standing) -> list[Text]:
    """Lines of the latest events."""
    lines = [
        Text(
            f"{event.kind} at step {event.step:,}: {event.text}",
            "red" if event.kind in URGENT else "yellow",
        )
        for event in now.events[-_EVENTS:]
    ]
    more = len(now.events) - len(lines)
    return [Text(f"{more} events before these", "dim"), *lines] if more > 0 else lines
