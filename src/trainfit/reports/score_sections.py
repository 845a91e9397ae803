"""Scores on held-out data: folds, criteria, confusion, ROC, precision–recall, F1 intervals.

predictions.csv holds labels and probabilities, and names of posts. Intervals draw whole posts: the
nine criteria of one post are not nine independent answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainfit.core.errors import MALFORMED
from trainfit.core.files import open_regular
from trainfit.reports.model import (
    Block,
    IntervalRow,
    Intervals,
    Lines,
    Matrix,
    Reference,
    Remark,
    Section,
    Series,
    Table,
    cell,
)
from trainfit.runs.reader import Floats, RunFiles

Ints = NDArray[np.int64]
Truth = NDArray[np.bool_]
Curve = tuple[Floats, Floats]

FIGURES = {
    "f1": "F1",
    "precision": "precision",
    "recall": "recall",
    "macro_f1": "macro F1",
    "accuracy": "accuracy",
    "auc": "AUC",
}
"""Scores in the order of the tables, with their titles."""
BASELINES = {"majority_f1": "majority class", "bag_of_words_f1": "TF-IDF regression"}
_BOOTSTRAP = "95% bootstrap intervals over posts; none where no error was seen"
_MOST_CLASSES = 8
_DRAWS = 1000
_GROUPS = 2000
_POINTS = 400
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
        return Predictions(
            self.folds[chosen],
            self.posts[chosen],
            self.criteria,
            self.criterion_of[chosen],
            self.labels[chosen],
            self.chances[chosen],
        )

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
        scores = np.stack([table[name].to_numpy() for name in columns], 1).astype(np.float64)
        posts = np.unique(np.array(table["id"].to_pylist(), dtype=str), return_inverse=True)[1]
        words = table["criterion"].to_pylist() if "criterion" in names else []
        codes = tuple(dict.fromkeys(words))
        place = {code: number for number, code in enumerate(codes)}
        found = [place[word] for word in words] or [0] * len(posts)
        if columns == ["score"]:
            scores = np.hstack([1 - scores, scores])
        labels = table["label"].to_numpy().astype(np.int64)
        known = ((labels >= 0) & (labels < scores.shape[1])).all()
        if not (scores.size and np.isfinite(scores).all() and known):
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
    """At most about _POINTS points, evenly along the curve, with both ends."""
    if len(x) <= _POINTS:
        return x, y
    way = np.append(0.0, np.cumsum(np.hypot(np.diff(x), np.diff(y))))
    chosen = np.unique(np.searchsorted(way, np.linspace(0, way[-1], _POINTS)))
    chosen = np.unique(np.append(chosen, [0, len(x) - 1]))
    return x[chosen], y[chosen]


def f1_interval(found: Predictions, seed: int = 0) -> tuple[float, float, float]:
    """F1 of class 1, or the mean over classes, with its 95% bootstrap interval over posts."""
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
    """F1 of a class for each weighting of the posts."""
    true, said = found.labels == label, found.predicted == label
    hits = weights @ np.bincount(posts, true & said, minlength=weights.shape[1])
    both = weights @ np.bincount(posts, true.astype(int) + said, minlength=weights.shape[1])
    return np.where(both > 0, 2 * hits / np.maximum(both, 1), np.nan)


def scores_section(run: RunFiles) -> Section | None:
    """Tables and plots of the scores; None for a run without any."""
    metrics = run.results.get("metrics") or _only_fold(run)
    found = read_predictions(run.folder / "predictions.csv")
    blocks: list[Block] = []
    if metrics:
        blocks.append(_table(metrics, run))
    if found is not None:
        blocks += _intervals(found, run)
    if metrics and "confusion" in metrics:
        counts = tuple(tuple(map(int, row)) for row in metrics["confusion"])
        blocks.append(
            Matrix(
                id="confusion",
                title="Confusion",
                note="rows are true, columns predicted",
                labels=class_names(run, len(counts)),
                counts=counts,
            )
        )
    if found is not None:
        blocks += _curves(found, run)
    if by_criterion := run.results.get("by_criterion"):
        blocks.append(_criteria_table(by_criterion, found))
    if not blocks and any(part.scores for part in run.parts):
        blocks.append(Remark(text="Some folds are scored, and the run is not finished."))
    if not blocks:
        return None
    return Section(id="scores", title="Held-out scores", blocks=tuple(blocks))


def _only_fold(run: RunFiles) -> Mapping[str, Any]:
    """Scores of a run without folds whose results are not written yet."""
    found: Mapping[str, Any] = run.parts[0].scores.get("overall", {})
    return found if len(run.parts) == 1 else {}


def class_names(run: RunFiles, count: int) -> tuple[str, ...]:
    """Names of the classes in the data, or their numbers."""
    folds = run.data.get("folds") or [{}]
    names = folds[0].get("classes") or ()
    return tuple(map(str, names)) if len(names) == count else tuple(map(str, range(count)))


def score_rows(
    metrics: Mapping[str, Any], baselines: Mapping[str, float], names: Collection[str] = FIGURES
) -> tuple[list[tuple[str, ...]], int]:
    """Rows of the folds with their mean, or of the one model, then baselines; and the main row."""
    folds: Sequence[Mapping[str, Any]] = metrics.get("folds") or ()
    rows = [(f"fold {n}", *_scores(fold, names)) for n, fold in enumerate(folds, 1)]
    if folds:
        rows.append(("mean", *_scores(metrics["mean"], names)))
        rows.append(("standard deviation", *_scores(metrics["std"], names)))
        rows.append(("95% interval", *(pair(metrics["ci95"].get(name)) for name in names)))
    else:
        rows.append(("model", *_scores(metrics, names)))
    for name, value in baselines.items():
        rows.append((BASELINES.get(name, name), four(value), *[""] * (len(names) - 1)))
    return rows, len(folds)


def _scores(figures: Mapping[str, Any], names: Collection[str]) -> list[str]:
    return [four(figures.get(name)) for name in names]


def _table(metrics: Mapping[str, Any], run: RunFiles) -> Table:
    own = run.results.get("metric")  # a job of the user's own has figures of its own
    titles = {name: name.replace("_", " ") for name in metrics} if own else FIGURES
    rows, main = score_rows(metrics, run.results.get("baselines") or {}, titles)
    return Table(
        columns=("", *titles.values()),
        rows=tuple(rows),
        strong=(main,),
        note="The interval is Student's t over the folds." if main else "",
    )


def _intervals(found: Predictions, run: RunFiles) -> Iterator[Intervals]:
    """F1 by fold and by criterion; without folds, all items come first."""
    baselines: Mapping[str, Any] = run.results.get("baselines") or {}
    references = tuple(
        Reference(y=float(value), label=BASELINES.get(name, name))
        for name, value in baselines.items()
    )
    name = "F1" if found.classes == 2 else "Macro F1"
    parts = [(f"fold {number}", part) for number, part in found.by_fold()]
    folds = tuple(_row(label, part, at) for at, (label, part) in enumerate(parts))
    criteria = tuple(_row(label, part, 0) for label, part in found.by_criterion())
    whole = _row("all folds" if len(folds) > 1 else "model", found, -1)
    if len(folds) > 1 or not criteria:
        rows = (*folds, whole) if len(folds) > 1 else (whole,)
        yield _plot("f1-folds", name, rows, references)
    if criteria:
        rows = criteria if len(folds) > 1 else (whole, *criteria)
        yield _plot("f1-criteria", f"{name} by criterion", rows, references[:0])


def _plot(
    name: str, title: str, rows: tuple[IntervalRow, ...], references: tuple[Reference, ...]
) -> Intervals:
    return Intervals(
        id=name, title=title, note=_BOOTSTRAP, rows=rows, top=1.0, references=references
    )


def _row(label: str, part: Predictions, color: int) -> IntervalRow:
    value, low, high = f1_interval(part)
    known = low < high  # draws of what has no error have none either: that is no certainty
    positives = int((part.labels == 1).sum())
    note = f"{positives:,} positive" if part.classes == 2 else f"{len(part.labels):,} held out"
    return IntervalRow(
        label=label,
        value=value,
        low=low if known else None,
        high=high if known else None,
        note=note,
        color=color,
    )


def _curves(found: Predictions, run: RunFiles) -> Iterator[Lines]:
    """ROC and precision–recall: by fold and together, or one class against the rest."""
    for name, title, curve in (
        ("roc", "ROC", roc_curve),
        ("precision-recall", "Precision and recall", pr_curve),
    ):
        series: list[Series] = []
        for label, color, positive, scores in _sets(found, run):
            if (points := curve(positive, scores)) is not None:
                x, y = (tuple(values.tolist()) for values in points)
                style: Any = "line" if color < 0 else "faint"
                series.append(Series(name=label, x=x, y=y, color=color, style=style))
        if series:
            share = float((found.labels == 1).mean())
            level = (Reference(y=share, label="chance"),) if name != "roc" else ()
            yield Lines(
                id=name,
                title=title,
                x_label="false positive rate" if name == "roc" else "recall",
                note="true positive rate" if name == "roc" else "precision",
                series=tuple(series),
                references=level if found.classes == 2 else (),
                unit_square=True,
            )


def _sets(found: Predictions, run: RunFiles) -> Iterator[tuple[str, int, Any, Any]]:
    """Name, colour, true labels and scores of each line."""
    if found.classes > 2:
        sizes = np.bincount(found.labels, minlength=found.classes)
        names = class_names(run, found.classes)
        for color, k in enumerate(np.argsort(-sizes, kind="stable")[:_MOST_CLASSES]):
            yield names[k], color, found.labels == k, found.chances[:, k]
        return
    folds = list(found.by_fold())
    for color, (number, part) in enumerate(folds if len(folds) > 1 else []):
        yield f"fold {number}", color, part.labels == 1, part.chances[:, 1]
    label = "all folds" if len(folds) > 1 else "model"
    yield label, -1, found.labels == 1, found.chances[:, 1]


def _criteria_table(
    by_criterion: Mapping[str, Mapping[str, Any]], found: Predictions | None
) -> Table:
    precision = {}
    for name, part in found.by_criterion() if found is not None else ():
        precision[name] = average_precision(part.labels == 1, part.chances[:, 1])
    rows = tuple(
        (
            name,
            *(four(one.get(figure)) for figure in FIGURES),
            four(precision.get(name)),
            sum(one["confusion"][1]),
            one["count"],
        )
        for name, one in by_criterion.items()
    )
    return Table(
        title="By criterion",
        columns=("", *FIGURES.values(), "average precision", "positives", "pairs"),
        rows=rows,
    )


def four(value: float | None) -> str:
    """A score with four digits."""
    return cell(None) if value is None else f"{value:.4f}"


def pair(ends: Sequence[float | None] | None) -> str:
    """An interval with three digits."""
    if ends is None or None in ends:
        return cell(None)
    return f"{ends[0]:.3f}–{ends[1]:.3f}"
