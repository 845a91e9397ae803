"""Metrics of a classifier, overall, by criterion and over folds.

A metric that is not defined is None (the AUC of a single class), never a zero that would be
averaged. Precision, recall and F1 without a true positive are 0, since model selection needs them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainfit.core.errors import BadInput

IntArray = NDArray[np.int64]
Floats = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Metrics of one set of predictions."""

    count: int
    accuracy: float
    precision: float
    """Precision of the positive class, or the mean over several classes; so for recall and F1."""
    recall: float
    f1: float
    macro_f1: float
    auc: float | None
    """Area under the ROC curve, the mean of one-vs-rest; None if a class is missing."""
    confusion: tuple[tuple[int, ...], ...]
    """Counts by true class, then by predicted class."""

    def scalars(self, prefix: str = "") -> dict[str, float]:
        """Return the metrics that are not None, by name."""
        names = ("accuracy", "precision", "recall", "f1", "macro_f1", "auc")
        values = {name: getattr(self, name) for name in names}
        return {f"{prefix}{name}": value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Mean and spread of a metric over folds."""

    mean: float
    std: float | None
    """Sample standard deviation (n - 1); None for a single fold, as is the interval."""
    low: float | None
    """Lower end of the 95% confidence interval of the mean, by Student's t."""
    high: float | None


def binary_metrics(labels: IntArray, scores: Floats, threshold: float = 0.5) -> Metrics:
    """Metrics of scores of the positive class, which is predicted from the threshold on."""
    return _metrics(labels, (scores >= threshold).astype(np.int64), rank_auc(labels, scores), 2)


def class_metrics(labels: IntArray, probabilities: Floats) -> Metrics:
    """Metrics of probabilities `[items, classes]`; two classes are binary."""
    classes = probabilities.shape[1]
    predicted = probabilities.argmax(1)
    if classes == 2:
        return _metrics(labels, predicted, rank_auc(labels, probabilities[:, 1]), 2)
    each = [rank_auc((labels == k).astype(np.int64), probabilities[:, k]) for k in range(classes)]
    known = [value for value in each if value is not None]
    auc = math.fsum(known) / classes if len(known) == classes else None
    return _metrics(labels, predicted, auc, classes)


def by_group(
    labels: IntArray,
    scores: Floats,
    groups: IntArray,
    names: Sequence[str],
    threshold: float = 0.5,
) -> dict[str, Metrics]:
    """Metrics of each group, such as a criterion, that has items."""
    return {
        name: binary_metrics(labels[groups == number], scores[groups == number], threshold)
        for number, name in enumerate(names)
        if (groups == number).any()
    }


def rank_auc(labels: IntArray, scores: Floats) -> float | None:
    """Area under the ROC curve by ranks, ties counted half; None without both classes."""
    positives = int((labels == 1).sum())
    negatives = labels.size - positives
    if not positives or not negatives:
        return None
    _, inverse, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[inverse]
    above = float(ranks[labels == 1].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def over_folds(folds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Mean and spread of each metric over the folds that have it."""
    names = dict.fromkeys(name for fold in folds for name in fold)
    return {name: spread([fold[name] for fold in folds if name in fold]) for name in names}


def spread(values: Sequence[float]) -> Spread:
    """Mean of the values with standard deviation and confidence interval."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Spread(mean=mean, std=None, low=None, high=None)
    from scipy.stats import t

    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    margin = float(t.ppf(0.975, count - 1)) * std / math.sqrt(count)
    return Spread(mean=mean, std=std, low=mean - margin, high=mean + margin)


def _metrics(labels: IntArray, predicted: IntArray, auc: float | None, classes: int) -> Metrics:
    if not labels.size:
        raise BadInput("metrics of no predictions", "give the part that is evaluated some data")
    confusion = np.bincount(labels * classes + predicted, minlength=classes**2)
    table = confusion.reshape(classes, classes)
    hits = np.diag(table)
    precision = _ratio(hits, table.sum(0))
    recall = _ratio(hits, table.sum(1))
    f1 = _ratio(2 * hits, table.sum(0) + table.sum(1))
    # A class that is neither present nor predicted has no F1 to average.
    seen = (table.sum(0) + table.sum(1)) > 0
    means = {"precision": precision, "recall": recall, "f1": f1}
    return Metrics(
        count=int(labels.size),
        accuracy=float(hits.sum() / labels.size),
        **{name: float(v[1] if classes == 2 else v[seen].mean()) for name, v in means.items()},
        macro_f1=float(f1[seen].mean()),
        auc=auc,
        confusion=tuple(map(tuple, table.tolist())),
    )


def _ratio(part: IntArray, whole: IntArray) -> NDArray[np.float64]:
    return np.where(whole > 0, part / np.maximum(whole, 1), 0.0)
