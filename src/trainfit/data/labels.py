"""Labels of a file: their kind, told by the values, and names that no text is taken for.

A text has a class, several labels or a number, or each of its words has a tag.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
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
_NUMBER = re.compile(r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
"""A number without zeros before it: 007 is a code."""
_GROUPED = r"[1-9]\d{0,2}(?:(?:,\d{3})+(?:\.\d+)?|(?:[.'’\s]\d{3})+(?:,\d+)?)"
_WRITTEN = re.compile(
    rf"[-+]?(?:{_GROUPED}|\d+,\d+)|(?=.*[%$€£])[-+$€£\s]*(?:{_GROUPED}|\d+(?:[.,]\d+)?)[\s%$€£]*"
)
"""A number with thousands separators, as 1,050.5 or 1.050,5, or with a sign of its unit."""
_CERTAIN = re.compile(r"[%$€£]|[,.'’\s]0\d\d(?!\d)")
"""Part of such a number that tells it from labels joined by commas: none of those is 050."""
_MAJORITY = 0.6
"""Share of the rows with a separator from which on they are lists of labels."""
_FEW_CODES = 20
"""Number of different whole numbers that are classes."""
_MOST_CODES, _ROWS_PER_CODE = 200, 5
"""More whole numbers are classes too where they count 0, 1, 2 … and have some rows each."""
_BINS = 10
"""Ranges of numbers that a split spreads evenly."""
_MISSING = frozenset({"nan", "<na>", "null", "#n/a"})
"""Words, in lower case, that programs write where a label is missing; never names of classes."""
STAND_INS = ("-", "-1")
"""Labels of rows without one, as SNLI and `datasets` write them, unless they are classes."""
_RARE = 0.05
"""Share of the rows that such numbers have, at most."""
_TRUTH = {"true", "false"}
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
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
    whole: bool = False
    """Classes are whole numbers, which may be written as 1.0, or true and false, also as TRUE."""
    by_place: bool = False
    """A list has a 0 or a 1 for each label: the labels are the places of the ones, from 0."""
    unlabelled: str | None = None
    """Label that stands for none."""


def infer_kind(
    values: Iterable[Any], asked: Target | Literal["auto"] = "auto", *, comma: bool = False
) -> LabelKind:
    """Tell the kind of labels by their values, or the separator alone where the target is asked.

    `comma`: the file is of a country whose numbers have a decimal comma.
    """
    known = [value for value in values if not is_missing(value)]
    target = _target(known, comma) if asked == "auto" else asked
    if target != "multi":
        stand_in = _stand_in(known) if target == "single" else None
        known = [value for value in known if _plain(value) != stand_in]
        numbers = [as_number(value) for value in known] if target == "single" else [None]
        whole = all(number is not None and number.is_integer() for number in numbers)
        whole |= target == "single" and {str(one).strip().lower() for one in known} <= _TRUTH
        comma &= target == "regression"
        return LabelKind(target=target, comma=comma, whole=whole, unlabelled=stand_in)
    separator = _separator(known, certain=asked == "multi")
    return LabelKind(target=target, separator=separator, by_place=_are_by_place(known, separator))


def written_number(known: Sequence[Any], comma: bool) -> str | None:
    """Find a number as people write it, such as 1,050 or 12%, where all labels are numbers."""
    texts = [value.strip() for value in known if isinstance(value, str)]
    # In a file with decimal commas 1.050 is such a number, unless all others have a point too.
    odd = [t for t in texts if as_number(t, comma=comma) is None or (comma and "." in t)]
    if len(texts) < len(known) or not all(map(_WRITTEN.fullmatch, odd)):
        return None
    pointed = all("." in one and _NUMBER.fullmatch(one) for one in texts)
    few = len(set(texts)) <= _FEW_CODES and not any(mark in one for one in odd for mark in ",.")
    return None if pointed or few else next(filter(_CERTAIN.search, odd), None)


def is_missing(value: Any) -> bool:
    """Tell a label that is not there, also as programs write it."""
    return value is None or (
        isinstance(value, str) and (not value.strip() or value.strip().lower() in _MISSING)
    )


def _stand_in(known: Sequence[Any]) -> str | None:
    """Find what a label that is not there is written as: - beside words, -1 beside 0, 1, 2 …

    A sentiment may be - beside +, or -1 beside 0 and 1. Rows to come may have a class of -1.
    """
    counts = Counter(map(_plain, known))
    others = counts.keys() - set(STAND_INS)
    if len(others) < 2 or not all(any(map(str.isalnum, name)) for name in others):
        return None
    if others != set(map(str, range(len(others)))):
        return "-"
    return "-1" if len(others) > 2 and 0 < counts["-1"] <= _RARE * len(known) else None


def _plain(value: Any) -> str:
    """Write a label as text; whole numbers without a point."""
    number = as_number(value)
    return str(value if number is None or number % 1 else int(number)).strip()


def _are_by_place(known: Sequence[Any], separator: str | None) -> bool:
    """Tell lists of one length that hold a 0 or a 1 for each label."""
    lists = [
        value if isinstance(value, list) else _pieces(value, separator)
        for value in known
        if isinstance(value, list) or (isinstance(value, str) and _is_list(value))
    ]
    bits = {_bit(one) for row in lists for one in row}
    sizes = set(map(len, lists))
    return len(lists) == len(known) and bits == {0.0, 1.0} and len(sizes) == 1 and sizes != {1}


def _bit(value: Any) -> float | None:
    return float(value) if isinstance(value, bool) else as_number(value)


def _target(known: Sequence[Any], comma: bool) -> Target:
    if any(isinstance(value, list) for value in known):
        # Some tools write a class as a list of one.
        alone = all(isinstance(value, list) and len(value) == 1 for value in known)
        return _target([one for [one] in known], comma) if alone else "multi"
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
    """Split a text into labels; a list as Python, JSON or NumPy writes it into its items."""
    text = text.strip()
    if _is_list(text):
        text = text[1:-1]
        if quoted := _QUOTED.findall(text):
            return [name for single, double in quoted if (name := single or double)]
        words = text.replace(",", " ").split()
        return words if all(map(_NUMBER.fullmatch, words)) else _split(text, ",")
    return _split(text, separator)


def _split(text: str, separator: str | None) -> list[str]:
    parts = text.split(separator) if separator else [text]
    return [part.strip() for part in parts if part.strip()]


def as_number(value: Any, *, comma: bool = False) -> float | None:
    """Read a finite number, also from a text; None for anything else."""
    if isinstance(value, str):
        value = (value.replace(",", ".", 1) if comma else value).strip()
        value = float(value) if _NUMBER.fullmatch(value) else None
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def read_label(value: Any, kind: LabelKind, place: str) -> Label:
    """Read the label of a row, or raise BadInput with its place."""
    if isinstance(value, list) and len(value) == 1 and kind.target != "multi":
        [value] = value
    if kind.target == "single":
        if kind.whole and isinstance(value, str) and (number := as_number(value)) is not None:
            value = int(Decimal(value)) if number.is_integer() else number  # 17 digits are no float
        name = read_name(value, place)
        return name.lower() if kind.whole else name
    if kind.target == "multi":
        parts = value if isinstance(value, list) else [] if is_missing(value) else [value]
        if isinstance(value, str) and parts:
            parts = _pieces(value, kind.separator)
        if kind.by_place:
            parts = [place for place, bit in enumerate(parts) if _bit(bit)]
        return tuple(sorted({read_name(part, place) for part in parts}))
    number = as_number(value, comma=kind.comma)
    if number is None:
        fix = "write one in every row, or set data.target=single for classes"
        raise BadInput(f"{place}: the label is no number", fix)
    return number


def is_marked(value: Any, place: str) -> bool:
    """Read the 0 or 1 of a label with a column of its own; an empty cell is a 0."""
    word = str(value).strip().lower()
    bit = float(word == "true") if word in _TRUTH else 0.0 if is_missing(value) else _bit(value)
    if bit not in (0.0, 1.0):
        fix = "write 0 or 1, or leave the row out"
        raise BadInput(f"{place}: the value is neither 0 nor 1", fix)
    return bit == 1.0


def describe(kind: LabelKind) -> str:
    """Describe the labels for a note."""
    if kind.target == "multi":
        how = f"joined by {kind.separator!r}" if kind.separator else "in lists"
        how = "a 0 or 1 for each, named by their places from 0" if kind.by_place else how
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
    name = str(value).strip() if isinstance(value, str | int) else ""
    if not name:
        what = "more than one name" if isinstance(value, list) else "no name"
        raise BadInput(f"{place}: there is {what}", "use a string or a whole number")
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
    fix = "give examples of another, or name the right column (data.label_column)"
    return BadInput(f"all training rows have the label {shown(name)}", fix)


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
    if 2 * sum(as_number(name) is not None for name in distinct) > len(distinct):
        raise BadInput(f"{what}, most of them numbers", "set data.target=regression for numbers")
    raise BadInput(f"{what}, as a column of texts has", "name the right one (data.label_column)")


def check_labels(
    path: Path, column: str, names: Sequence[str], rows: int, known: Sequence[str] | None = None
) -> None:
    """Raise BadInput for labels that are no class names or, where given, not `known`."""
    if known is None:
        check_classes(names, rows, f"{path}, column {column},")
        return
    unknown = [name for name in names if name not in set(known)]
    if unknown:
        count = "a label" if len(unknown) == 1 else f"{len(unknown)} labels"
        what = f"{path} has {count} that the training data has not ({shown(unknown[0])})"
        raise BadInput(what, f"use {', '.join(map(shown, class_order(known)[:10]))}")


def count_classes(labels: IntArray, classes: int) -> list[int]:
    """Count the items of each class."""
    counted: list[int] = np.bincount(labels, minlength=classes).tolist()
    return counted


def balanced_weights(labels: IntArray, names: Sequence[str]) -> list[float]:
    """Compute class weights that are inverse to the class counts."""
    counted = count_classes(labels, len(names))
    for name, count in zip(names, counted, strict=True):
        if not count:
            fix = "add some (cv.folds needs several), or leave the class out"
            raise BadInput(f"class {shown(name)} has no training example", fix)
    return [len(labels) / (len(names) * count) for count in counted]
