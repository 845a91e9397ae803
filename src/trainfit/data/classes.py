"""Classes of labels: a stable order of names, how many of each, and weights against imbalance."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from trainfit.errors import BadInput

IntArray = NDArray[np.int64]


def class_order(names: Iterable[str]) -> list[str]:
    """The names in an order that does not depend on the data's: as numbers where all are."""
    distinct = sorted(set(names))
    if all(name.removeprefix("-").isdecimal() for name in distinct):
        return sorted(distinct, key=int)
    return distinct


def shown(name: str) -> str:
    """A label for an error: itself where it can only be a name, never where it may be a text."""
    return name if re.fullmatch(r"[\w.+:/-]{1,40}", name) else "(a label of several words)"


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
