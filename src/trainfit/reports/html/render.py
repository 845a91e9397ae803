"""Render a report as one HTML page: page.html with style, script and figures inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from trainfit.reports.html import geometry
from trainfit.reports.model import Lines, Section, Table, cell

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
    return (
        _environment()
        .get_template("page.html")
        .render(
            report=report,
            style=Markup(_file("style.css")),  # our own files, which hold nothing of a run
            script=Markup(_file("script.js")),
            numbers=_script_data(_plot_data(report)),
        )
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
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


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
