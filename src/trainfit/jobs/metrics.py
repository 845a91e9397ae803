"""Metrics of a classifier or a regression, overall, by criterion or label, and over folds.

A metric that is not defined is None (the AUC of a single class), never a zero that would be
averaged. Precision, recall and F1 without a true positive are 0, since model selection needs them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """Share of the items that are right; of several labels, all of an item's."""
    precision: float
    """Precision of the positive class, or the mean over several classes; so for recall and F1.

    Of several labels per item, all labels of all items together (micro)."""
    recall: float
    f1: float
    macro_f1: float
    auc: float | None
    """Area under the ROC curve, the mean of one-vs-rest; None if a class is missing."""
    confusion: tuple[tuple[int, ...], ...]
    """Counts by true class, then by predicted class; none for several labels per item."""

    def scalars(self, prefix: str = "") -> dict[str, float]:
        """Return the metrics that are not None, by name."""
        names = ("accuracy", "precision", "recall", "f1", "macro_f1", "auc")
        values = {name: getattr(self, name) for name in names}
        return {f"{prefix}{name}": value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberMetrics:
    """Metrics of predicted numbers, in the units of the labels."""

    count: int
    mse: float
    rmse: float
    mae: float
    pearson: float | None
    """Correlation; None where all labels or all predictions are the same, as for Spearman's."""
    spearman: float | None

    def scalars(self) -> dict[str, float]:
        """Return the metrics that are not None, by name."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "count"}
        return {name: value for name, value in values.items() if value is not None}


RANGES = {
    **dict.fromkeys(("accuracy", "precision", "recall", "f1", "macro_f1", "auc"), (0.0, 1.0)),
    **dict.fromkeys(("mse", "rmse", "mae"), (0.0, math.inf)),
    **dict.fromkeys(("pearson", "spearman"), (-1.0, 1.0)),
}
"""Lowest and highest possible value of each metric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Mean and spread of a metric over folds."""

    mean: float
    std: float | None
    """Sample standard deviation (n - 1); None for a single fold, as is the interval."""
    low: float | None
    """Lower end of the 95% confidence interval of the mean: Student's, in the metric's range."""
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


def label_metrics(labels: IntArray, scores: Floats, thresholds: Sequence[float]) -> Metrics:
    """Metrics of scores `[items, labels]`, each label given from its threshold on."""
    _check_some(labels)
    given = scores >= np.asarray(thresholds)
    true = labels > 0
    hits, said, there = ((table).sum(0) for table in (true & given, given, true))
    each = ratio(2 * hits, said + there)
    seen = said + there > 0
    areas = [rank_auc(labels[:, k], scores[:, k]) for k in range(labels.shape[1])]
    known = [area for area in areas if area is not None]
    micro = [hits.sum(), said.sum(), there.sum()]
    return Metrics(
        count=len(labels),
        accuracy=float((true == given).all(1).mean()),
        precision=float(ratio(micro[0], micro[1])),
        recall=float(ratio(micro[0], micro[2])),
        f1=float(ratio(2 * micro[0], micro[1] + micro[2])),
        macro_f1=float(each[seen].mean()) if seen.any() else 0.0,
        auc=math.fsum(known) / len(known) if known else None,
        confusion=(),
    )


def best_thresholds(labels: IntArray, scores: Floats) -> tuple[float, ...]:
    """Choose for each label the threshold with the best F1; 0.5 without any example of it."""
    return tuple(_threshold(labels[:, k] > 0, scores[:, k]) for k in range(labels.shape[1]))


def _threshold(true: NDArray[np.bool_], scores: Floats) -> float:
    if not true.any():
        return 0.5
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], np.cumsum(true[order])
    f1 = 2 * hits / (np.arange(1, true.size + 1) + true.sum())
    last = np.append(ranked[1:] < ranked[:-1], True)  # equal scores are given together
    best = int(np.argmax(np.where(last, f1, -1.0)))
    lower = ranked[best + 1] if best + 1 < true.size else 0.0
    return float((ranked[best] + lower) / 2)


def number_metrics(labels: Floats, found: Floats) -> NumberMetrics:
    """Metrics of predicted numbers."""
    from scipy.stats import pearsonr, spearmanr

    _check_some(labels)
    errors = found - labels
    mse = float(np.square(errors).mean())
    return NumberMetrics(
        count=int(labels.size),
        mse=mse,
        rmse=math.sqrt(mse),
        mae=float(np.abs(errors).mean()),
        pearson=_correlation(pearsonr, labels, found),
        spearman=_correlation(spearmanr, labels, found),
    )


def _correlation(compute: Any, labels: Floats, found: Floats) -> float | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers that are all the same: then it is not defined
        value = float(compute(labels, found).statistic) if labels.size > 1 else math.nan
    return value if math.isfinite(value) else None


def by_label(
    labels: IntArray, scores: Floats, names: Sequence[str], thresholds: Sequence[float]
) -> dict[str, Metrics]:
    """Metrics of each of several labels."""
    return {
        name: binary_metrics(labels[:, k].astype(np.int64), scores[:, k], thresholds[k])
        for k, name in enumerate(names)
    }


def by_group(
    labels: IntArray,
    scores: Floats,
    groups: IntArray,
    names: Sequence[str],
) -> dict[str, Metrics]:
    """Metrics of each group, such as a criterion, that has items."""
    return {
        name: binary_metrics(labels[groups == number], scores[groups == number])
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
    return {
        name: spread([fold[name] for fold in folds if name in fold], *RANGES.get(name, ()))
        for name in names
    }


def spread(values: Sequence[float], lowest: float = -math.inf, highest: float = math.inf) -> Spread:
    """Mean of the values with standard deviation and confidence interval.

    A mean cannot leave the range of its values: without that part the interval covers it as often.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Spread(mean=mean, std=None, low=None, high=None)
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    margin = float(stdtrit(count - 1, 0.975)) * std / math.sqrt(count)
    low, high = max(lowest, mean - margin), min(highest, mean + margin)
    return Spread(mean=mean, std=std, low=low, high=high)


def _metrics(labels: IntArray, predicted: IntArray, auc: float | None, classes: int) -> Metrics:
    _check_some(labels)
    table = np.array(class_table(labels, predicted, classes))
    hits = np.diag(table)
    precision = ratio(hits, table.sum(0))
    recall = ratio(hits, table.sum(1))
    f1 = ratio(2 * hits, table.sum(0) + table.sum(1))
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


def class_table(labels: IntArray, predicted: IntArray, classes: int) -> tuple[tuple[int, ...], ...]:
    """Count items by true class, then by predicted class."""
    counts = np.bincount(labels * classes + predicted, minlength=classes**2)
    return tuple(map(tuple, counts.reshape(classes, classes).tolist()))


def _check_some(labels: NDArray[Any]) -> None:
    if not labels.size:
        raise BadInput("metrics of no predictions", "give the part that is evaluated some data")


def ratio(part: Any, whole: Any) -> NDArray[np.float64]:
    """Divide; 0 by 0 is 0."""
    return np.where(whole > 0, part / np.maximum(whole, 1), 0.0)
