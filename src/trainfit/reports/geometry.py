"""Positions of everything in a plot, in thousandths or in percent of its area.

The picture is stretched to whatever width there is, and the texts are HTML beside it: so a plot is
as readable on a phone as on paper. The template turns these views into markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trainfit.reports.model import (
    URGENT,
    Form,
    IntervalRow,
    Intervals,
    Lines,
    Matrix,
    Parallel,
    Series,
    Stack,
    shown,
    tick,
)


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """Range of numbers, linear or logarithmic, with its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Position of a number, from 0 at the low end to 1 at the high one."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(max(value, 1e-300)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


def linear(low: float, high: float, count: int = 4, *, tight: bool = False) -> PlotAxis:
    """An axis from `low` to `high`, extended to round numbers unless `tight`."""
    if high <= low:
        room = abs(low) * 0.05 or 1.0
        low, high = low - room, high + room
    step = _round_step((high - low) / count)
    if not tight:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # In 12 digits: 0.30000000000000004 is 0.3.
    ticks = tuple(float(f"{n * step:.12g}") for n in range(first, last + 1))
    return PlotAxis(low, high, ticks)


def logarithmic(low: float, high: float) -> PlotAxis:
    """An axis over positive numbers, with ticks at some powers of ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 5))
    ticks = tuple(10.0**n for n in range(first, last + 1) if (n - first) % every == 0)
    inside = tuple(tick for tick in ticks if low * 0.999 <= tick <= high * 1.001)
    return PlotAxis(low, high, inside or ticks[:1], log=True)


def span(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Smallest and greatest finite value; None without any."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    return (min(found), max(found)) if found else None


def thinned(ticks: Sequence[float], most: int) -> tuple[float, ...]:
    """At most `most` of the ticks, evenly chosen."""
    return tuple(ticks[:: max(1, math.ceil(len(ticks) / most))])


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)


@dataclass(frozen=True, slots=True)
class Label:
    """A text at a place in percent."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Path:
    """A line of the picture."""

    d: str
    color: int
    style: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Flag:
    """An event at a place in percent."""

    at: float
    urgent: bool
    text: str


@dataclass(frozen=True, slots=True)
class LinesView:
    """Positions of all parts of a line plot."""

    paths: tuple[Path, ...]
    x_ticks: tuple[Label, ...]
    y_ticks: tuple[Label, ...]
    references: tuple[Label, ...]
    flags: tuple[Flag, ...]
    x: PlotAxis
    y: PlotAxis


def lines_view(figure: Lines) -> LinesView | None:
    """Place a line plot; None where no number is finite."""
    x, y = _x_axis(figure), _y_axis(figure)
    if x is None or y is None:
        return None
    most = 4 if figure.form == "duration" else 6
    return LinesView(
        paths=tuple(path for series in figure.series for path in _paths(series, x, y)),
        x_ticks=tuple(Label(_percent(x.place(v)), _x_text(v, figure)) for v in x.ticks),
        y_ticks=tuple(
            Label(_percent(1 - y.place(v)), tick(v, figure.form)) for v in thinned(y.ticks, most)
        ),
        references=tuple(
            Label(_percent(1 - y.place(r.y)), r.label)
            for r in figure.references
            if y.low <= r.y <= y.high
        ),
        flags=tuple(
            Flag(_percent(x.place(m.x)), m.event in URGENT, f"{m.event} at {m.x:g}: {m.text}")
            for m in figure.marks
            if x.low <= m.x <= x.high
        ),
        x=x,
        y=y,
    )


def _x_axis(figure: Lines) -> PlotAxis | None:
    if figure.unit_square:
        return linear(0.0, 1.0)
    found = span(value for series in figure.series for value in series.x)
    return None if found is None else linear(min(found[0], 0.0), found[1], 5, tight=True)


def _y_axis(figure: Lines) -> PlotAxis | None:
    if figure.unit_square:
        return linear(0.0, 1.0)
    levels = [reference.y for reference in figure.references]
    found = span([*(v for series in figure.series for v in series.y), *levels])
    if found is None:
        return None
    if figure.log and found[0] > 0:
        return logarithmic(found[0], found[1])
    return linear(min(found[0], 0.0) if figure.from_zero else found[0], found[1])


def _x_text(value: float, figure: Lines) -> str:
    """Label of the x axis; the one at 0 also names the unit."""
    text = tick(value, "number")
    return f"{figure.x_label} {text}" if value == 0 and not figure.unit_square else text


def _paths(series: Series, x: PlotAxis, y: PlotAxis) -> Iterator[Path]:
    """Paths of a series: None interrupts the line, and few points get dots."""
    places: list[str | None] = [
        None if v is None else f"{x.place(at) * 1000:.1f} {(1 - y.place(v)) * 1000:.1f}"
        for at, v in zip(series.x, series.y, strict=True)
    ]
    drawn, before = [], None
    for place in places:
        if place is not None:
            # A point alone between gaps is a line of no length, which is a dot.
            drawn.append(f"M{place}h0" if before is None else f"L{place}")
        before = place
    if series.style != "points":
        yield Path("".join(drawn), series.color, series.style, series.name)
    if series.style in ("dots", "points"):
        dots = "".join(f"M{place}h0" for place in places if place is not None)
        yield Path(dots, series.color, "points", series.name)


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """A row of intervals, in percent."""

    label: str
    note: str
    value: str
    at: float | None
    low: float | None
    high: float | None
    color: int


@dataclass(frozen=True, slots=True)
class IntervalsView:
    """Positions of a chart with an interval per row, on one axis."""

    rows: tuple[PlacedRow, ...]
    ticks: tuple[Label, ...]
    references: tuple[Label, ...]
    beyond: str
    """Text about the references that are off the axis."""


def intervals_view(figure: Intervals) -> IntervalsView | None:
    """Place rows of intervals; None where no number is known."""
    found = span(v for r in figure.rows for v in (r.value, r.low, r.high))
    if found is None:
        return None
    low = 0.0 if figure.bars else found[0]
    high = found[1] if figure.top is None else figure.top
    axis = linear(min(low, high), max(found[1], high), tight=figure.top is not None)
    if figure.top is not None:
        least = min(axis.low - (axis.high - axis.low) * 0.08, axis.ticks[0])
        ticks = linear(max(0.0, least), axis.high, tight=True).ticks
        axis = PlotAxis(max(0.0, least), axis.high, ticks)
    inside = [r for r in figure.references if axis.low <= r.y <= axis.high]
    beyond = [f"{r.label} {shown(r.y, figure.form)}" for r in figure.references if r not in inside]
    return IntervalsView(
        rows=tuple(_row(row, axis, figure.form) for row in figure.rows),
        ticks=tuple(Label(_percent(axis.place(v)), tick(v, figure.form)) for v in axis.ticks),
        references=tuple(Label(_percent(axis.place(r.y)), r.label) for r in inside),
        beyond=f"Off the axis: {', '.join(beyond)}." if beyond else "",
    )


def _row(row: IntervalRow, axis: PlotAxis, form: Form) -> PlacedRow:
    def at(value: float | None) -> float | None:
        return None if value is None else _percent(min(max(axis.place(value), 0.0), 1.0))

    text = shown(row.value, form)
    return PlacedRow(row.label, row.note, text, at(row.value), at(row.low), at(row.high), row.color)


@dataclass(frozen=True, slots=True)
class StackView:
    """Parts of a bar, in percent of its width."""

    parts: tuple[tuple[IntervalRow, float, str], ...]
    measured: Label | None
    free: str


def stack_view(figure: Stack) -> StackView | None:
    """Place the parts of a bar; None where it has no width."""
    total = sum(part.value or 0.0 for part in figure.parts)
    width = max(total, figure.capacity or 0.0, figure.measured or 0.0)
    if width <= 0:
        return None
    measured = None
    if figure.measured is not None:
        measured = Label(_percent(figure.measured / width), shown(figure.measured, figure.form))
    free = "" if figure.capacity is None else shown(figure.capacity - total, figure.form)
    return StackView(
        parts=tuple(
            (part, _percent((part.value or 0.0) / width), shown(part.value, figure.form))
            for part in figure.parts
        ),
        measured=measured,
        free=free,
    )


def matrix_view(figure: Matrix) -> list[tuple[str, list[tuple[int, float]]]]:
    """Name of each true class, and its counts with their share of the row."""
    rows = []
    for label, counts in zip(figure.labels, figure.counts, strict=True):
        whole = max(sum(counts), 1)
        rows.append((label, [(count, round(count / whole, 4)) for count in counts]))
    return rows


@dataclass(frozen=True, slots=True)
class ParallelView:
    """Lines across parallel axes; the best are drawn last, and strongest."""

    paths: tuple[tuple[str, float, str], ...]
    """Path, rank from 0 to 1, and name of each trial."""
    axes: tuple[tuple[float, str, tuple[Label, ...]], ...]


def parallel_view(figure: Parallel) -> ParallelView | None:
    """Place the lines of trials; None for fewer than two axes."""
    found = span(figure.values)
    if found is None or len(figure.axes) < 2:
        return None
    low, high = found
    xs = [at / (len(figure.axes) - 1) * 1000 for at in range(len(figure.axes))]
    drawn = []
    for places, value, name in zip(figure.places, figure.values, figure.names, strict=True):
        points = [
            f"{x:.1f} {(1 - place) * 1000:.1f}"
            for x, place in zip(xs, places, strict=True)
            if place is not None
        ]
        good = 0.0 if value is None or high == low else (value - low) / (high - low)
        good = good if figure.greater_is_better else 1 - good
        if len(points) > 1:
            drawn.append(("M" + "L".join(points), round(good, 3), name))
    drawn.sort(key=lambda one: one[1])
    named = tuple(
        (x / 10, axis.name, tuple(Label(_percent(1 - at), text) for at, text in axis.ticks))
        for x, axis in zip(xs, figure.axes, strict=True)
    )
    return ParallelView(tuple(drawn), named)


def _percent(share: float) -> float:
    return round(share * 100, 3)
