"""Label values of a file: names of classes, checked so that no text is taken for one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from trainfit.core.errors import BadInput
from trainfit.data.folds import IntArray

_HALVES = re.compile("[\ud800-\udfff]")
_LONGEST_NAME = 200
"""Most characters of a label or group; longer ones are texts in the wrong column."""
_WORD = re.compile(r"[\w.+:/-]{1,40}")
_LONGEST, _MOST_WORDS = 100, 12
"""Most characters and words of a class name; longer ones are texts in the wrong column."""
_FEW = 20
"""Number of classes that may have one row each."""


def check_characters(value: str, place: str) -> str:
    """Return the text; raise BadInput for half a surrogate pair, which JSON allows."""
    if _HALVES.search(value):
        raise BadInput(
            f"{place}: half of a surrogate pair (\\ud800 to \\udfff) stands alone",
            "write the whole character, or leave it out",
        )
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
        raise BadInput(
            f"{place}: the label is {kind}, but {first} in row {kinds[first]}",
            "use one kind of label",
        )


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
            raise BadInput(
                f"class {shown(name)} has no training example", "add some, or leave the class out"
            )
    return [len(labels) / (len(names) * count) for count in counted]
