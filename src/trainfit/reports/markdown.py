"""A report as Markdown: tables, and for each plot its extremes and a sparkline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainfit.reports.model import (
    Block,
    Chapter,
    Intervals,
    Lines,
    Matrix,
    Parallel,
    Remark,
    Stack,
    Table,
    cell,
    shown,
)

if TYPE_CHECKING:
    from trainfit.reports.run_report import Report

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPECIAL = "\\`*_{}[]<>|#"


def markdown(report: Report) -> str:
    """The whole page."""
    parts = [part for chapter in report.chapters for part in _chapter(chapter)]
    parts.append(f"Made by trainfit {report.version} on {report.made}.")
    return "\n\n".join(parts) + "\n"


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
