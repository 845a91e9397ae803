"""Plain data as an HTML table, for records that a notebook shows by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_MOST = 8
_LEFT = ' style="text-align:left"'


def html_table(data: Any) -> str:
    """A mapping as two columns, a list of mappings as rows; everything in it is escaped."""
    if isinstance(data, Mapping):
        rows = "".join(
            f"<tr><th{_LEFT}>{_name(key)}</th><td{_LEFT}>{html_table(value)}</td></tr>"
            for key, value in data.items()
        )
        return f"<table>{rows}</table>"
    if isinstance(data, Sequence) and not isinstance(data, str):
        alike = data and all(isinstance(item, Mapping) for item in data)
        return _rows(data) if alike else _list(data)
    return escape(_scalar(data))


def _rows(items: Sequence[Mapping[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for item in items for key in item))
    heads = "".join(f"<th{_LEFT}>{_name(key)}</th>" for key in keys)
    rows = "".join(
        f"<tr>{''.join(f'<td{_LEFT}>{html_table(item.get(key))}</td>' for key in keys)}</tr>"
        for item in items
    )
    return f"<table><tr>{heads}</tr>{rows}</table>"


def _list(items: Sequence[Any]) -> str:
    """The first few, since the lengths of a data set may be thousands."""
    shown = ", ".join(html_table(item) for item in items[:_MOST])
    return shown if len(items) <= _MOST else f"{shown}, … ({len(items):,} in all)"


def _name(key: str) -> str:
    return escape(key.replace("_", " "))


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
