"""Classes of labels: a stable order of names, how many of each, and weights against imbalance."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from trainfit.errors import BadInput

IntArray = NDArray[np.int64]
_WORD = re.compile(r"[\w.+:/-]{1,40}")
_LONGEST, _MOST_WORDS = 100, 12
"""Characters and words of a class name; more are a text in the wrong column."""
_FEW = 20
"""Classes that may be of one row each."""


def class_order(names: Iterable[str]) -> list[str]:
    """The names in an order that does not depend on the data's: as numbers where all are."""
    distinct = sorted(set(names))
    if all(name.removeprefix("-").isdecimal() for name in distinct):
        return sorted(distinct, key=int)
    return distinct


def shown(name: str) -> str:
    """A label for an error: itself where it can only be a name, never where it may be a text."""
    return name if _WORD.fullmatch(name) else "(a label of several words)"


def check_classes(names: Iterable[str], rows: int, place: str) -> None:
    """Refuse labels that look like texts, without showing one: class names are written down.

    Single words may be as many as rows in a small file; any others, at most half as many.
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
    """How many items each class has."""
    counted: list[int] = np.bincount(labels, minlength=classes).tolist()
    return counted


def balanced_weights(labels: IntArray, names: Sequence[str]) -> list[float]:
    """A weight per class, inverse to its count, so that all classes weigh the same in sum."""
    counted = count_classes(labels, len(names))
    for name, count in zip(names, counted, strict=True):
        if not count:
            raise BadInput(
                f"class {shown(name)} has no training example", "add some, or leave the class out"
            )
    return [len(labels) / (len(names) * count) for count in counted]
