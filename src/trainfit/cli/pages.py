"""Terminal pages of `trainfit tune`, its ladder, and `trainfit hpo`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from trainfit.core.files import write_output
from trainfit.core.plan_records import shown
from trainfit.core.records import Scalar
from trainfit.measuring.timing import median_interval
from trainfit.reports import terminal
from trainfit.reports.model import duration, plain
from trainfit.reports.model import shown as in_units
from trainfit.reports.plots import ladder_plot
from trainfit.reports.study_sections import times
from trainfit.tuning.rungs import BASELINE, Ladder, LadderStep
from trainfit.tuning.tuned_cache import NOTHING_MEASURED, Interval, Trial, TuneResult

if TYPE_CHECKING:
    from trainfit.hpo.outcome import StudyResult, StudyStatus, TrialRow


@contextmanager
def watched(what: str, seconds: float, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints lines: above a time bar in a terminal, else plainly."""
    console = terminal.console(stderr=True)
    if quiet:
        yield lambda _line: None
    elif not console.is_terminal:
        with terminal.signs_of_life(what):
            yield lambda line: console.print(Text(line), soft_wrap=True)
    else:
        with _TimeBar(what, seconds, console) as bar:
            yield lambda line: bar.console.print(Text(line), soft_wrap=True)


class _TimeBar(Progress):
    """A bar that follows the clock."""

    def __init__(self, what: str, seconds: float, console: Console) -> None:
        self._began, self._seconds = time.monotonic(), seconds
        super().__init__(
            TextColumn(what),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} s"),
            console=console,
            transient=True,
        )
        self.add_task("", total=seconds)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Draw the bar at the present time."""
        for task in self.tasks:
            task.completed = min(self._seconds, time.monotonic() - self._began)
        yield from super().get_renderables()


def trial_line(trial: Trial) -> str:
    what = describe(trial.settings)
    if trial.samples_per_second is None:
        return f"{what}: {trial.status}" + (f" ({trial.note})" if trial.note else "")
    rate = _rate(trial.samples_per_second)
    return f"{what}: {rate} samples/s, in {trial.seconds:.1f} s"


def describe(settings: dict[str, Scalar]) -> str:
    """Settings that differ from the plan, in words."""
    if not settings:
        return "as planned"
    return ", ".join(f"{name}={shown(value)}" for name, value in settings.items())


def tune_page(result: TuneResult) -> RenderableType:
    """Page of a tuning: the trials, best first, and the gain."""
    headings = ("samples/s", "of planned", "GiB", "first steps")
    table = terminal.table(left=["settings"], right=headings, header_style="bold")
    rows = _joined(result.trials)
    for trial in rows:
        if trial.samples_per_second is not None:
            table.add_row(*_cells(trial, result.planned_samples_per_second))
    rest = [trial for trial in rows if trial.samples_per_second is None]
    styles = ["dim" if trial.status == "skipped" else "yellow" for trial in rest]
    lines = [Text(trial_line(trial), style) for trial, style in zip(rest, styles, strict=True)]
    return Group(table, "", *lines, *([""] if lines else []), *map(Text, _ending(result)))


def _joined(trials: tuple[Trial, ...]) -> list[Trial]:
    """One row per candidate over all its trials, fastest first and failures last."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(describe(trial.settings), []).append(trial)
    rows = []
    for group in groups.values():
        rates = [
            samples / max(seconds, 1e-9)
            for trial in group
            for samples, seconds in zip(trial.step_samples, trial.step_seconds, strict=True)
        ]
        last = group[-1]
        joined = median_interval(rates) if rates and last.status == "ok" else None
        first = group[0].first_steps_seconds
        rows.append(replace(last, samples_per_second=joined, first_steps_seconds=first))
    return sorted(rows, key=lambda t: -(t.samples_per_second.value if t.samples_per_second else 0))


def _cells(trial: Trial, planned: Interval | None) -> tuple[str, ...]:
    rate = trial.samples_per_second
    assert rate is not None
    return (
        describe(trial.settings),
        _rate(rate),
        "" if planned is None else f"{rate.value / planned.value:.2f}×",
        "" if trial.peak_memory_gib is None else f"{trial.peak_memory_gib:.1f}",
        "" if trial.first_steps_seconds is None else f"{trial.first_steps_seconds:.1f} s",
    )


def _rate(rate: Interval) -> str:
    return f"{rate.value:,.1f} [{rate.low:,.1f}–{rate.high:,.1f}]"


def _ending(result: TuneResult) -> Iterator[str]:
    if result.samples_per_second is None:
        late = result.ended == "time is up" or any(one.status == "hung" for one in result.trials)
        fix = " Give more time (--minutes), on a less busy machine." if late else ""
        yield f"Nothing could be measured: the plan stays as it is.{fix}"
    elif not result.changes:
        yield f"Best: as planned, {_rate(result.samples_per_second)} samples/s."
    else:
        gain = "" if result.gain is None else f", {result.gain:.2f} times the plan's own"
        yield f"Best: {describe(result.changes)}"
        yield f"      {_rate(result.samples_per_second)} samples/s{gain}."
    yield from (note for note in result.notes if note != NOTHING_MEASURED)
    end = {"finished": "", "time is up": "; the time was up", "interrupted": "; interrupted"}
    measured = sum(trial.status == "ok" for trial in result.trials)
    trials = "trial" if measured == 1 else "trials"
    yield f"{measured} {trials} in {result.seconds:.0f} s{end[result.ended]}."
    if result.samples_per_second is not None:
        yield "`trainfit train` of the same job uses this from now on; tune=off does not."


def ladder_page(ladder: Ladder) -> RenderableType:
    """Tables of each optimization, of the best without each, and of those not applicable."""
    name = f"{ladder.title}: " if ladder.title else ""
    title = f"{name}one optimization after another, on {ladder.device}"
    parts: list[RenderableType] = [Text(title, "bold")]
    parts += _ladder_table("optimization", "over the last", ladder.steps)
    if ladder.without:
        parts += ["", *_ladder_table("the best without", "of the best", ladder.without)]
    if ladder.not_applicable:
        parts += ["", Text("Not applicable here", "bold")]
        parts += [Text(f"  {one.name}: {one.reason}") for one in ladder.not_applicable]
    parts += ["", *(Text(line) for line in closing_lines(ladder))]
    return Group(*parts)


def write_ladder(ladder: Ladder, place: Path) -> tuple[Path, Path]:
    """Write the JSON and the picture beside it; into a folder, where a report finds ladder.json."""
    data = place if place.suffix == ".json" else place / "ladder.json"
    picture = data.with_suffix(".svg")
    write_output(data, ladder.to_json() + "\n")
    write_output(picture, ladder_plot(ladder))
    return data, picture


def step_line(step: LadderStep) -> str:
    """One line about a step, printed while the ladder runs."""
    if step.samples_per_second is None:
        return f"{step.name}: {step.status}" + (f" ({step.note})" if step.note else "")
    compared = f", {times(step.gain)} what it is compared with" if step.gain else ""
    if step.speedup:
        compared = f", {times(step.speedup)} the baseline"
    return f"{step.name}: {rate(step)} samples/s{compared}"


def closing_lines(ladder: Ladder) -> list[str]:
    """Sentences on how the ladder was measured."""
    lines = [
        f"Medians with 95% intervals over {ladder.rounds} "
        f"{'round' if ladder.rounds == 1 else 'rounds'} in {ladder.seconds:.0f} s, "
        f"{ladder.samples_per_step} sequences a step in every row."
    ]
    if ladder.rounds == 1:
        lines.append("After one round they do not show how a trial differs from the next.")
    if ladder.drift is not None:
        lines.append(f"The baseline at the end was {times(ladder.drift)} as fast as at first.")
    if ladder.ended != "finished":
        lines.append(f"It ended early: {ladder.ended}.")
    return lines


def rate(step: LadderStep) -> str:
    """Samples per second with their interval, or the status of a step without."""
    found = step.samples_per_second
    if found is None:
        return step.status
    return f"{plain(found.value)} ({plain(found.low)}–{plain(found.high)})"


def _ladder_table(first: str, against: str, steps: tuple[LadderStep, ...]) -> list[RenderableType]:
    """The table of steps, with their notes below."""
    figures = ("samples/s", "speed-up", against, "peak memory")
    table = terminal.table("", (first,), figures, header_style="bold")
    for step in steps:
        table.add_row(
            Text(step.name, "" if step.kept else "dim"),
            rate(step),
            times(step.speedup),
            times(step.gain),
            in_units(step.peak_memory_gib, "gib"),
        )
    said = [f"  {step.name}: {step.note}" for step in steps if step.note]
    if steps[0].name == BASELINE:
        said.insert(0, f"  {BASELINE}: {steps[0].what}")
    return [table, *(Text(line, "dim") for line in said)]


class Board:
    """Prints each finished trial once, and the study's progress."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: set[int] = set()

    def forget(self, status: StudyStatus) -> None:
        """Mark trials that finished before this command as shown."""
        self._seen = {row.number for row in status.trials if row.state in _ENDED}

    def say(self, text: str) -> None:
        """Print a line about the workers."""
        self._console.print(Text(text, "dim"), soft_wrap=True)

    def show(self, status: StudyStatus) -> None:
        """Print the trials that ended since the last call."""
        news = [r for r in status.trials if r.state in _ENDED and r.number not in self._seen]
        for row in news:
            self._seen.add(row.number)
            self._console.print(Text(study_trial_line(row)), soft_wrap=True)
        if news:
            self._console.print(Text(_progress(status), "dim"), soft_wrap=True)


_ENDED = ("complete", "pruned", "fail")


def study_trial_line(row: TrialRow) -> str:
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
    """Parameters in short, by the last part of their keys."""
    return ", ".join(f"{key.split('.')[-1]} {_study_value(value)}" for key, value in params.items())


def _study_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) else json.dumps(value)


def final_score(metric: str) -> str:
    """Name of a final model's score; a GPT has no data but what the trials were judged by."""
    return metric if metric == "val_loss" else f"test {metric}"


def status_page(status: StudyStatus) -> RenderableType:
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
    if not found:
        return Text("No study yet: trainfit hpo TASK begins one")
    table = terminal.table(left=("study", "task", "finished", "best", "metric", "left"))
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


def study_page(result: StudyResult, folder: str, again: str) -> RenderableType:
    best = result.best
    if best is None:
        return Text(f"Stopped. The same command continues: {again}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("best trial", str(best.trial))
    table.add_row("validation", f"{best.value:.4f}")
    for name, value in best.test.items():
        table.add_row(final_score(name), f"{value:.4f}")
    for key, value in best.params.items():
        table.add_row(key, _study_value(value))
    if (beside := result.side_by_side) is not None:
        gain = "" if beside.gain is None else f", {beside.gain:.2f} times the steps of one"
        table.add_row("side by side", f"{beside.kept} of {beside.planned} planned{gain}")
    counts = ", ".join(f"{count} {state}" for state, count in result.trials.items())
    ends = f"{counts}; {duration(result.seconds)}; final model {best.run}; study folder {folder}"
    return Group(table, Text(ends))
