"""Metrics of a classifier or a regression, overall, by criterion or label, and over folds.

A metric that is not defined is None (the AUC of a single class), never a zero that would be
averaged. Precision, recall and F1 without a true positive are 0, since model selection needs them.

Tags of words with B- and I- mark spans, in any of the usual schemes (IOB1, IOB2, IOBES, BILOU). A
span is found if its type and both ends are right. As by seqeval's default, it may begin with I-.
Other tags are counted themselves.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

    def scalars(self) -> dict[str, float]:
        """Return the metrics that are not None, by name."""
        names = ("accuracy", "precision", "recall", "f1", "macro_f1", "auc")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


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
    hits, said, there = (table.sum(0) for table in (true & given, given, true))
    seen = said + there > 0
    areas = [rank_auc(labels[:, k], scores[:, k]) for k in range(labels.shape[1])]
    known = [area for area in areas if area is not None]
    precision, recall, f1 = map(float, _shares(hits.sum(), said.sum(), there.sum()))
    return Metrics(
        count=len(labels),
        accuracy=float((true == given).all(1).mean()),
        precision=precision,
        recall=recall,
        f1=f1,
        macro_f1=float(_shares(hits, said, there)[2][seen].mean()) if seen.any() else 0.0,
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
    return {
        name: binary_metrics(labels[:, k].astype(np.int64), scores[:, k], thresholds[k])
        for k, name in enumerate(names)
    }


def by_group(
    labels: IntArray, scores: Floats, groups: IntArray, names: Sequence[str]
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


def _metrics(labels: IntArray, predicted: IntArray, auc: float | None, classes: int) -> Metrics:
    _check_some(labels)
    table = np.array(class_table(labels, predicted, classes))
    hits, said, there = np.diag(table), table.sum(0), table.sum(1)
    means = dict(zip(("precision", "recall", "f1"), _shares(hits, said, there), strict=True))
    # A class that is neither present nor predicted has no F1 to average.
    seen = said + there > 0
    return Metrics(
        count=int(labels.size),
        accuracy=float(hits.sum() / labels.size),
        **{name: float(v[1] if classes == 2 else v[seen].mean()) for name, v in means.items()},
        macro_f1=float(means["f1"][seen].mean()),
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


def _shares(hits: Any, said: Any, there: Any) -> list[NDArray[np.float64]]:
    """Return precision, recall and F1 from counts of correct, predicted and true items."""
    return [ratio(hits, said), ratio(hits, there), ratio(2 * hits, said + there)]


def ratio(part: Any, whole: Any) -> NDArray[np.float64]:
    """Divide; 0 by 0 is 0."""
    return np.where(whole > 0, part / np.maximum(whole, 1), 0.0)


# ── bootstrap ─────────────────────────────────────────────────────────────────────────────────────


DRAWS = 1000
_GROUPS = 2000
"""Random groups in which very many posts or sentences are drawn; their spread is the same."""


def resampled(units: int) -> tuple[IntArray, IntArray]:
    """Return the group of each unit, and how often each draw has each group."""
    random = np.random.default_rng(0)
    group, groups = random.permutation(units) % _GROUPS, min(units, _GROUPS)
    return group, random.multinomial(groups, np.full(groups, 1 / groups), size=DRAWS)


def ends_of(drawn: Floats) -> tuple[float, float]:
    """Return the ends of the 95% interval of drawn values."""
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


# ── tags of words ─────────────────────────────────────────────────────────────────────────────────


_SPELLINGS = {"L": "E", "U": "S", "M": "I"}
"""Letters of BILOU and BMES, as those of IOBES."""


class _Counted(NamedTuple):
    """Sentence and kind `[n, 2]` of correct, predicted and true spans."""

    hits: IntArray
    said: IntArray
    there: IntArray
    kinds: list[str]
    """Types of spans, or the tags."""

    def by_kind(self) -> list[IntArray]:
        """Count hits, predictions and true spans of each kind."""
        every = (self.hits, self.said, self.there)
        return [np.bincount(part[:, 1], minlength=len(self.kinds)) for part in every]


def has_spans(names: Sequence[str]) -> bool:
    """Tell tags of spans from others, such as parts of speech."""
    return any(name.startswith(("B-", "I-")) for name in names)


def tag_metrics(truth: IntArray, predicted: IntArray, names: Sequence[str]) -> Metrics:
    """Metrics of the words' predicted tags; `truth` has the sentence and the tag of each.

    Precision, recall and F1 are those of all spans (micro), or the mean over the tags.
    """
    tags = truth[:, 1]
    hits, said, there = _count(truth, predicted, names).by_kind()
    seen = said + there > 0
    each = _shares(hits, said, there)
    macro = found = [float(one[seen].mean()) if seen.any() else 0.0 for one in each]
    if has_spans(names):
        found = list(map(float, _shares(hits.sum(), said.sum(), there.sum())))
    return Metrics(
        count=len(tags),
        accuracy=float((tags == predicted).mean()),
        precision=found[0],
        recall=found[1],
        f1=found[2],
        macro_f1=macro[2],
        auc=None,
        confusion=() if has_spans(names) else class_table(tags, predicted, len(names)),
    )


def by_kind(truth: IntArray, predicted: IntArray, names: Sequence[str]) -> dict[str, Metrics]:
    """Metrics of each type of span, or of each tag, as counts of right, wrong and missed ones."""
    counted = _count(truth, predicted, names)
    scored = {}
    for kind, *counts in zip(counted.kinds, *counted.by_kind(), strict=True):
        hits, said, there = map(int, counts)
        if not said + there:
            continue
        precision, recall, f1 = map(float, _shares(hits, said, there))
        scored[kind] = Metrics(
            count=there,
            accuracy=float(ratio(hits, said + there - hits)),
            precision=precision,
            recall=recall,
            f1=f1,
            macro_f1=f1,
            auc=None,
            confusion=((0, said - hits), (there - hits, hits)),
        )
    return scored


def tag_intervals(
    truth: IntArray, predicted: IntArray, names: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """95% bootstrap intervals over sentences of the F1 and of the words' accuracy."""
    counted = _count(truth, predicted, names)
    group, draws = resampled(int(truth[:, 0].max()) + 1)
    groups, kinds = draws.shape[1], len(counted.kinds)

    def drawn(part: IntArray) -> NDArray[np.int64]:
        places = group[part[:, 0]] * kinds + part[:, 1]
        table = np.bincount(places, minlength=groups * kinds).reshape(groups, kinds)
        found: NDArray[np.int64] = draws @ table
        return found.sum(1, keepdims=True) if has_spans(names) else found

    hits, both = drawn(counted.hits), drawn(counted.said) + drawn(counted.there)
    seen = np.maximum((both > 0).sum(1), 1)
    right = (truth[:, 1] == predicted).astype(np.float64)
    words = [np.bincount(group[truth[:, 0]], each, groups) for each in (right, np.ones_like(right))]
    return {
        "f1": ends_of(ratio(2 * hits, both).sum(1) / seen),
        "accuracy": ends_of((draws @ words[0]) / np.maximum(draws @ words[1], 1)),
    }


def _count(truth: IntArray, predicted: IntArray, names: Sequence[str]) -> _Counted:
    sentence, tags = truth.T
    if not has_spans(names):
        said = np.stack([sentence, predicted], 1)
        return _Counted(truth[tags == predicted], said, truth, list(names))
    there, said = (find_spans(sentence, each, names) for each in (tags, predicted))
    rows, times = np.unique(np.concatenate([there, said]), axis=0, return_counts=True)
    hits = rows[times == 2]
    return _Counted(hits[:, :2], said[:, :2], there[:, :2], list(dict.fromkeys(_types(names))))


def _types(names: Sequence[str]) -> list[str]:
    """Type of span of each tag; _ for none."""
    return [name[1:].split("-", 1)[-1] or "_" for name in names]


def find_spans(sentence: IntArray, tags: IntArray, names: Sequence[str]) -> IntArray:
    """Find the spans `[spans, 4]`: sentence, type, first word and the word after the last.

    Types are numbered in the order of the tags' names. An O is put after each sentence, so that
    words are counted with one more per sentence before them.
    """
    number = {kind: place for place, kind in enumerate(dict.fromkeys(_types(names)))}
    types = np.array([number[kind] for kind in _types(names)])
    nothing = number.get("_", -1)
    letters = np.array([ord(_SPELLINGS.get(name[0], name[0])) for name in names])
    ends = np.append(np.flatnonzero(np.diff(sentence)) + 1, sentence.size)
    owner = np.insert(sentence, ends, sentence[ends - 1])
    now, kind = np.insert(letters[tags], ends, ord("O")), np.insert(types[tags], ends, nothing)
    before, kind_before = np.append(ord("O"), now[:-1]), np.append(nothing, kind[:-1])

    def among(values: IntArray, chosen: str) -> NDArray[np.bool_]:
        return np.isin(values, [ord(letter) for letter in chosen])

    changes = kind != kind_before
    begins = among(now, "BS") | (among(before, "ESO") & among(now, "EI"))
    begins |= ~among(now, "O.") & changes
    closes = among(before, "ES") | (among(before, "BI") & among(now, "BSO"))
    closes |= ~among(before, "O.") & changes
    starts, stops = np.flatnonzero(begins), np.flatnonzero(closes)
    first = starts[np.searchsorted(starts, stops) - 1]
    found = np.stack([owner[stops - 1], kind[stops - 1], first, stops], 1)
    return np.unique(found, axis=0)
