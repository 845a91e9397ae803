"""Write a report as one HTML page, with style, script and figures inside, or as Markdown.

In Markdown a plot is its extremes and a sparkline.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from trainfit.core.errors import printable
from trainfit.reports import geometry
from trainfit.reports.model import (
    Block,
    Chapter,
    Intervals,
    Lines,
    Matrix,
    Parallel,
    Remark,
    Section,
    Stack,
    Table,
    cell,
    shown,
)

if TYPE_CHECKING:
    from trainfit.reports.run_report import Report

_VIEWS: Mapping[str, Callable[[Any], Any]] = {
    "lines": geometry.lines_view,
    "intervals": geometry.intervals_view,
    "stack": geometry.stack_view,
    "matrix": geometry.matrix_view,
    "parallel": geometry.parallel_view,
}

_MOST_NAMES = 16
"""Most lines of a plot that get a legend; for more, the tooltip names them."""
_LONGEST = 16
"""Longest number with its unit, in characters."""


def page(report: Report) -> str:
    """Render the report as one HTML text."""
    template = _environment().get_template("page.html")
    return template.render(
        report=report,
        style=Markup(_file("style.css")),  # our own files, which hold nothing of a run
        script=Markup(_file("script.js")),
        numbers=_script_data(_plot_data(report)),
    )


@cache
def _environment() -> Environment:
    made = Environment(
        loader=DictLoader({"page.html": _file("page.html")}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["view"] = lambda figure: _VIEWS[figure.kind](figure)
    made.filters.update(cell=cell, legend=_legend, by_two=_by_two, numeric=_numeric)
    return made


def _file(name: str) -> str:
    return resources.files(__package__).joinpath("html", name).read_text(encoding="utf-8")


def _legend(section: Section) -> list[tuple[str, int]]:
    """Names and colours of the lines of a section, where a plot has several."""
    lines = [block for block in section.blocks if isinstance(block, Lines)]
    plots = [plot for plot in lines if 1 < len(plot.series) <= _MOST_NAMES]
    names = {line.name: line.color for plot in plots for line in plot.series}
    return list(names.items())


def _by_two(section: Section) -> bool:
    """True where plots stand two in a row: the section has exactly one plot of intervals."""
    return sum(block.kind == "intervals" for block in section.blocks) == 1


def _numeric(table: Table) -> list[bool]:
    """True for each column of numbers, which is aligned right."""
    kinds = []
    for at in range(len(table.columns)):
        cells = [cell(row[at]) for row in table.rows]
        kinds.append(any(cells) and all(_looks_like_a_number(text) for text in cells))
    return kinds


def _looks_like_a_number(text: str) -> bool:
    """True for a number with its unit or error, and for the dash of a missing one."""
    return not text or (len(text) <= _LONGEST and text[0] in "0123456789–+-±")


def _plot_data(report: Report) -> dict[str, Any]:
    """Numbers of the tooltips, to five digits."""
    plots = {}
    for chapter in report.chapters:
        for section in chapter.sections:
            for block in section.blocks:
                if isinstance(block, Lines) and (view := geometry.lines_view(block)):
                    plots[f"{chapter.id}-{block.id}"] = {
                        "form": block.form,
                        "x": [view.x.low, view.x.high, block.x_label],
                        "y": [view.y.low, view.y.high, int(view.y.log)],
                        "series": [
                            [line.name, line.color, _short(line.x), _short(line.y)]
                            for line in block.series
                        ],
                        "marks": [[mark.x, mark.event, mark.text] for mark in block.marks],
                    }
    return plots


def _short(values: tuple[float | None, ...]) -> list[float | int | None]:
    return [None if v is None else _whole(float(f"{v:.5g}")) for v in values]


def _whole(value: float) -> float | int:
    return int(value) if value.is_integer() else value


def _script_data(data: Any) -> Markup:
    """JSON for a script element, escaped so that no text can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


_BLOCKS = "▁▂▃▄▅▆▇█"
_SPECIAL = "\\`*_{}[]<>|#"


def markdown(report: Report) -> str:
    """The whole page."""
    parts = [part for chapter in report.chapters for part in _chapter(chapter)]
    parts.append(f"Made by trainfit {report.version} on {report.made}.")
    return printable("\n\n".join(parts)) + "\n"


def spark(values: Sequence[float | None], width: int = 24) -> str:
    """A sparkline: blocks whose height is the last value of each stretch."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    count = min(width, len(values))
    picked = [values[(n + 1) * len(values) // count - 1] for n in range(count)]
    top = len(_BLOCKS) - 1
    scale = top / (high - low) if high > low else 0.0
    return "".join(" " if v is None else _BLOCKS[round((v - low) * scale)] for v in picked)


def _chapter(chapter: Chapter) -> Iterator[str]:
    status = f" ({chapter.status})" if chapter.status else ""
    yield f"# {_plain(chapter.title)}{status}"
    yield _plain(chapter.subtitle)
    if chapter.headlines:
        yield _table(
            ("", "", ""), [(head.label, head.value, head.note) for head in chapter.headlines]
        )
    for section in chapter.sections:
        yield f"## {section.title}"
        plots = [b for b in section.blocks if isinstance(b, Lines) and not b.unit_square]
        if plots:
            yield _plots(plots)
        for block in section.blocks:
            if not isinstance(block, Lines):
                yield from _block(block)


def _plots(plots: Iterable[Lines]) -> str:
    """A table with one row per line of a plot."""
    rows = []
    for plot in plots:
        for series in plot.series:
            known = [value for value in series.y if value is not None]
            ends = (known[0], known[-1], min(known), max(known)) if known else (None,) * 4
            rows.append((plot.title, series.name, *(shown(v, plot.form) for v in ends)))
            rows[-1] = (*rows[-1], spark(series.y))
    return _table(("", "", "first", "last", "least", "greatest", ""), rows)


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Remark):
        yield _plain(block.text)
        return
    if title := block.title:
        yield f"### {_plain(title)}"
    if isinstance(block, Table):
        yield _table(block.columns, block.rows)
    elif isinstance(block, Intervals):
        rows = [
            (r.label, *(shown(v, block.form) for v in (r.value, r.low, r.high)), r.note)
            for r in block.rows
        ]
        yield _table(("", "value", "low", "high", ""), rows)
    elif isinstance(block, Stack):
        yield _table(
            ("", ""), [(part.label, shown(part.value, block.form)) for part in block.parts]
        )
    elif isinstance(block, Matrix):
        counted = zip(block.labels, block.counts, strict=True)
        yield _table(("true", *block.labels), [(name, *row) for name, row in counted])
    elif isinstance(block, Parallel):
        yield f"{len(block.values)} trials over {', '.join(_plain(a.name) for a in block.axes)}."
    elif not isinstance(block, Lines):
        yield _table(("", ""), block.items)
    note = getattr(block, "note", "")
    if note and not isinstance(block, Lines):
        yield _plain(note)


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(map(_plain, columns)) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_plain(cell(value)) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Escaped text on one line."""
    escaped = "".join(f"\\{c}" if c in _SPECIAL else c for c in text)
    return " ".join(escaped.split())
