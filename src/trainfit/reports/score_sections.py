"""Scores on held-out data: folds, criteria, labels, confusion, curves, intervals, numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainfit.reports import predictions
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
from trainfit.runs.reader import RunFiles

FIGURES = {
    "f1": "F1",
    "precision": "precision",
    "recall": "recall",
    "macro_f1": "macro F1",
    "accuracy": "accuracy",
    "auc": "AUC",
}
"""Scores in the order of the tables, with their titles."""
_LABEL_FIGURES = {
    "f1": "micro F1",
    "precision": "micro precision",
    "recall": "micro recall",
    "macro_f1": "macro F1",
    "accuracy": "subset accuracy",
    "auc": "mean AUC",
}
_NUMBER_FIGURES = {
    "rmse": "RMSE",
    "mse": "MSE",
    "mae": "MAE",
    "pearson": "Pearson",
    "spearman": "Spearman",
}
_TAG_FIGURES = {name: title for name, title in FIGURES.items() if name != "auc"} | {
    "accuracy": "word accuracy"
}
BASELINES = {
    "majority": "majority class",
    "all_o": "O for every word",
    "word_tags": "each word's commonest tag",
    "mean": "mean of the labels",
    "bag_of_words": "TF-IDF regression",
}
"""Baselines, with their titles; a result names each with its figure, such as majority_f1."""
_MOST_CLASSES = 8


def figures_of(problem_type: str) -> Mapping[str, str]:
    """Titles of the scores of a kind of labels, the one that decides first."""
    kinds = {
        "multi_label_classification": _LABEL_FIGURES,
        "regression": _NUMBER_FIGURES,
        "token_classification": _TAG_FIGURES,
    }
    return kinds.get(problem_type, FIGURES)


def problem_type_of(run: RunFiles) -> str:
    """Kind of a run's labels, by transformers' name; empty for an earlier run's."""
    folds = run.data.get("folds") or [{}]
    return str(folds[0].get("problem_type", ""))


def scores_section(run: RunFiles) -> Section | None:
    """Tables and plots of the scores; None for a run without any."""
    metrics = run.results.get("metrics") or _only_fold(run)
    found = predictions.read_predictions(run.folder / "predictions.csv")
    blocks: list[Block] = []
    if metrics:
        blocks.append(_table(metrics, run))
    blocks += _sentence_intervals(run) if found is None else _intervals(found, run)
    if metrics and metrics.get("confusion"):
        counts = tuple(tuple(map(int, row)) for row in metrics["confusion"])
        blocks.append(
            Matrix(
                id="confusion",
                title="Confusion",
                note="rows are true, columns predicted",
                labels=class_names(run.data, len(counts)),
                counts=counts,
            )
        )
    if found is not None:
        blocks += _curves(found, run)
    if by_criterion := run.results.get("by_criterion"):
        blocks.append(_criteria_table(by_criterion, found))
    if by_label := run.results.get("by_label"):
        blocks.append(_labels_table(by_label, tags=problem_type_of(run) == "token_classification"))
    if problem_type_of(run) == "regression":
        blocks += _scatter(run.folder / "predictions.csv")
    if not blocks and any(part.scores for part in run.parts):
        blocks.append(Remark(text="Some folds are scored, and the run is not finished."))
    if not blocks:
        return None
    return Section(id="scores", title="Held-out scores", blocks=tuple(blocks))


def _only_fold(run: RunFiles) -> Mapping[str, Any]:
    """Scores of a run without folds whose results are not written yet."""
    found: Mapping[str, Any] = run.parts[0].scores.get("overall", {})
    return found if len(run.parts) == 1 else {}


def class_names(data: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Names of the classes in the data, or their numbers."""
    folds = data.get("folds") or [{}]
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
    for title, figures in by_baseline(baselines).items():
        cells = (four(figures[name]) if name in figures else "" for name in names)
        rows.append((title, *cells))
    return rows, len(folds)


def by_baseline(scores: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Figures of each baseline, by its title."""
    found: dict[str, dict[str, float]] = {}
    for name, value in scores.items():
        known = next((one for one in BASELINES if name.startswith(f"{one}_")), None)
        title = name if known is None else BASELINES[known]
        figure = name if known is None else name.removeprefix(f"{known}_")
        found.setdefault(title, {})[figure] = float(value)
    return found


def _scores(figures: Mapping[str, Any], names: Collection[str]) -> list[str]:
    return [four(figures.get(name)) for name in names]


def _table(metrics: Mapping[str, Any], run: RunFiles) -> Table:
    own = run.results.get("metric")  # a job of the user's own has figures of its own
    known = figures_of(problem_type_of(run))
    titles = {name: name.replace("_", " ") for name in metrics} if own else known
    rows, main = score_rows(metrics, run.results.get("baselines") or {}, titles)
    notes = ["The interval is Student's t over the folds."] if main else []
    names = class_names(run.data, 2)
    if _is_named(run) and len(metrics.get("confusion") or ()) == 2:
        notes.append(f"F1, precision, recall and the curves are of the class {names[1]}.")
    return Table(
        columns=("", *titles.values()), rows=tuple(rows), strong=(main,), note=" ".join(notes)
    )


def _is_named(run: RunFiles) -> bool:
    """Tell classes that have names of their own, none of which is the positive one."""
    folds = run.data.get("folds") or [{}]
    return bool(folds[0].get("metric") == "macro_f1")


def _intervals(found: predictions.Predictions, run: RunFiles) -> Iterator[Intervals]:
    """F1 by fold and by criterion; without folds, all items come first."""
    references = _references(run)
    name = "F1" if found.classes == 2 else "Macro F1"
    over = "rows" if _is_named(run) else "posts"
    parts = [(f"fold {number}", part) for number, part in found.by_fold()]
    folds = tuple(_row(label, part, at) for at, (label, part) in enumerate(parts))
    criteria = tuple(_row(label, part, 0) for label, part in found.by_criterion())
    whole = _row("all folds" if len(folds) > 1 else "model", found, -1)
    if len(folds) > 1 or not criteria:
        rows = (*folds, whole) if len(folds) > 1 else (whole,)
        yield _plot("f1-folds", name, rows, references, over)
    if criteria:
        rows = criteria if len(folds) > 1 else (whole, *criteria)
        yield _plot("f1-criteria", f"{name} by criterion", rows)


def _sentence_intervals(run: RunFiles) -> Iterator[Intervals]:
    """F1 of tags by fold, with the intervals that the run drew over its sentences."""
    parts = [(n, part.scores) for n, part in enumerate(run.parts) if part.scores.get("ci95")]
    rows = tuple(
        IntervalRow(
            label=f"fold {n + 1}" if len(run.parts) > 1 else "model",
            value=float(scores["overall"]["f1"]),
            low=float(low) if low < high else None,
            high=float(high) if low < high else None,
            note=f"{int(scores['overall']['count']):,} words",
            color=n if len(run.parts) > 1 else -1,
        )
        for n, scores in parts
        for low, high in [scores["ci95"]["f1"]]
    )
    if rows:
        yield _plot("f1-folds", "F1", rows, _references(run), "sentences")


def _references(run: RunFiles) -> tuple[Reference, ...]:
    found = by_baseline(run.results.get("baselines") or {}).items()
    return tuple(Reference(y=each["f1"], label=title) for title, each in found if "f1" in each)


def _plot(
    name: str,
    title: str,
    rows: tuple[IntervalRow, ...],
    references: tuple[Reference, ...] = (),
    over: str = "posts",
) -> Intervals:
    note = f"95% bootstrap intervals over {over}; none where no error was seen"
    return Intervals(id=name, title=title, note=note, rows=rows, top=1.0, references=references)


def _row(label: str, part: predictions.Predictions, color: int) -> IntervalRow:
    value, low, high = predictions.f1_interval(part)
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


def _curves(found: predictions.Predictions, run: RunFiles) -> Iterator[Lines]:
    """ROC and precision–recall: by fold and together, or one class against the rest."""
    for name, title, curve in (
        ("roc", "ROC", predictions.roc_curve),
        ("precision-recall", "Precision and recall", predictions.pr_curve),
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


def _sets(found: predictions.Predictions, run: RunFiles) -> Iterator[tuple[str, int, Any, Any]]:
    """Name, colour, true labels and scores of each line."""
    if found.classes > 2:
        sizes = np.bincount(found.labels, minlength=found.classes)
        names = class_names(run.data, found.classes)
        for color, k in enumerate(np.argsort(-sizes, kind="stable")[:_MOST_CLASSES]):
            yield names[k], color, found.labels == k, found.chances[:, k]
        return
    folds = list(found.by_fold())
    for color, (number, part) in enumerate(folds if len(folds) > 1 else []):
        yield f"fold {number}", color, part.labels == 1, part.chances[:, 1]
    label = "all folds" if len(folds) > 1 else "model"
    yield label, -1, found.labels == 1, found.chances[:, 1]


def _criteria_table(
    by_criterion: Mapping[str, Mapping[str, Any]], found: predictions.Predictions | None
) -> Table:
    precision = {}
    for name, part in found.by_criterion() if found is not None else ():
        precision[name] = predictions.average_precision(part.labels == 1, part.chances[:, 1])
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


def _labels_table(by_label: Mapping[str, Mapping[str, Any]], *, tags: bool) -> Table:
    names = ("f1", "precision", "recall") if tags else ("f1", "precision", "recall", "auc")
    rows = tuple(
        (
            label,
            *(four(one.get(name)) for name in names),
            sum(one["confusion"][1]),
            sum(row[1] for row in one["confusion"]),
        )
        for label, one in by_label.items()
    )
    titles = (FIGURES[name] for name in names)
    counted = "true" if tags else "texts"
    title = "By type" if tags else "By label"
    return Table(title=title, columns=("", *titles, counted, "given"), rows=rows)


def _scatter(path: Path) -> Iterator[Lines]:
    """Predictions against labels, at most POINTS of them."""
    pairs = predictions.read_predicted_numbers(path)
    if pairs is None:
        return
    pairs = pairs[:: 1 + len(pairs) // predictions.POINTS]
    low, high = float(pairs.min()), float(pairs.max())
    x, y = (tuple(values.tolist()) for values in pairs.T)
    yield Lines(
        id="predictions",
        title="Predictions",
        x_label="label",
        note="a point is a held-out text; on the line label and prediction are the same",
        series=(
            Series(name="the same", x=(low, high), y=(low, high), color=-1, style="faint"),
            Series(name="held out", x=x, y=y, color=0, style="points"),
        ),
    )


def four(value: float | None) -> str:
    """Format a score with four digits."""
    return cell(None) if value is None else f"{value:.4f}"


def pair(ends: Sequence[float | None] | None) -> str:
    """Format an interval with three digits."""
    if ends is None or None in ends:
        return cell(None)
    return f"{ends[0]:.3f}–{ends[1]:.3f}"
