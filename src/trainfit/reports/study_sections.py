"""The chapter of a study (trials, parameters, best) and the section of a ladder.

A study is read from the files that hpo wrote, so that a report needs no database and no Optuna.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainfit.core import codec
from trainfit.core.errors import TrainfitError
from trainfit.core.files import is_file
from trainfit.reports.model import (
    MISSING,
    Block,
    Chapter,
    Headline,
    IntervalRow,
    Intervals,
    Lines,
    Parallel,
    ParallelAxis,
    Remark,
    Section,
    Series,
    Table,
    cell,
    shown,
)
from trainfit.runs.reader import RunFiles, read_object
from trainfit.tuning.rungs import Ladder, LadderStep
from trainfit.tuning.tuned_cache import Interval

_MOST_CURVES = 60


def is_study(folder: Path) -> bool:
    return is_file(folder / "study.json")


def study_chapter(folder: Path, at: int) -> Chapter:
    about, figures, result = (
        read_object(folder / f"{name}.json") for name in ("study", "figures", "result")
    )
    history: Sequence[Mapping[str, Any]] = figures.get("history") or ()
    metric = str(figures.get("metric") or about.get("metric") or "value")
    folds = "" if about.get("folds", 1) == 1 else f" · {about['folds']} folds"
    sections = [
        Section(id="history", title="Trials", blocks=tuple(_trials(figures, metric))),
        Section(id="parameters", title="Parameters", blocks=tuple(_parameters(figures, metric))),
    ]
    if not history:
        text = "The study has not ended yet: trainfit hpo status shows where it stands."
        sections = [Section(id="history", title="Trials", blocks=(Remark(text=text),))]
    return Chapter(
        id=f"run-{at + 1}",
        title=str(about.get("study") or folder.resolve().name),
        subtitle=f"study of {about.get('task', 'a job')}{folds}",
        status="finished" if result else "unfinished",
        headlines=tuple(_headlines(history, result, metric)),
        sections=tuple(section for section in sections if section.blocks),
    )


def _headlines(
    history: Sequence[Mapping[str, Any]], result: Mapping[str, Any], metric: str
) -> list[Headline]:
    found = []
    best: Mapping[str, Any] = result.get("best") or {}
    if isinstance(best.get("value"), int | float):
        found.append(Headline(label=f"best {metric}", value=f"{best['value']:.4f}"))
    test = best.get("test")
    test = test.get(metric) if isinstance(test, Mapping) else test
    if isinstance(test, int | float):
        found.append(Headline(label=f"held-out {metric}", value=f"{test:.4f}"))
    states = [str(point.get("state")) for point in history]
    for state in dict.fromkeys(sorted(states)):
        found.append(Headline(label=f"{state} trials", value=str(states.count(state))))
    beside: Mapping[str, Any] = result.get("side_by_side") or {}
    if isinstance(beside.get("kept"), int):
        gain = beside.get("gain")
        more = f", {gain:.2f}× the steps of one" if isinstance(gain, int | float) else ""
        found.append(Headline(label="trials side by side", value=f"{beside['kept']}{more}"))
    if isinstance(result.get("seconds"), int | float):
        found.append(Headline(label="time", value=shown(result["seconds"], "duration")))
    return found


def _trials(figures: Mapping[str, Any], metric: str) -> list[Block]:
    history = [p for p in figures.get("history") or () if p.get("value") is not None]
    blocks: list[Block] = []
    if history:
        numbers = tuple(float(point["number"]) for point in history)
        values = tuple(float(point["value"]) for point in history)
        best = tuple(float(point["best"]) for point in history)
        trial = Series(name="trial", x=numbers, y=values, color=0, style="points")
        so_far = Series(name="best so far", x=numbers, y=best, color=1)
        blocks.append(
            Lines(id="history", title=f"{metric} by trial", x_label="trial", series=(trial, so_far))
        )
    curves: Mapping[str, Mapping[str, float]] = figures.get("curves") or {}
    series = [
        _curve(number, values, at) for at, (number, values) in enumerate(list(curves.items()))
    ][:_MOST_CURVES]
    if series:
        blocks.append(
            Lines(
                id="reported",
                title=f"{metric} on the way",
                note=f"{len(curves)} trials" if len(curves) > len(series) else "",
                x_label="report",
                series=tuple(series),
            )
        )
    return blocks


def _curve(number: str, values: Mapping[str, float], at: int) -> Series:
    points = sorted((float(step), value) for step, value in values.items())
    known = [(x, y) for x, y in points if isinstance(y, int | float)]
    return Series(
        name=f"trial {number}",
        x=tuple(x for x, _ in known),
        y=tuple(float(y) for _, y in known),
        color=at % 8,
        style="faint",
    )


def _parameters(figures: Mapping[str, Any], metric: str) -> list[Block]:
    blocks: list[Block] = []
    importance: Mapping[str, float] = figures.get("importance") or {}
    if importance:
        ranked = sorted(importance.items(), key=lambda item: -item[1])
        rows = tuple(IntervalRow(label=name, value=value) for name, value in ranked)
        note = "the share of the differences that a parameter explains"
        blocks.append(
            Intervals(
                id="importance", title="Importance", note=note, form="percent", rows=rows, bars=True
            )
        )
    trials: Sequence[Mapping[str, Any]] = figures.get("parallel") or ()
    names = dict.fromkeys(key for trial in trials for key in trial if key not in _NOT_PARAMETERS)
    if trials and names:
        upward = figures.get("direction") != "minimize"
        blocks.append(_parallel(trials, list(names), metric, upward))
        ranked_trials = sorted(trials, key=lambda t: t["value"], reverse=upward)
        blocks.append(
            Table(
                title="Complete trials, the best first",
                columns=("trial", metric, *names),
                rows=tuple(
                    (t["number"], t["value"], *(cell(t.get(name)) for name in names))
                    for t in ranked_trials[:50]
                ),
                strong=(0,),
            )
        )
    return blocks


_NOT_PARAMETERS = ("number", "value")


def _parallel(
    trials: Sequence[Mapping[str, Any]], names: list[str], metric: str, upward: bool
) -> Parallel:
    short = {name: name.rpartition(".")[2] for name in names}
    columns = [_axis(short[name], [trial.get(name) for trial in trials]) for name in names]
    columns.append(_axis(metric, [trial["value"] for trial in trials]))
    return Parallel(
        id="parallel",
        title="Parallel coordinates",
        note="a line for each complete trial; the stronger, the better",
        axes=tuple(axis for axis, _ in columns),
        places=tuple(zip(*(places for _, places in columns), strict=True)),
        values=tuple(float(trial["value"]) for trial in trials),
        names=tuple(f"trial {trial['number']}" for trial in trials),
        greater_is_better=upward,
    )


def _axis(name: str, values: list[Any]) -> tuple[ParallelAxis, list[float | None]]:
    """Place numbers by size, or by logarithm where they span much, and words by order."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) != len([v for v in values if v is not None]) or not numbers:
        words = sorted({str(v) for v in values if v is not None})
        last = max(len(words) - 1, 1)
        spots = {word: at / last for at, word in enumerate(words)}
        ticks = tuple((at, word) for word, at in spots.items())
        placed = [None if v is None else spots[str(v)] for v in values]
        return ParallelAxis(name=name, ticks=ticks), placed
    low, high = min(numbers), max(numbers)
    log = low > 0 and high / low >= 8
    scale = math.log if log else float
    span = (scale(high) - scale(low)) or 1.0
    placed = [None if v is None else (scale(v) - scale(low)) / span for v in values]
    ticks = ((0.0, cell(low)), (1.0, cell(high))) if high > low else ((0.0, cell(low)),)
    return ParallelAxis(name=name, ticks=ticks), placed


_KEPT, _ASIDE = 0, 7
"""Colours of the bars: optimizations that were kept, and those that were not."""


def ladder_section(run: RunFiles) -> Section | None:
    """Speed and memory, one optimization after another, then the best without each."""
    if not run.ladder:
        return None
    try:
        ladder = codec.decode(Ladder, run.ladder)
    except TrainfitError as error:
        raise ValueError("ladder.json is of another form") from error
    title = "Samples per second, one optimization after another"
    bars = tuple(map(_speed, ladder.steps))
    blocks: list[Block] = [Intervals(id="ladder", title=title, rows=bars, bars=True)]
    blocks.append(_table(ladder.steps, "over the last"))
    if ladder.without:
        blocks.append(_table(ladder.without, "of the best", "The best without one of them"))
    if ladder.not_applicable:
        rows = tuple((one.name, one.reason) for one in ladder.not_applicable)
        blocks.append(Table(title="Not applicable", columns=("optimization", "why"), rows=rows))
    if ladder.drift is not None:
        text = f"The baseline at the end was {times(ladder.drift)} as fast as at first."
        blocks.append(Remark(text=text))
    return Section(id="ladder", title="Ladder", blocks=tuple(blocks))


def _table(steps: Sequence[LadderStep], against: str, title: str = "") -> Table:
    rows = tuple(
        (
            step.name,
            shown(_speed(step).value, "number"),
            times(step.speedup),
            times(step.gain),
            shown(step.peak_memory_gib, "gib"),
            step.note or step.what,
        )
        for step in steps
    )
    columns = ("optimization", "samples/s", "speed-up", against, "peak memory", "note")
    return Table(title=title, columns=columns, rows=rows)


def times(interval: Interval | None) -> str:
    """A ratio with its interval."""
    if interval is None:
        return MISSING
    if interval.low == interval.high:
        return f"{interval.value:.2f}×"
    return f"{interval.value:.2f}× ({interval.low:.2f}–{interval.high:.2f})"


def _speed(step: LadderStep) -> IntervalRow:
    color, found = _KEPT if step.kept else _ASIDE, step.samples_per_second
    if found is None:
        return IntervalRow(label=step.name, value=None, color=color)
    return IntervalRow(
        label=step.name, value=found.value, low=found.low, high=found.high, color=color
    )
