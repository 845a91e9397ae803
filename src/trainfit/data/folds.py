"""Splits and folds by group: a held-out test first, then train and validation, none overlapping.

Items of one group (the nine pairs of a post) go to one side. Splitting by pair would show the model
in training the posts that it is judged by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from trainfit.core.errors import BadInput

IntArray = NDArray[np.int64]


class Shares(TypedDict, total=False):
    """Shares of the data that are held out, and the seed that draws them."""

    folds: int | None
    test_share: float
    validation_share: float
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """Indices of the training data and of the validation data, which decides the best model."""

    train: IntArray
    validation: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Folds:
    """A held-out test set, and one or more folds of the rest."""

    test: IntArray
    folds: tuple[Fold, ...]


def split(
    strata: IntArray,
    groups: IntArray | None = None,
    *,
    folds: int | None = None,
    test_share: float = 0.2,
    validation_share: float = 0.2,
    seed: int = 0,
) -> Folds:
    """Hold out a test set, then make `folds` folds of the rest, or one with `validation_share`.

    `strata` are spread evenly and `groups` stay whole; without groups every item is a group. A
    share is rounded to one part in a whole number (0.2: one in five).
    """
    rest, test = hold_out(np.arange(len(strata)), strata, groups, test_share, seed)
    made = make_folds(rest, strata, groups, folds=folds, share=validation_share, seed=seed + 1)
    result = Folds(test=test, folds=made)
    check_folds(result, groups)
    return result


def hold_out(
    items: IntArray, strata: IntArray, groups: IntArray | None, share: float, seed: int
) -> tuple[IntArray, IntArray]:
    """Split off a share of the items; returns the rest and the share."""
    return _parts(items, strata, groups, _one_in(share), seed)[0]


def keep_rare(
    rest: IntArray, held: IntArray, strata: IntArray, groups: IntArray | None
) -> tuple[IntArray, IntArray]:
    """Move items of a stratum that `rest` has none of back to it, with their whole groups."""
    moved = np.isin(strata[held], strata[rest], invert=True)
    if groups is not None:
        moved = np.isin(groups[held], groups[held[moved]])
    if moved.all():
        return rest, held
    return np.sort(np.concatenate([rest, held[moved]])), held[~moved]


def make_folds(
    items: IntArray,
    strata: IntArray,
    groups: IntArray | None,
    *,
    folds: int | None,
    share: float,
    seed: int,
) -> tuple[Fold, ...]:
    """Make `folds` folds of the items; for None a single one that validates on a share of them."""
    parts = _parts(items, strata, groups, _one_in(share) if folds is None else folds, seed)
    made = tuple(Fold(train=train, validation=held) for train, held in parts)
    return made[:1] if folds is None else made


def check_folds(folds: Folds, groups: IntArray | None = None) -> None:
    """Raise BadInput where a group is on two sides of a fold, or validates in two folds."""

    def of(items: IntArray) -> IntArray:
        return items if groups is None else groups[items]

    for number, fold in enumerate(folds.folds, 1):
        sides = {"train": fold.train, "validation": fold.validation, "test": folds.test}
        check_apart({f"{name} of fold {number}": of(items) for name, items in sides.items()})
    check_apart(
        {f"validation of fold {n}": of(fold.validation) for n, fold in enumerate(folds.folds, 1)}
    )


def check_apart(sides: dict[str, IntArray]) -> None:
    """Raise BadInput if two parts share a group, whose items could be memorised."""
    seen = [(name, np.unique(groups)) for name, groups in sides.items()]
    for place, (name, groups) in enumerate(seen):
        for other, others in seen[:place]:
            common = np.intersect1d(groups, others, assume_unique=True)
            if common.size:
                what = f"{common.size} groups are in both {other} and {name}"
                raise BadInput(what, "keep each group, such as a post or an author, on one side")


def _parts(
    items: IntArray, strata: IntArray, groups: IntArray | None, count: int, seed: int
) -> list[tuple[IntArray, IntArray]]:
    """Split the items into `count` parts; for each, return the other items and its own."""
    own = None if groups is None else groups[items]
    there = items.size if own is None else np.unique(own).size
    if count > there:
        what = f"{there} {'rows' if own is None else 'groups'} cannot be split into {count} parts"
        raise BadInput(what, "give more data, fewer cv.folds, or files for validation and test")
    labels = strata[items]
    if np.unique(labels, return_counts=True)[1].max() < count:  # none has a member for each part
        labels = np.zeros_like(labels)
    random = np.random.RandomState(seed % 2**32)
    if own is None:
        part_of = _deal(labels, count, random)
    else:
        part_of = _deal_groups(labels, np.unique(own, return_inverse=True)[1], count, random)
    pairs = [(items[part_of != part], items[part_of == part]) for part in range(count)]
    for number, sides in enumerate(pairs, 1):
        if not all(side.size for side in sides):
            fix = "use fewer folds or more data"
            raise BadInput(f"part {number} of {count} would be empty with {there} groups", fix)
    return pairs


def _deal(strata: IntArray, count: int, random: np.random.RandomState) -> IntArray:
    """Part of each item, with every stratum spread evenly: scikit-learn's StratifiedKFold."""
    _, first, inverse = np.unique(strata, return_index=True, return_inverse=True)
    ranked = np.argsort(np.argsort(first))[inverse]  # strata by their first appearance
    ordered = np.sort(ranked)
    sizes = [np.bincount(ordered[part::count], minlength=first.size) for part in range(count)]
    dealt = np.empty(strata.size, dtype=np.int64)
    for stratum, of_part in enumerate(np.stack(sizes, axis=1)):
        parts = np.arange(count).repeat(of_part)
        random.shuffle(parts)
        dealt[ranked == stratum] = parts
    return dealt


def _deal_groups(
    strata: IntArray, groups: IntArray, count: int, random: np.random.RandomState
) -> IntArray:
    """Part of each item, with whole groups: scikit-learn's StratifiedGroupKFold.

    The most uneven groups come first; each goes where the strata are then spread most evenly, and
    to the smallest of equal parts.
    """
    _, inverse, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    counts = np.zeros((int(groups.max()) + 1, sizes.size))
    np.add.at(counts, (groups, inverse), 1)
    order = np.arange(len(counts))
    random.shuffle(order)
    order = order[np.argsort(-counts[order].std(axis=1), kind="stable")]
    held = np.zeros((count, sizes.size))
    one_more = np.eye(count)[:, :, None]
    part_of = np.empty(len(counts), dtype=np.int64)
    for group in order:
        tried = (held + one_more * counts[group]) / sizes
        unevenness, full = tried.std(axis=1).mean(axis=1).tolist(), held.sum(axis=1).tolist()
        best = 0
        for part in range(1, count):
            now, least = unevenness[part], unevenness[best]
            alike = abs(now - least) <= 1e-8 + 1e-5 * least
            if now < least or (alike and full[part] < full[best]):
                best = part
        held[best] += counts[group]
        part_of[group] = best
    return part_of[groups]


def _one_in(share: float) -> int:
    if not 0 < share <= 0.5:
        fix = "set data.test_share and data.validation_share over 0 and up to 0.5"
        raise BadInput(f"a share of {share} to hold out", fix)
    return round(1 / share)
