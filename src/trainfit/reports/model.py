"""Records of a report: sections of figures, tables and facts.

writers.py writes them as HTML and Markdown, and their JSON holds the numbers behind every plot.
`kind` tells the records apart in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from trainfit.core.records import Record, Scalar

Form = Literal["number", "percent", "count", "gib", "duration", "celsius", "watts"]
"""Unit of a number, which decides how `shown` and `tick` write it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series(Record):
    """A line of a plot."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    """Values; None is a gap, as at a step without a finite number."""
    color: int
    """Index of the colour, the same for one thing in all plots."""
    style: Literal["line", "dots", "faint", "points"] = "line"
    """dots: a line through a few points; points: no line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark(Record):
    """Something that happened at a place of the x axis."""

    x: float
    event: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference(Record):
    """A level to compare a line with."""

    y: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Drawn(Record):
    """Fields that all figures have."""

    kind: str
    id: str
    title: str
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines(_Drawn):
    """A plot of lines over one x axis."""

    kind: str = "lines"
    x_label: str = "step"
    form: Form = "number"
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    references: tuple[Reference, ...] = ()
    log: bool = False
    from_zero: bool = False
    unit_square: bool = False
    """Both axes from 0 to 1, as for ROC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalRow(Record):
    """A value with its interval."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""
    color: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervals(_Drawn):
    """Rows of dots with their intervals, or of bars from zero, on one axis."""

    kind: str = "intervals"
    form: Form = "number"
    rows: tuple[IntervalRow, ...]
    bars: bool = False
    top: float | None = None
    """End of the axis; None for just after the largest value."""
    references: tuple[Reference, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack(_Drawn):
    """Parts of a whole, against its capacity."""

    kind: str = "stack"
    form: Form = "gib"
    parts: tuple[IntervalRow, ...]
    capacity: float | None = None
    measured: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix(_Drawn):
    """Counts by true class, then by predicted class."""

    kind: str = "matrix"
    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelAxis(Record):
    """One of the parallel axes."""

    name: str
    ticks: tuple[tuple[float, str], ...]
    """Position from 0 to 1, and text of each tick."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel(_Drawn):
    """A line for each trial across its parameters, which are at places from 0 to 1."""

    kind: str = "parallel"
    axes: tuple[ParallelAxis, ...]
    places: tuple[tuple[float | None, ...], ...]
    values: tuple[float | None, ...]
    """Value of each trial, on the last axis."""
    names: tuple[str, ...]
    greater_is_better: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Table(Record):
    """Rows of texts and numbers."""

    kind: str = "table"
    title: str = ""
    note: str = ""
    columns: tuple[str, ...]
    rows: tuple[tuple[Scalar, ...], ...]
    strong: tuple[int, ...] = ()
    """Rows to emphasise."""
    folded: bool = False
    """True for a table that is collapsed at first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts(Record):
    """A list of names with a value each."""

    kind: str = "facts"
    title: str = ""
    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark(Record):
    """A sentence of a report."""

    kind: str = "remark"
    text: str
    tone: Literal["plain", "warning"] = "plain"


Figure = Lines | Intervals | Stack | Matrix | Parallel
Block = Figure | Table | Facts | Remark


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline(Record):
    """A figure at the head of a chapter."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section(Record):
    """A part of the page."""

    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter(Record):
    """Everything about a run, a study, or several runs side by side."""

    id: str
    title: str
    subtitle: str
    status: str
    headlines: tuple[Headline, ...]
    sections: tuple[Section, ...]


MISSING = "–"
URGENT = ("oom", "failed", "skipped")
"""Kinds of events that are shown in red."""


def duration(seconds: float) -> str:
    """A time in words: 90 ms, 4.2 s, 7 min 5 s, 3 h 20 min, 2 d 4 h."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    for size, name, step, rest in units:
        whole = round(seconds / step) * step  # rounded first, so that no "60 min" is left over
        if whole >= size:
            return f"{whole // size:,} {name} {whole % size // step} {rest}"
    raise AssertionError(seconds)


def shown(value: float | None, form: Form) -> str:
    """A number of a plot, with its unit."""
    if value is None or not math.isfinite(value):
        return MISSING
    return _FORMS[form](value)


def cell(value: Scalar) -> str:
    if value is None or isinstance(value, bool):
        return {None: MISSING, True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return plain(value) if isinstance(value, float) else value


def plain(value: float) -> str:
    """A number with four digits, and an exponent only where it is tiny or huge."""
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}" if size < 1e7 else _short(value)
    if size < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-")
    digits = max(0, 3 - math.floor(math.log10(size)))
    return f"{value:.{min(digits, 4)}f}"


def tick(value: float, form: Form) -> str:
    """A number beside an axis, as short as possible."""
    if form == "percent":
        return f"{value * 100:.4g}%"
    if form == "duration":
        return duration(value) if value else "0"
    suffix = {"gib": "", "celsius": "°", "watts": " W"}.get(form, "")
    if value == 0:
        return f"0{suffix}"
    if abs(value) >= 10_000:
        return _short(value) + suffix
    if abs(value) < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-") + suffix
    return f"{value:,.6g}" + suffix


def _short(value: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{name}"
    return f"{value:.4g}"


_FORMS: Mapping[Form, Callable[[float], str]] = {
    "number": plain,
    "percent": lambda value: f"{value:.1%}",
    "count": lambda value: f"{value:,.0f}",
    "gib": lambda value: f"{value:.2f} GiB" if value >= 0.1 else f"{value * 1024:.1f} MiB",
    "duration": duration,
    "celsius": lambda value: f"{value:.0f} °C",
    "watts": lambda value: f"{value:.0f} W",
}
