"""The output of `trainfit train`: a bar in a terminal or plain lines, then the scores.

Everything but the scores goes to standard error, so that a program can read standard output.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from trainfit.conf import Composed
from trainfit.core import codec
from trainfit.core.records import Event, RunResult
from trainfit.engine.observers import (
    Observer,
    TrainRow,
    check_installed,
    gpu_trackers,
    open_trackers,
    plain_line,
    tokens_part,
)
from trainfit.hardware.catalogue import find
from trainfit.jobs.metrics import Metrics
from trainfit.jobs.pretraining import GptResult, iter_line, targets
from trainfit.jobs.run import Show
from trainfit.jobs.scores import JobResult
from trainfit.reports import score_sections, terminal
from trainfit.reports.model import duration
from trainfit.runs import run_folder
from trainfit.runs.reader import read_object

_MOST_CLASSES = 8
"""Classes whose confusion is shown on a terminal."""


def gpt_page(result: GptResult) -> RenderableType:
    """Losses, speed, time by activity, and overrides to try next."""
    table = terminal.table("", ("", ""), show_header=False)
    table.columns[0].style = "dim"
    for name, value in (
        ("validation loss", _beside(result)),
        ("training loss", _number(result.train_loss, "{:.4f} in the last lines of the log")),
        ("speed", _number(result.tokens_per_second, "{:,.0f} tokens/s")),
        ("mfu", _mfu(result)),
        ("memory", _number(result.peak_memory_gib, "{:.2f} GiB at the most")),
        ("time", _time(result)),
        ("events", ", ".join(sorted({event.kind for event in result.events})) or "none"),
    ):
        table.add_row(name, value)
    parts: list[RenderableType] = [table]
    if result.next_steps:
        steps = "  then  ".join(result.next_steps)
        parts.append(Text(f"To use the GPU better, try in this order: {steps}"))
    parts.append(Text(f"Run folder {result.run}"))
    return Group(*parts)


def _beside(result: GptResult) -> str:
    found = _number(result.val_loss, "{:.4f} nats per token")
    if result.unigram_entropy is None:
        return found
    return f"{found} (knowing only how common each token is: {result.unigram_entropy:.4f})"


def _mfu(result: GptResult) -> str:
    if result.mfu is None or result.gpu is None:
        return "not known: the catalogue has no peak for this device"
    spec = find(result.gpu)
    good, excellent = targets(spec)
    measured = ""
    if result.mfu_of_measured is not None:
        measured = f", {result.mfu_of_measured:.1%} of the peak measured here"
    return (
        f"{result.mfu:.1%} of {spec.slug}'s dense peak{measured}: {result.standing}"
        f" (good from {good[0]}%, excellent from {excellent[0]}%)"
    )


def _time(result: GptResult) -> str:
    spent = result.spent
    parts = {
        "computing": spent.computing,
        "waiting for data": spent.waiting,
        "compiling": spent.compiling,
        "evaluating": spent.evaluating,
    }
    shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    return f"{duration(result.seconds)}: {shown}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


_EVERY = 5.0
"""Least seconds between two plain lines."""


_REPORT = ("trainfit.reports.run_report", "trainfit.reports.writers", "sklearn.metrics")
"""Modules of the page at the end of a run, which takes longer to import than to make."""


def show(composed: Composed) -> Show:
    """Choose how `trainfit train` shows a job."""
    console = terminal.console(stderr=True)
    tracking = str(composed.values()["tracking"])
    if tracking != "none":
        check_installed(tracking)  # before the first hour of training, not after it

    line = iter_line if composed.task == "gpt" else None

    def watch(title: str) -> Sequence[Observer]:
        kind = Bar if console.is_terminal else PlainLines
        return (kind(console, title, line),)

    return Show(
        watch=watch,
        track=lambda run: (*open_trackers(tracking, run, composed), *gpu_trackers(run)),
        busy=terminal.busy,
        note=lambda text: console.print(Text(f"trainfit: note: {text}"), soft_wrap=True),
        prepare=_import_report,
    )


def _import_report() -> None:
    for name in _REPORT:
        import_module(name)


class PlainLines(Observer):
    """Prints plain lines every few seconds, or all lines of a job that makes its own."""

    def __init__(
        self, console: Console, title: str, line: Callable[[TrainRow], str] | None = None
    ) -> None:
        """Write to `console`; `title` names the fold, `line` makes a job's own lines."""
        self._console, self._prefix, self._line = console, f"{title}: " if title else "", line
        self._last = 0.0

    def _print(self, text: str) -> None:
        self._console.print(Text(self._prefix + text), soft_wrap=True)

    def on_line(self, text: str) -> None:
        self._print(text)

    def on_log(self, row: TrainRow) -> None:
        """Print the figures of a window, if the last ones are some seconds old."""
        if self._line is not None:
            self._print(self._line(row))
            return
        now = time.monotonic()
        if now - self._last >= _EVERY or row.step == row.total_steps:
            self._last = now
            left = row.step_seconds * (row.total_steps - row.step)
            self._print(f"{plain_line(row)}, {duration(left)} left")

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._print(f"step {step}: validation {figures}")

    def on_event(self, event: Event) -> None:
        self._print(f"{event.kind} at step {event.step}: {event.text}")


class Bar(PlainLines):
    """A progress bar with loss, rates, MFU, memory and time left; other lines go above it."""

    def __init__(
        self, console: Console, title: str, line: Callable[[TrainRow], str] | None = None
    ) -> None:
        """Draw on `console`; the lines that `line` makes go above the bar."""
        super().__init__(console, title, line)
        self._bar = Progress(
            TextColumn(title or "training"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            transient=True,
        )

    def on_start(self, step: int, total_steps: int) -> None:
        self._task = self._bar.add_task("", total=total_steps, completed=step, numbers="")
        self._bar.start()

    def on_step(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def on_log(self, row: TrainRow) -> None:
        """Update the figures beside the bar."""
        if self._line is not None:
            super().on_log(row)
        self._bar.update(self._task, numbers=bar_numbers(row))

    def on_end(self, _result: RunResult) -> None:
        self._bar.stop()


def bar_numbers(row: TrainRow) -> str:
    """The figures beside the bar."""
    left = duration(row.step_seconds * (row.total_steps - row.step))
    parts = [
        f"loss {row.loss:.4f}",
        f"{row.samples_per_second:,.1f} samples/s",
        *tokens_part(row),
        *([] if row.mfu is None else [f"mfu {row.mfu:.1%}"]),
        f"{row.memory_gib:.2f} GiB",
        f"{left} left",
    ]
    return ", ".join(parts)


# ── the end ───────────────────────────────────────────────────────────────────────────────────


def end(result: Any, *, as_json: bool) -> None:
    """Print the result of a job."""
    if not run_folder.is_first_rank():
        return
    if as_json:
        print(codec.for_programs(codec.encode(result), None))
        return
    console = terminal.console()
    if result.status == "stopped":
        console.print(
            f"Stopped. Go on with: trainfit train {result.task} --resume {shlex.quote(result.run)}",
            soft_wrap=True,
        )
        return
    pages: dict[type, Callable[[Any], RenderableType]] = {
        JobResult: result_page,
        GptResult: gpt_page,
    }
    page = pages.get(type(result), own_page)(result)
    console.print(page, soft_wrap=not isinstance(result, JobResult))


def own_page(result: Any) -> RenderableType:
    """The figures of a job of the user's own, its metric first."""
    table = Table("figure", "held out", box=None, header_style="bold", pad_edge=False)
    first = [result.metric, *(name for name in result.metrics if name != result.metric)]
    for name in first:
        table.add_row(name, f"{result.metrics[name]:.4f}")
    ended = f"{duration(result.seconds)} of training; run folder {result.run}"
    return Group(table, Text(ended))


def result_page(result: JobResult) -> RenderableType:
    """Tables of the scores and the baselines."""
    parts: list[RenderableType] = [_scores(result), *_remarks(result)]
    if result.by_criterion:
        parts += ["", _criteria(result.by_criterion)]
    if result.by_label:
        tagged = result.problem_type == "token_classification"
        parts += ["", _labels(result.by_label, tagged=tagged)]
    if confusion := result.metrics.get("confusion"):
        parts += _confusion(result.run, confusion)
    if result.events:
        kinds = sorted({event.kind for event in result.events})
        counts = [f"{sum(e.kind == kind for e in result.events)} {kind}" for kind in kinds]
        parts.append(Text(f"Events: {', '.join(counts)}", "dim"))
    folds = len(result.metrics.get("folds", ()))
    summed = f", {folds} folds added up" if folds > 1 else ""
    parts.append(Text(f"{duration(result.seconds)} of training{summed}; run folder {result.run}"))
    return Group(*parts)


def _remarks(result: JobResult) -> Iterator[Text]:
    """Say which class some scores are of, and where the model does not beat a baseline."""
    data = (read_object(Path(result.run) / "data.json").get("folds") or [{}])[0]
    numbers = result.problem_type == "regression"
    main = "rmse" if numbers else str(data.get("metric", "f1"))
    if main == "macro_f1" and len(data["classes"]) == 2:
        yield Text(f"f1, precision and recall are of the class {data['classes'][1]}")
    rivals = [
        (figures[main], title)
        for title, figures in score_sections.by_baseline(result.baselines).items()
        if main in figures
    ]
    if not rivals or main not in result.metrics:
        return
    best, title = (min if numbers else max)(rivals)
    own = result.metrics[main]
    if (own >= best) if numbers else (own <= best):
        yield Text(
            f"The model does not beat a baseline, {title}: "
            f"{main} {score_sections.four(own)} against {score_sections.four(best)}. "
            "Train on more rows or longer (--epochs), or with another --model or --lr.",
            "yellow",
        )


def _confusion(run: str, counts: Sequence[Sequence[int]]) -> list[RenderableType]:
    """Predictions by true class; the page of many classes is the report."""
    if len(counts) > _MOST_CLASSES:
        return []
    names = score_sections.class_names(read_object(Path(run) / "data.json"), len(counts))
    table = terminal.table("Confusion", ("true class",), [f"as {name}" for name in names])
    for name, row in zip(names, counts, strict=True):
        table.add_row(name, *map(str, row))
    return ["", table]


def _scores(result: JobResult) -> Table:
    figures = score_sections.figures_of(result.problem_type)
    rows, main = score_sections.score_rows(result.metrics, result.baselines, figures)
    title = f"Held-out scores over {main} folds" if main else "Held-out test scores"
    table = terminal.table(
        title, ("",), figures if figures is score_sections.FIGURES else figures.values()
    )
    for at, row in enumerate(rows):
        table.add_row(*row, style="bold" if at == main else None)
    return table


def _labels(by_label: Mapping[str, Metrics], *, tagged: bool) -> Table:
    names = ("f1", "precision", "recall") if tagged else ("f1", "precision", "recall", "auc")
    title, counted = ("By type", "true") if tagged else ("By label", "texts")
    table = terminal.table(title, ("",), (*names, counted))
    for name, one in by_label.items():
        cells = [score_sections.four(getattr(one, figure)) for figure in names]
        table.add_row(name, *cells, str(sum(one.confusion[1])))
    return table


def _criteria(by_criterion: Mapping[str, Metrics]) -> Table:
    table = terminal.table("By criterion", ("",), (*score_sections.FIGURES, "positives", "pairs"))
    for code, one in by_criterion.items():
        positives = sum(one.confusion[1])
        cells = [score_sections.four(getattr(one, name)) for name in score_sections.FIGURES]
        table.add_row(code, *cells, str(positives), str(one.count))
    return table
