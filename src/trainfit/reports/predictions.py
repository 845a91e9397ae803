"""Predictions of a run as it wrote them, with their curves and intervals.

predictions.csv holds labels and probabilities, and names of posts. Intervals draw whole posts: the
nine criteria of one post are not nine independent answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainfit.core.errors import MALFORMED
from trainfit.core.files import open_regular
from trainfit.jobs.metrics import ends_of, resampled
from trainfit.runs.reader import Floats

Ints = NDArray[np.int64]
Truth = NDArray[np.bool_]
Curve = tuple[Floats, Floats]
POINTS = 400
"""Points of a curve: a plot cannot show more."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Held-out items: fold, post, criterion, label and probability per class of each."""

    folds: Ints
    posts: Ints
    criteria: tuple[str, ...]
    """Names of the criteria; empty where the task has none."""
    criterion_of: Ints
    labels: Ints
    chances: Floats

    @property
    def classes(self) -> int:
        return int(self.chances.shape[1])

    @property
    def predicted(self) -> Ints:
        return np.asarray(self.chances.argmax(1), dtype=np.int64)

    def part(self, chosen: Truth) -> Predictions:
        arrays = ("folds", "posts", "criterion_of", "labels", "chances")
        return replace(self, **{name: getattr(self, name)[chosen] for name in arrays})

    def by_fold(self) -> Iterator[tuple[int, Predictions]]:
        for number in np.unique(self.folds):
            yield int(number), self.part(self.folds == number)

    def by_criterion(self) -> Iterator[tuple[str, Predictions]]:
        for number, name in enumerate(self.criteria):
            chosen = self.criterion_of == number
            if chosen.any():
                yield name, self.part(chosen)


def read_predictions(path: Path) -> Predictions | None:
    """The predictions of a run, or None where there are none that can be read."""
    from pyarrow import ArrowException, csv

    try:
        with open_regular(path) as file:
            table = csv.read_csv(file)
        names = table.column_names
        columns = [name for name in names if name == "score" or name.startswith("score_")]
        scores = np.stack([_numbers(table[name]) for name in columns], 1).astype(np.float64)
        posts = np.unique(np.array(table["id"].to_pylist(), dtype=str), return_inverse=True)[1]
        words = table["criterion"].to_pylist() if "criterion" in names else []
        codes = tuple(dict.fromkeys(words))
        place = {code: number for number, code in enumerate(codes)}
        found = [place[word] for word in words] or [0] * len(posts)
        if columns == ["score"]:
            scores = np.hstack([1 - scores, scores])
        labels = _numbers(table["label"]).astype(np.int64)
        known = ((labels >= 0) & (labels < scores.shape[1])).all()
        if not (scores.size and np.isfinite(scores).all() and known):
            return None
        return Predictions(
            _numbers(table["fold"]).astype(np.int64),
            posts.astype(np.int64),
            codes,
            np.array(found, dtype=np.int64),
            labels,
            scores,
        )
    except (OSError, ArrowException, *MALFORMED):
        return None


def read_predicted_numbers(path: Path) -> Floats | None:
    """Labels and predictions of a regression `[items, 2]`, or None where none can be read."""
    from pyarrow import ArrowException, csv

    try:
        with open_regular(path) as file:
            table = csv.read_csv(file)
        pairs = np.stack([_numbers(table[name]) for name in ("label", "prediction")], 1)
        found = pairs.astype(np.float64)
    except (OSError, ArrowException, *MALFORMED):
        return None
    found = found[np.isfinite(found).all(1)]
    return found if len(found) else None


def _numbers(column: Any) -> NDArray[Any]:
    """Numbers of a column of pyarrow, which has no missing ones; `to_numpy` imports pandas."""
    return np.concatenate([np.from_dlpack(chunk) for chunk in column.chunks])


def roc_curve(positive: Truth, scores: Floats) -> Curve | None:
    """False against true positive rate over all thresholds; None without one of the classes."""
    from sklearn import metrics

    if positive.all() or not positive.any():
        return None
    x, y, _ = metrics.roc_curve(positive, scores, drop_intermediate=False)
    return _fewer(x, y)


def pr_curve(positive: Truth, scores: Floats) -> Curve | None:
    """Recall against precision over all thresholds; None without a positive."""
    from sklearn import metrics

    if not positive.any():
        return None
    precision, recall, _ = metrics.precision_recall_curve(positive, scores)
    precision[-1] = precision[-2]  # scikit-learn begins at precision 1, whatever was predicted
    return _fewer(recall[::-1], precision[::-1])


def average_precision(positive: Truth, scores: Floats) -> float | None:
    """Precision at each threshold, weighted by the recall that it adds; None without a positive."""
    from sklearn import metrics

    return float(metrics.average_precision_score(positive, scores)) if positive.any() else None


def _fewer(x: Floats, y: Floats) -> Curve:
    """At most about POINTS points, evenly along the curve, with both ends."""
    if len(x) <= POINTS:
        return x, y
    way = np.append(0.0, np.cumsum(np.hypot(np.diff(x), np.diff(y))))
    chosen = np.unique(np.searchsorted(way, np.linspace(0, way[-1], POINTS)))
    chosen = np.unique(np.append(chosen, [0, len(x) - 1]))
    return x[chosen], y[chosen]


def f1_interval(found: Predictions) -> tuple[float, float, float]:
    """F1 of class 1, or the mean over classes, with its 95% bootstrap interval over posts."""
    posts = np.unique(found.posts, return_inverse=True)[1]
    group, drawn = resampled(int(posts.max()) + 1)
    posts, weights = group[posts], np.vstack([np.ones_like(drawn[:1]), drawn])
    if found.classes == 2:
        values = np.nan_to_num(_f1(found, 1, posts, weights))
    else:
        each = np.array([_f1(found, k, posts, weights) for k in range(found.classes)])
        there = np.isfinite(each)  # a class that is neither there nor predicted has no F1
        values = np.where(there, each, 0.0).sum(0) / np.maximum(there.sum(0), 1)
    return float(values[0]), *ends_of(values[1:])


def _f1(found: Predictions, label: int, posts: Ints, weights: Ints) -> Floats:
    """F1 of a class for each weighting of the posts."""
    true, said = found.labels == label, found.predicted == label
    hits = weights @ np.bincount(posts, true & said, minlength=weights.shape[1])
    both = weights @ np.bincount(posts, true.astype(int) + said, minlength=weights.shape[1])
    return np.where(both > 0, 2 * hits / np.maximum(both, 1), np.nan)
