"""Kinds of labels: a class per text, several, a number, or a tag per word; told apart and split."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainfit.core.errors import BadInput
from trainfit.data.folds import IntArray
from trainfit.data.labels import read_name

Target = Literal["single", "multi", "regression", "tags"]
"""One class per text, several labels, a number, or a tag per word."""
Label = str | tuple[str, ...] | float
SEPARATORS = "|;,"
VALUE = "value"
"""Name of the only output of a regression."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_MAJORITY = 0.6
"""Share of the rows with a separator from which on they are lists of labels."""
_FEW = 20
"""Number of different whole numbers that are classes."""
_MOST_CODES, _ROWS_PER_CODE = 200, 5
"""More whole numbers are classes too where they count 0, 1, 2 … and have some rows each."""
_BINS = 10
"""Ranges of numbers that a split spreads evenly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelKind:
    """Meaning of a column of labels."""

    target: Target = "single"
    separator: str | None = None
    """Character between the labels of a text; None: the file has lists, or one label each."""
    comma: bool = False
    """Numbers may have a decimal comma."""


def infer_kind(
    values: Iterable[Any], asked: Target | Literal["auto"] = "auto", *, comma: bool = False
) -> LabelKind:
    """Tell the kind of labels by their values, or the separator alone where the target is asked.

    `comma`: the file is of a country whose numbers have a decimal comma.
    """
    known = [value for value in values if value is not None and value != ""]
    target = _target(known, comma) if asked == "auto" else asked
    if target != "multi":
        return LabelKind(target=target, comma=comma and target == "regression")
    return LabelKind(target=target, separator=_separator(known, certain=asked == "multi"))


def _target(known: Sequence[Any], comma: bool) -> Target:
    if any(isinstance(value, list) for value in known):
        return "multi"
    numbers = [as_number(value, comma=comma) for value in known]
    plain = [number for number in numbers if number is not None]
    if known and len(plain) == len(known):
        return "single" if _are_codes(plain) else "regression"
    return "multi" if _separator(known, certain=False) else "single"


def _are_codes(numbers: Sequence[float]) -> bool:
    """Tell numbers of classes from measurements."""
    if not all(number.is_integer() for number in numbers):
        return False
    there = sorted(set(numbers))
    if len(there) <= _FEW:
        return True
    counts_up = there[0] in (0, 1) and there[-1] - there[0] == len(there) - 1
    enough = len(numbers) >= _ROWS_PER_CODE * len(there)
    return counts_up and enough and len(there) <= _MOST_CODES


def _separator(known: Sequence[Any], *, certain: bool) -> str | None:
    """Find the character that joins labels; where it is `certain` that one does, the commonest."""
    texts = [value for value in known if isinstance(value, str)]
    found = {mark: [text for text in texts if mark in text] for mark in SEPARATORS}
    if certain:
        best = max(SEPARATORS, key=lambda mark: len(found[mark]))
        return best if found[best] else None
    return next((mark for mark, rows in found.items() if _joins(mark, rows, texts)), None)


def _joins(mark: str, rows: Sequence[str], texts: Sequence[str]) -> bool:
    """Tell rows of several labels from names that have the mark in them.

    Most rows have the mark, or some part of a row occurs in another one too. A comma is in many
    names: there it takes both, or every part as a label of its own.
    """
    parts = {row: _pieces(row, mark) for row in set(rows)}
    every = [piece for pieces in parts.values() for piece in pieces]
    alone = {piece for text in set(texts) - set(rows) for piece in _pieces(text, mark)}
    most = bool(rows) and len(rows) >= _MAJORITY * len(texts)
    shared = len(set(every)) < len(every)
    if mark == ",":
        return bool(every) and (set(every) <= alone or (most and shared))
    return most or shared or not alone.isdisjoint(every)


def _pieces(text: str, separator: str | None) -> list[str]:
    """Split a text into labels; a list as Python prints it loses its brackets and quotes."""
    text = text.strip()
    listed = text.startswith("[") and text.endswith("]")
    if listed:
        text = text[1:-1]
    parts = [part.strip() for part in (text.split(separator) if separator else [text])]
    return [name for part in parts if (name := part.strip("'\"") if listed else part)]


def as_number(value: Any, *, comma: bool = False) -> float | None:
    """Read a finite number, also from a text; None for anything else."""
    if isinstance(value, str):
        value = value.replace(",", ".", 1) if comma else value
        value = float(value) if _NUMBER.fullmatch(value.strip()) else None
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def read_label(value: Any, kind: LabelKind, place: str) -> Label:
    """Read the label of a row, or raise BadInput with its place."""
    if kind.target == "single":
        return read_name(value, place)
    if kind.target == "multi":
        parts = value if isinstance(value, list) else [] if value is None else [value]
        if isinstance(value, str):
            parts = _pieces(value, kind.separator)
        return tuple(sorted({read_name(part, place) for part in parts}))
    number = as_number(value, comma=kind.comma)
    if number is None:
        fix = "write one in every row, or set data.target=single for classes"
        raise BadInput(f"{place}: the label is no number", fix)
    return number


def describe(kind: LabelKind) -> str:
    """Describe the labels for a note."""
    if kind.target == "multi":
        how = f"joined by {kind.separator!r}" if kind.separator else "in lists"
        return f"several per text, {how} (data.target=multi)"
    return {
        "tags": "a tag per word",
        "single": "one class per text (data.target=single)",
        "regression": "a number per text (data.target=regression)",
    }[kind.target]


def strata_of(labels: NDArray[Any]) -> IntArray:
    """Group items for a split: by class, by the rarest of several labels, or by range."""
    if labels.ndim == 2:
        counts = np.where(labels > 0, labels.sum(0), np.iinfo(np.int64).max)
        return np.where(labels.any(1), counts.argmin(1) + 1, 0)
    if labels.dtype.kind == "f":
        edges = np.quantile(labels, np.linspace(0, 1, _BINS + 1)[1:-1])
        return np.searchsorted(edges, labels)
    return labels
