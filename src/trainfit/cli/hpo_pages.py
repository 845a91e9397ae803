"""What `trainfit hpo` prints: a line per trial, tables of a study, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainfit.reports.plan import duration

if TYPE_CHECKING:
    from trainfit.hpo.final import StudyResult
    from trainfit.hpo.status import StudyStatus, TrialRow


class Board:
    """Says each finished trial once, and where the study stands, on standard error."""

    def __init__(self, console: Console) -> None:
        """Print on `console`."""
        self._console = console
        self._seen: set[int] = set()

    def forget(self, status: StudyStatus) -> None:
        """What was finished before this command is not news."""
        self._seen = {row.number for row in status.trials if row.state in _ENDED}

    def show(self, status: StudyStatus) -> None:
        """Print what has ended since the last look."""
        news = [r for r in status.trials if r.state in _ENDED and r.number not in self._seen]
        for row in news:
            self._seen.add(row.number)
            self._console.print(Text(trial_line(row)), soft_wrap=True)
        if news:
            self._console.print(Text(_progress(status), "dim"), soft_wrap=True)


_ENDED = ("complete", "pruned", "fail")


def trial_line(row: TrialRow) -> str:
    """A trial in one line."""
    value = "" if row.value is None else f" {row.value:.4f}"
    reason = f" ({row.reason})" if row.reason else ""
    took = "" if row.seconds is None else f" in {duration(row.seconds)}"
    return f"trial {row.number}: {row.state}{value}{took}{reason}; {short(row.params)}"


def _progress(status: StudyStatus) -> str:
    parts = [f"{status.finished} of {status.wanted} trials"]
    if status.best is not None and status.best.value is not None:
        best = status.best
        parts.append(f"best {status.metric} {best.value:.4f} in trial {best.number}")
    if status.eta_seconds:
        parts.append(f"about {duration(status.eta_seconds)} left")
    return ", ".join(parts)


def short(params: Mapping[str, Any]) -> str:
    """Parameters by the last part of their keys."""
    return ", ".join(f"{key.split('.')[-1]} {_value(value)}" for key, value in params.items())


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(json.loads(json.dumps(value)))


def status_page(status: StudyStatus) -> RenderableType:
    """A study with its trials."""
    counts = ", ".join(f"{count} {state}" for state, count in status.counts.items())
    table = Table(box=None, pad_edge=False)
    for name in ("trial", "state", status.metric, "time", "parameters"):
        table.add_column(name, justify="right" if name in ("trial", status.metric) else "left")
    for row in status.trials:
        mark = status.best is not None and row.number == status.best.number
        table.add_row(
            str(row.number),
            row.state,
            "–" if row.value is None else f"{row.value:.4f}",
            "–" if row.seconds is None else duration(row.seconds),
            row.reason if row.state != "complete" and row.reason else short(row.params),
            style="bold" if mark else None,
        )
    title = Text(f"{status.study}: {status.task}, {status.metric} to {status.direction}")
    return Group(title, Text(_progress(status)), Text(counts, "dim"), "", table)


def studies_page(found: list[StudyStatus]) -> RenderableType:
    """Every study of a storage."""
    table = Table(box=None, pad_edge=False)
    for name in ("study", "task", "finished", "best", "metric", "left"):
        table.add_column(name)
    for one in found:
        best = one.best.value if one.best is not None else None
        table.add_row(
            one.study,
            one.task,
            f"{one.finished} of {one.wanted}",
            "–" if best is None else f"{best:.4f}",
            one.metric,
            duration(one.eta_seconds) if one.eta_seconds else "–",
        )
    return table


def result_page(result: StudyResult, folder: str, again: str) -> RenderableType:
    """How a study ended."""
    best = result.best
    if best is None:
        return Text(f"Stopped. The same command goes on: {again}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("best trial", str(best.trial))
    table.add_row("validation", f"{best.value:.4f}, the mean over folds")
    for name, value in best.test.items():
        table.add_row(f"test {name}", f"{value:.4f}")
    for key, value in best.params.items():
        table.add_row(key, _value(value))
    counts = ", ".join(f"{count} {state}" for state, count in result.trials.items())
    ends = f"{counts}; {duration(result.seconds)}; final model {best.run}; study folder {folder}"
    return Group(table, Text(ends))
