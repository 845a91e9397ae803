"""Plain data as tables: HTML for notebooks, aligned text for terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_MOST = 8
"""Items of a list that are shown: a data set may have thousands of lengths."""
_WIDTH = 100
"""Longest line of a table in a terminal."""
_NESTED = (Mapping, list, tuple)
_LEFT = ' style="text-align:left"'


def html_table(data: Any) -> str:
    """Format a mapping as two columns, a list of mappings as rows; everything is escaped."""
    if isinstance(data, Mapping):
        rows = "".join(
            f"<tr><th{_LEFT}>{_name(key)}</th><td{_LEFT}>{html_table(value)}</td></tr>"
            for key, value in data.items()
        )
        return f"<table>{rows}</table>"
    if isinstance(data, Sequence) and not isinstance(data, str):
        if data and all(isinstance(item, Mapping) for item in data):
            return _rows(data)
        shown = ", ".join(map(html_table, data[:_MOST]))
        return shown if len(data) <= _MOST else f"{shown}, … ({len(data):,} in all)"
    return escape(_scalar(data))


def _rows(items: Sequence[Mapping[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for item in items for key in item))
    heads = "".join(f"<th{_LEFT}>{_name(key)}</th>" for key in keys)
    rows = "".join(
        f"<tr>{''.join(f'<td{_LEFT}>{html_table(item.get(key))}</td>' for key in keys)}</tr>"
        for item in items
    )
    return f"<table><tr>{heads}</tr>{rows}</table>"


def _name(key: str) -> str:
    return escape(key.replace("_", " "))


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def text_facts(title: str, facts: Mapping[str, Any]) -> str:
    """Format a title with the numbers and words below it; lists and nested facts are left out."""
    rows = [(name, _scalar(v)) for name, v in facts.items() if not isinstance(v, _NESTED)]
    return f"{title}\n{text_table(rows)}".rstrip()


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns, each line cut at the width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in lines)
