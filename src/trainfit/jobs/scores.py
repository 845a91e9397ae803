"""Scores of a job on held-out data: by fold, by criterion, over folds, and as files."""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainfit.core.files import read_text, text_facts, write_whole
from trainfit.core.records import Event, Record, RunResult
from trainfit.data.tokens import Dataset, Tokens
from trainfit.jobs.metrics import Metrics, by_group, class_metrics
from trainfit.jobs.targets import Outputs, Scores, target_of

Row = dict[str, Any]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldScores(Record):
    """Scores of a fold's model on its held-out test set."""

    fold: int
    overall: Scores
    by_criterion: dict[str, Metrics]
    steps: int
    best_step: int | None
    """Step of the best validation, whose weights were scored."""
    seconds: float
    peak_memory_gib: float | None
    events: tuple[Event, ...] = ()
    by_label: dict[str, Metrics] = field(default_factory=dict)
    """Metrics of each label, where a text has several."""
    thresholds: tuple[float, ...] = ()
    """Probability from which on each of several labels is given, chosen on the validation part."""
    ci95: dict[str, tuple[float, float]] = field(default_factory=dict)
    """95% bootstrap intervals over sentences, where words have tags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult(Record):
    """Result of a classification job."""

    task: str
    run: str
    status: Literal["finished", "stopped"]
    metrics: dict[str, Any]
    """Metrics on held-out data. With folds they are means, beside mean, std, ci95 and folds."""
    baselines: dict[str, float]
    events: tuple[Event, ...]
    seconds: float
    by_criterion: dict[str, Metrics] = field(default_factory=dict)
    """Metrics over the held-out parts of all folds together."""
    by_label: dict[str, Metrics] = field(default_factory=dict)
    problem_type: str = "single_label_classification"

    def __repr__(self) -> str:
        """Metrics for a terminal."""
        return text_facts(f"{self.task} {self.status}: {self.run}", self.metrics)


def judge(
    dataset: Dataset,
    found: Outputs,
    result: RunResult,
    fold: int,
    thresholds: tuple[float, ...] = (),
) -> FoldScores:
    """Score a fold's outputs on its test set."""
    test, names = dataset.test, dataset.metadata["classes"]
    target, criteria = target_of(dataset.metadata), dataset.metadata.get("criteria")
    each: dict[str, Metrics] = {}
    if criteria is not None and test.criteria is not None:
        each = by_group(test.labels, found[:, 1], test.criteria, criteria)
    return FoldScores(
        fold=fold,
        overall=target.score(test.truth, found, thresholds),
        by_criterion=each,
        by_label=target.by_label(test.truth, found, names, thresholds),
        ci95=target.intervals(test.truth, found),
        thresholds=thresholds,
        steps=result.steps,
        best_step=result.best_step,
        seconds=result.seconds,
        peak_memory_gib=result.peak_memory_gib,
        events=result.events,
    )


def summarise(
    run: Path,
    task: str,
    folds: Sequence[FoldScores],
    baselines: dict[str, float],
    *,
    cross_validated: bool,
    stopped: bool,
    problem_type: str = "single_label_classification",
) -> JobResult:
    return JobResult(
        task=task,
        run=str(run),
        status="stopped" if stopped else "finished",
        metrics=_fold_metrics(folds, cross_validated) if folds else {},
        baselines=baselines,
        events=tuple(_events(folds, cross_validated)),
        seconds=sum(fold.seconds for fold in folds),
        by_criterion=_pooled([fold.by_criterion for fold in folds]),
        by_label=_pooled([fold.by_label for fold in folds]),
        problem_type=problem_type,
    )


def _fold_metrics(folds: Sequence[FoldScores], cross_validated: bool) -> dict[str, Any]:
    figures = [fold.overall.scalars() for fold in folds]
    tables = [getattr(fold.overall, "confusion", ()) for fold in folds]
    confusion = {"confusion": np.sum(tables, axis=0).tolist()} if tables[0] else {}
    if not cross_validated:
        return {**figures[0], **confusion, "count": folds[0].overall.count}
    spread = over_folds(figures)
    return {
        **{name: one.mean for name, one in spread.items()},
        **confusion,
        "count": sum(fold.overall.count for fold in folds),
        "mean": {name: one.mean for name, one in spread.items()},
        "std": {name: one.std for name, one in spread.items()},
        "ci95": {name: [one.low, one.high] for name, one in spread.items()},
        "folds": figures,
    }


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


def _pooled(folds: Sequence[dict[str, Metrics]]) -> dict[str, Metrics]:
    """Metrics by criterion or label: the counts of all folds, with the mean of their AUCs."""
    names = dict.fromkeys(name for fold in folds for name in fold)
    return {name: _together([fold[name] for fold in folds if name in fold]) for name in names}


def _together(parts: Sequence[Metrics]) -> Metrics:
    if len(parts) == 1:
        return parts[0]
    table = np.sum([part.confusion for part in parts], axis=0)
    labels = np.repeat([0, 0, 1, 1], table.ravel())
    predicted = np.repeat([0, 1, 0, 1], table.ravel())
    merged = class_metrics(labels, np.eye(2)[predicted])
    areas = [part.auc for part in parts if part.auc is not None]
    return replace(merged, auc=float(np.mean(areas)) if areas else None)


def _events(folds: Sequence[FoldScores], cross_validated: bool) -> Iterator[Event]:
    for fold in folds:
        for event in fold.events:
            prefix = f"fold {fold.fold}: " if cross_validated else ""
            yield replace(event, text=prefix + event.text)


# ── files ─────────────────────────────────────────────────────────────────────────────────────


def rows(ids: Sequence[str], dataset: Dataset, found: Outputs, fold: int) -> list[Row]:
    """Make a row for each held-out item: its id, label and scores, without its text."""
    kind = target_of(dataset.metadata).problem_type
    test, codes = dataset.test, dataset.metadata.get("criteria")
    if test.tags is not None:
        return _word_rows(ids, test, found, fold)
    made = []
    for at, name in enumerate(ids):
        row: Row = {"fold": fold, "id": name}
        if codes is not None and test.criteria is not None:
            row["criterion"] = codes[int(test.criteria[at])]
        label, chances = test.labels[at].tolist(), [float(value) for value in found[at]]
        if kind == "multi_label_classification":
            row |= {f"label_{k}": value for k, value in enumerate(label)}
        else:
            row["label"] = label
        if kind == "regression":
            row["prediction"] = chances[0]
        elif len(chances) == 2 and kind == "single_label_classification":
            row["score"] = chances[1]
        else:
            row |= {f"score_{k}": value for k, value in enumerate(chances)}
        made.append(row)
    return made


def _word_rows(ids: Sequence[str], test: Tokens, found: Outputs, fold: int) -> list[Row]:
    """Make a row for each word with a tag: its sentence, and the likeliest tag."""
    tags, chances = found.argmax(1).tolist(), found.max(1).tolist()
    return [
        {"fold": fold, "id": ids[row], "label": label, "prediction": tag, "probability": chance}
        for (row, label), tag, chance in zip(test.truth.tolist(), tags, chances, strict=True)
    ]


def as_csv(table: Sequence[Row]) -> str:
    """Format rows of the same columns as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def join_predictions(run: Path, folds: int) -> None:
    """Join the folds' predictions: each item once, by the model that was not trained on it."""
    parts = [read_text(run / f"fold-{n + 1}" / "predictions.csv") for n in range(folds)]
    header, _, _ = parts[0].partition("\n")
    bodies = [part.partition("\n")[2] for part in parts]
    write_whole(run / "predictions.csv", header + "\n" + "".join(bodies), parents=False)


def checksum(datasets: Sequence[Dataset]) -> str:
    """Hash the tokens, labels and folds."""
    digest = hashlib.sha256()
    hashed: set[int] = set()
    for dataset in datasets:
        for part in (dataset.train, dataset.validation, dataset.test):
            if id(part.ids) not in hashed:
                hashed.add(id(part.ids))
                digest.update(np.ascontiguousarray(part.ids).data)
            for array in (part.starts, part.lengths, part.truth):
                digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
