"""predictions.csv read back: ROC, precision–recall, and intervals by resampling.

The file holds labels and probabilities, and names of posts that are used to draw whole posts: what
the same post says of nine criteria is not nine independent answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainfit.core.errors import MALFORMED
from trainfit.core.files import open_regular
from trainfit.runs.reader import Floats

Ints = NDArray[np.int64]
Curve = tuple[Floats, Floats]

_DRAWS = 1000
_GROUPS = 2000
_POINTS = 400
"""Of a curve, which a plot cannot show more of."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """What was held out: by item its fold, post, criterion, label and probability per class."""

    folds: Ints
    posts: Ints
    criteria: tuple[str, ...]
    """The names; empty where the task has none."""
    criterion_of: Ints
    labels: Ints
    chances: Floats

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return int(self.chances.shape[1])

    @property
    def predicted(self) -> Ints:
        """The likeliest class."""
        return np.asarray(self.chances.argmax(1), dtype=np.int64)

    def part(self, chosen: NDArray[np.bool_]) -> Predictions:
        """Those items alone."""
        return Predictions(
            self.folds[chosen],
            self.posts[chosen],
            self.criteria,
            self.criterion_of[chosen],
            self.labels[chosen],
            self.chances[chosen],
        )

    def by_fold(self) -> Iterator[tuple[int, Predictions]]:
        """Each fold's own."""
        for number in np.unique(self.folds):
            yield int(number), self.part(self.folds == number)

    def by_criterion(self) -> Iterator[tuple[str, Predictions]]:
        """Each criterion's own."""
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
        scores = np.stack([table[name].to_numpy() for name in columns], 1).astype(np.float64)
        posts = np.unique(np.array(table["id"].to_pylist(), dtype=str), return_inverse=True)[1]
        words = table["criterion"].to_pylist() if "criterion" in names else []
        codes = tuple(dict.fromkeys(words))
        place = {code: number for number, code in enumerate(codes)}
        found = [place[word] for word in words] or [0] * len(posts)
        if columns == ["score"]:
            scores = np.hstack([1 - scores, scores])
        labels = table["label"].to_numpy().astype(np.int64)
        if not (scores.size and np.isfinite(scores).all() and _within(labels, scores.shape[1])):
            return None
        return Predictions(
            table["fold"].to_numpy().astype(np.int64),
            posts.astype(np.int64),
            codes,
            np.array(found, dtype=np.int64),
            labels,
            scores,
        )
    except (OSError, ArrowException, *MALFORMED):
        return None


def _within(labels: Ints, classes: int) -> bool:
    return bool(((labels >= 0) & (labels < classes)).all())


def roc_curve(positive: NDArray[np.bool_], scores: Floats) -> Curve | None:
    """False against true positive rate over all thresholds; None without one of the classes."""
    hits, misses = _cumulative(positive, scores)
    if not hits[-1] or not misses[-1]:
        return None
    x, y = misses / misses[-1], hits / hits[-1]
    return _fewer(np.append(0.0, x), np.append(0.0, y))


def pr_curve(positive: NDArray[np.bool_], scores: Floats) -> Curve | None:
    """Recall against precision over all thresholds; None without a positive."""
    hits, misses = _cumulative(positive, scores)
    if not hits[-1]:
        return None
    recall, precision = hits / hits[-1], hits / (hits + misses)
    return _fewer(np.append(0.0, recall), np.append(precision[0], precision))


def average_precision(positive: NDArray[np.bool_], scores: Floats) -> float | None:
    """The precision at each threshold, weighted by the recall that it adds."""
    hits, misses = _cumulative(positive, scores)
    if not hits[-1]:
        return None
    gained = np.diff(np.append(0.0, hits)) / hits[-1]
    return float((gained * hits / (hits + misses)).sum())


def _cumulative(positive: NDArray[np.bool_], scores: Floats) -> Curve:
    """True and false positives from the highest score down, one entry per distinct score."""
    order = np.argsort(-scores, kind="stable")
    ranked = positive[order].astype(np.float64)
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    return np.cumsum(ranked)[last], np.cumsum(1 - ranked)[last]


def _fewer(x: Floats, y: Floats) -> Curve:
    """Evenly along the curve, both ends kept."""
    if len(x) <= _POINTS:
        return x, y
    way = np.append(0.0, np.cumsum(np.hypot(np.diff(x), np.diff(y))))
    chosen = np.unique(np.searchsorted(way, np.linspace(0, way[-1], _POINTS)))
    chosen = np.unique(np.append(chosen, [0, len(x) - 1]))
    return x[chosen], y[chosen]


def f1_interval(found: Predictions, seed: int = 0) -> tuple[float, float, float]:
    """F1 with its 95% interval over draws of posts: of class 1, or the mean over classes."""
    generator = np.random.default_rng(seed)
    posts = np.unique(found.posts, return_inverse=True)[1]
    # Posts by the hundred thousand are drawn in random groups, which spread as they do.
    posts = generator.permutation(int(posts.max()) + 1)[posts] % _GROUPS
    count = int(posts.max()) + 1
    drawn = generator.multinomial(count, np.full(count, 1 / count), size=_DRAWS)
    weights = np.vstack([np.ones(count, dtype=drawn.dtype), drawn])
    if found.classes == 2:
        values = np.nan_to_num(_f1(found, 1, posts, weights))
    else:
        each = np.array([_f1(found, k, posts, weights) for k in range(found.classes)])
        there = np.isfinite(each)  # a class that is neither there nor predicted has no F1
        values = np.where(there, each, 0.0).sum(0) / np.maximum(there.sum(0), 1)
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return float(values[0]), float(low), float(high)


def _f1(found: Predictions, label: int, posts: Ints, weights: Ints) -> Floats:
    """The F1 of a class for each weighting of the posts."""
    true, said = found.labels == label, found.predicted == label
    hits = weights @ np.bincount(posts, true & said, minlength=weights.shape[1])
    both = weights @ np.bincount(posts, true.astype(int) + said, minlength=weights.shape[1])
    return np.where(both > 0, 2 * hits / np.maximum(both, 1), np.nan)
