"""Labels of a file: their kind, told by the values, and names that no text is taken for.

A text has a class, several labels or a number, or each of its words has a tag.
"""

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

Target = Literal["single", "multi", "regression", "tags"]
"""One class per text, several labels, a number, or a tag per word."""
Label = str | tuple[str, ...] | float
SEPARATORS = "|;,"
VALUE = "value"
"""Name of the only output of a regression."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_MAJORITY = 0.6
"""Share of the rows with a separator from which on they are lists of labels."""
_FEW_CODES = 20
"""Number of different whole numbers that are classes."""
_MOST_CODES, _ROWS_PER_CODE = 200, 5
"""More whole numbers are classes too where they count 0, 1, 2 … and have some rows each."""
_BINS = 10
"""Ranges of numbers that a split spreads evenly."""
_HALVES = re.compile("[\ud800-\udfff]")
_LONGEST_NAME = 200
"""Most characters of a label or group; longer ones are texts in the wrong column."""
_WORD = re.compile(r"[\w.+:/-]{1,40}")
_LONGEST, _MOST_WORDS = 100, 12
"""Most characters and words of a class name; longer ones are texts in the wrong column."""
_FEW = 20
"""Number of classes that may have one row each."""


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
    if len(there) <= _FEW_CODES:
        return True
    counts_up = there[0] in (0, 1) and there[-1] - there[0] == len(there) - 1
    enough = len(numbers) >= _ROWS_PER_CODE * len(there)
    return counts_up and enough and len(there) <= _MOST_CODES


def _separator(known: Sequence[Any], *, certain: bool) -> str | None:
    """Find the character that joins labels; where it is `certain` that one does, the commonest."""
    texts = [value for value in known if isinstance(value, str)]
    if texts and all(map(_is_list, texts)):
        return ","
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


def _is_list(text: str) -> bool:
    """Tell a list as Python or JSON writes it."""
    return text.strip().startswith("[") and text.strip().endswith("]")


def _pieces(text: str, separator: str | None) -> list[str]:
    """Split a text into labels; a list as Python prints it loses its brackets and quotes."""
    text, listed = text.strip(), _is_list(text)
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


# ── names ─────────────────────────────────────────────────────────────────────────────────────


def check_characters(value: str, place: str) -> str:
    """Return the text; raise BadInput for half a surrogate pair, which JSON allows."""
    if _HALVES.search(value):
        fix = "write the whole character, or leave it out"
        raise BadInput(f"{place}: half of a surrogate pair (\\ud800 to \\udfff) stands alone", fix)
    return value


def read_name(value: Any, place: str) -> str:
    """Convert a label or group to a string that is the same for all file formats."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool):
        value = str(value).lower()
    if not isinstance(value, str | int) or not str(value).strip():
        raise BadInput(f"{place}: there is no label", "use a string or a whole number")
    name = str(value).strip()
    if len(name) > _LONGEST_NAME:
        raise BadInput(f"{place}: the label has {len(name):,} characters", "name the right column")
    return check_characters(name, place)


def check_kind(kinds: dict[str, int], value: Any, row: int, place: str) -> None:
    """Raise BadInput for labels of two types in a column: 1 and "one" would become two classes."""
    names = {str: "text", bool: "true or false", list: "a list"}
    kind = names.get(type(value), "a number")
    kinds.setdefault(kind, row)
    if len(kinds) > 1:
        first = next(iter(kinds))
        fix = "use one kind of label"
        raise BadInput(f"{place}: the label is {kind}, but {first} in row {kinds[first]}", fix)


def class_order(names: Iterable[str]) -> list[str]:
    """Sort the class names; as numbers where all are numbers."""
    distinct = sorted(set(names))
    if all(name.removeprefix("-").isdecimal() for name in distinct):
        return sorted(distinct, key=int)
    return distinct


def shown(name: str) -> str:
    """Show a label in an error if it is one word; others may be texts."""
    return name if _WORD.fullmatch(name) else "(a label of several words)"


def one_class(name: str) -> BadInput:
    """Word the refusal of data with nothing to tell apart."""
    return BadInput(f"all training rows have the label {shown(name)}", "give examples of another")


def check_classes(names: Iterable[str], rows: int, place: str) -> None:
    """Raise BadInput for labels that look like texts, since class names are written to files.

    There may be as many single words as rows in a small file; otherwise at most half as many
    labels.
    """
    distinct = set(names)
    several = any(not _WORD.fullmatch(name) for name in distinct)
    if any(len(name) > _LONGEST or len(name.split()) > _MOST_WORDS for name in distinct):
        what = f"{place} has labels of over {_LONGEST} characters or {_MOST_WORDS} words"
    elif len(distinct) > (0 if several else _FEW) and 2 * len(distinct) > rows:
        what = f"{place} has {len(distinct):,} different labels in {rows:,} rows"
    else:
        return
    raise BadInput(f"{what}, as a column of texts has", "name the right one (data.label_column)")


def count_classes(labels: IntArray, classes: int) -> list[int]:
    """Count the items of each class."""
    counted: list[int] = np.bincount(labels, minlength=classes).tolist()
    return counted


def balanced_weights(labels: IntArray, names: Sequence[str]) -> list[float]:
    """Compute class weights that are inverse to the class counts."""
    counted = count_classes(labels, len(names))
    for name, count in zip(names, counted, strict=True):
        if not count:
            fix = "add some, or leave the class out"
            raise BadInput(f"class {shown(name)} has no training example", fix)
    return [len(labels) / (len(names) * count) for count in counted]
