"""How good the model is on what was held out: folds, criteria, confusion, ROC, precision–recall."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainfit.core.records import Scalar
from trainfit.reports.model import (
    Block,
    Interval,
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
from trainfit.reports.predictions import (
    Curve,
    Predictions,
    average_precision,
    f1_interval,
    pr_curve,
    read_predictions,
    roc_curve,
)
from trainfit.runs.reader import RunFiles

_FIGURES = ("f1", "precision", "recall", "macro_f1", "accuracy", "auc")
_BASELINES = {"majority_f1": "majority class", "bag_of_words_f1": "TF-IDF regression"}
_RESAMPLED = "95% intervals by drawing whole posts anew; none where no error was seen"
_MOST_CLASSES = 8


def scores_section(run: RunFiles) -> Section | None:
    """The section, or None for a run that has no scores."""
    metrics = run.results.get("metrics") or _only_fold(run)
    found = _predictions(run)
    blocks: list[Block] = []
    if metrics:
        blocks.append(_table(metrics, run))
    if found is not None:
        blocks += _intervals(found, run)
    if metrics and "confusion" in metrics:
        blocks.append(_confusion(metrics["confusion"], run))
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
    """The scores of a run that has only one part, where its results are not written yet."""
    found: Mapping[str, Any] = run.parts[0].scores.get("overall", {})
    return found if len(run.parts) == 1 else {}


def _predictions(run: RunFiles) -> Predictions | None:
    path: Path = run.folder / "predictions.csv"
    return read_predictions(path) if path.is_file() else None


def class_names(run: RunFiles, count: int) -> tuple[str, ...]:
    """The classes as the data names them."""
    folds = run.data.get("folds") or [{}]
    names = folds[0].get("classes") or ()
    return tuple(map(str, names)) if len(names) == count else tuple(map(str, range(count)))


def _table(metrics: Mapping[str, Any], run: RunFiles) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    folds: Sequence[Mapping[str, Any]] = metrics.get("folds") or ()
    for number, fold in enumerate(folds, 1):
        rows.append((f"fold {number}", *(_four(fold.get(name)) for name in _FIGURES)))
    if folds:
        rows.append(("mean", *(_four(metrics["mean"].get(name)) for name in _FIGURES)))
        rows.append(("standard deviation", *(_four(metrics["std"].get(n)) for n in _FIGURES)))
        rows.append(("95% interval", *(_pair(metrics["ci95"].get(name)) for name in _FIGURES)))
        strong = (len(folds),)
    else:
        rows.append(("model", *(_four(metrics.get(name)) for name in _FIGURES)))
        strong = (0,)
    for name, value in (run.results.get("baselines") or {}).items():
        rows.append((_BASELINES.get(name, name), _four(value), *[""] * (len(_FIGURES) - 1)))
    return Table(
        columns=("", "F1", "precision", "recall", "macro F1", "accuracy", "AUC"),
        rows=tuple(rows),
        strong=strong,
        note="The interval is Student's t over the folds." if folds else "",
    )


def _intervals(found: Predictions, run: RunFiles) -> Iterator[Intervals]:
    """F1 by fold and by criterion; without folds the whole leads the criteria."""
    baselines: Mapping[str, Any] = run.results.get("baselines") or {}
    references = tuple(
        Reference(y=float(value), label=_BASELINES.get(name, name))
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
    name: str, title: str, rows: tuple[Interval, ...], references: tuple[Reference, ...]
) -> Intervals:
    return Intervals(
        id=name, title=title, note=_RESAMPLED, rows=rows, top=1.0, references=references
    )


def _row(label: str, part: Predictions, color: int) -> Interval:
    value, low, high = f1_interval(part)
    known = low < high  # draws of what has no error have none either: that is no certainty
    positives = int((part.labels == 1).sum())
    note = f"{positives:,} positive" if part.classes == 2 else f"{len(part.labels):,} held out"
    return Interval(
        label=label,
        value=value,
        low=low if known else None,
        high=high if known else None,
        note=note,
        color=color,
    )


def _confusion(counts: Sequence[Sequence[int]], run: RunFiles) -> Matrix:
    return Matrix(
        id="confusion",
        title="Confusion",
        note="rows are true, columns predicted",
        labels=class_names(run, len(counts)),
        counts=tuple(tuple(map(int, row)) for row in counts),
    )


def _curves(found: Predictions, run: RunFiles) -> Iterator[Lines]:
    """ROC and precision–recall: by fold and together, or one class against the rest."""
    for name, title, curve in (
        ("roc", "ROC", roc_curve),
        ("precision-recall", "Precision and recall", pr_curve),
    ):
        series: list[Series] = []
        for label, color, positive, scores in _sets(found, run):
            points = curve(positive, scores)
            if points is not None:
                series.append(_series(label, points, color))
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
    """Name, colour, what is positive, and its scores, for each line."""
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


def _series(name: str, points: Curve, color: int) -> Series:
    x, y = points
    style: Any = "line" if color < 0 else "faint"
    return Series(name=name, x=tuple(x.tolist()), y=tuple(y.tolist()), color=color, style=style)


def _criteria_table(
    by_criterion: Mapping[str, Mapping[str, Any]], found: Predictions | None
) -> Table:
    precision = {}
    for name, part in found.by_criterion() if found is not None else ():
        precision[name] = average_precision(part.labels == 1, part.chances[:, 1])
    rows = tuple(
        (
            name,
            *(_four(one.get(figure)) for figure in _FIGURES),
            _four(precision.get(name)),
            sum(one["confusion"][1]),
            one["count"],
        )
        for name, one in by_criterion.items()
    )
    names = ("F1", "precision", "recall", "macro F1", "accuracy", "AUC")
    return Table(
        title="By criterion",
        columns=("", *names, "average precision", "positives", "pairs"),
        rows=rows,
    )


def _four(value: float | None) -> str:
    return cell(None) if value is None else f"{value:.4f}"


def _pair(pair: Sequence[float | None] | None) -> str:
    if pair is None or pair[0] is None or pair[1] is None:
        return cell(None)
    return f"{pair[0]:.3f}–{pair[1]:.3f}"
