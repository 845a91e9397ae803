"""Targets of a classifier: one class, several labels, a number, or a tag per word.

Each has its loss, outputs and metrics.

A loss is a sum over sequences, so that any cut of a step adds up to the same. Sequences that only
fill a batch have the label -100, or NaN where labels are no classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from trainfit.data.tokens import Tokens
from trainfit.jobs.metrics import (
    Metrics,
    NumberMetrics,
    best_thresholds,
    by_kind,
    by_label,
    class_metrics,
    label_metrics,
    number_metrics,
    tag_intervals,
    tag_metrics,
)
from trainfit.jobs.models.classifier import classification_loss

Outputs = NDArray[np.float64]
"""Probabilities of the classes or labels, or numbers, `[sequences, outputs]`."""
Scores = Metrics | NumberMetrics


class OneClass:
    """One class per sequence, by cross-entropy."""

    problem_type: ClassVar[str] = "single_label_classification"
    metric: ClassVar[str] = "f1"
    """Metric on the validation part that chooses the best checkpoint."""
    greater_is_better: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = (
        *("f1", "accuracy", "precision", "recall", "macro_f1", "auc", "loss"),
    )

    def to_learn(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Return the labels as the loss takes them."""
        return labels

    def weights(self, tokens: Tokens, by_class: NDArray[Any] | None) -> NDArray[Any]:
        """Return how much each sequence counts in the loss; `by_class` None: all the same."""
        return np.ones(len(tokens)) if by_class is None else by_class[tokens.labels]

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the loss of a micro-batch."""
        return classification_loss(logits, labels, weights)

    def outputs(self, logits: Tensor) -> Tensor:
        """Turn logits into probabilities or numbers."""
        return logits.softmax(-1)

    def thresholds(self, labels: NDArray[Any], found: Outputs) -> tuple[float, ...]:
        """Choose the probabilities from which on a label is given; none for one class."""
        del labels, found
        return ()

    def score(self, labels: NDArray[Any], found: Outputs, thresholds: Any = ()) -> Scores:
        del thresholds
        return class_metrics(labels, found)

    def by_label(
        self, labels: NDArray[Any], found: Outputs, names: Sequence[str], thresholds: Any
    ) -> dict[str, Metrics]:
        """Compute the metrics of each of several labels, or of each type of span; else none."""
        del labels, found, names, thresholds
        return {}

    def intervals(self, labels: NDArray[Any], found: Outputs) -> dict[str, tuple[float, float]]:
        """Bootstrap intervals where sentences are drawn; none of others, whose report has them."""
        del labels, found
        return {}

    def evaluate(self, labels: NDArray[Any], found: Outputs) -> dict[str, float]:
        """Compute the loss and the metrics of the validation part."""
        chance = np.maximum(found[np.arange(labels.size), labels], 1e-12)
        return {"loss": float(-np.log(chance).mean()), **self.score(labels, found).scalars()}

    def facts(self) -> dict[str, Any]:
        """Return facts for using the model, under transformers' names where there are any."""
        return {"problem_type": self.problem_type}


class NamedClass(OneClass):
    """One class per sequence, where none is the positive one.

    The F1 of the class that comes last would choose a model that gives it to everything.
    """

    metric: ClassVar[str] = "macro_f1"


class SeveralLabels(OneClass):
    """Any number of labels per sequence: a yes or no for each, by its own threshold."""

    problem_type: ClassVar[str] = "multi_label_classification"

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the sequences' binary cross-entropies, each the mean over the labels."""
        del weights
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        filler = labels.isnan()
        each = functional.binary_cross_entropy_with_logits(
            logits, labels.masked_fill(filler, 0.0).to(logits), reduction="none"
        )
        return each.masked_fill(filler, 0.0).mean(-1).sum()

    def outputs(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def thresholds(self, labels: NDArray[Any], found: Outputs) -> tuple[float, ...]:
        """Choose the threshold of each label with the best F1."""
        return best_thresholds(labels, found)

    def score(self, labels: NDArray[Any], found: Outputs, thresholds: Any = ()) -> Scores:
        return label_metrics(labels, found, thresholds or [0.5] * found.shape[1])

    def by_label(
        self, labels: NDArray[Any], found: Outputs, names: Sequence[str], thresholds: Any
    ) -> dict[str, Metrics]:
        return by_label(labels, found, names, thresholds) if thresholds else {}

    def evaluate(self, labels: NDArray[Any], found: Outputs) -> dict[str, float]:
        """Score by the thresholds that are best here: at 0.5 a rare label is long without any."""
        chance = np.where(labels > 0, found, 1 - found)
        scored = self.score(labels, found, self.thresholds(labels, found))
        return {"loss": float(-np.log(np.maximum(chance, 1e-12)).mean()), **scored.scalars()}


@dataclass(frozen=True, slots=True)
class RealNumber(OneClass):
    """A number per sequence, learned by squared errors of standardised values."""

    problem_type: ClassVar[str] = "regression"
    metric: ClassVar[str] = "rmse"
    greater_is_better: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ("rmse", "mse", "mae", "pearson", "spearman", "loss")
    mean: float
    std: float

    def to_learn(self, labels: NDArray[Any]) -> NDArray[Any]:
        return (labels - self.mean) / self.std

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the squared errors."""
        del weights
        found = logits[..., 0].to(torch.promote_types(logits.dtype, torch.float32))
        filler = labels.isnan()
        error = found - labels.masked_fill(filler, 0.0).to(found)
        return error.masked_fill(filler, 0.0).square().sum()

    def outputs(self, logits: Tensor) -> Tensor:
        return logits * self.std + self.mean

    def score(self, labels: NDArray[Any], found: Outputs, thresholds: Any = ()) -> Scores:
        del thresholds
        return number_metrics(labels, found[:, 0])

    def evaluate(self, labels: NDArray[Any], found: Outputs) -> dict[str, float]:
        """Give NaN for a correlation that is not defined, which is never the best."""
        scored = number_metrics(labels, found[:, 0])
        undefined = dict.fromkeys(("pearson", "spearman"), math.nan)
        return {"loss": scored.mse / self.std**2, **undefined, **scored.scalars()}

    def facts(self) -> dict[str, Any]:
        return {"problem_type": self.problem_type, "target_mean": self.mean, "target_std": self.std}


@dataclass(frozen=True, slots=True)
class WordTags(OneClass):
    """A tag per word, by cross-entropy of its first token.

    Labels are `[words, 2]`: the sequence and the tag of each word. Outputs have a row per word.
    """

    problem_type: ClassVar[str] = "token_classification"
    metrics: ClassVar[tuple[str, ...]] = (
        *("f1", "accuracy", "precision", "recall", "macro_f1", "loss"),
    )
    names: tuple[str, ...]

    def weights(self, tokens: Tokens, by_class: NDArray[Any] | None) -> NDArray[Any]:
        """Return the number of words of each sequence, or the sum of their tags' weights."""
        if by_class is None:
            return tokens.labels.astype(np.float64)
        words = tokens.truth
        return np.bincount(words[:, 0], by_class[words[:, 1]], len(tokens))

    def score(self, labels: NDArray[Any], found: Outputs, thresholds: Any = ()) -> Scores:
        del thresholds
        return tag_metrics(labels, found.argmax(1), self.names)

    def by_label(
        self, labels: NDArray[Any], found: Outputs, names: Sequence[str], thresholds: Any
    ) -> dict[str, Metrics]:
        del thresholds
        return by_kind(labels, found.argmax(1), names)

    def intervals(self, labels: NDArray[Any], found: Outputs) -> dict[str, tuple[float, float]]:
        return tag_intervals(labels, found.argmax(1), self.names)

    def evaluate(self, labels: NDArray[Any], found: Outputs) -> dict[str, float]:
        chance = np.maximum(found[np.arange(len(labels)), labels[:, 1]], 1e-12)
        return {"loss": float(-np.log(chance).mean()), **self.score(labels, found).scalars()}


def target_of(facts: dict[str, Any]) -> OneClass:
    """Return the target that a dataset's metadata or an export's head.json describes."""
    kind = facts.get("problem_type", OneClass.problem_type)
    if kind == WordTags.problem_type:
        return WordTags(tuple(map(str, facts["classes"])))
    if kind == RealNumber.problem_type:
        return RealNumber(float(facts["target_mean"]), float(facts["target_std"]))
    if kind == SeveralLabels.problem_type:
        return SeveralLabels()
    return NamedClass() if facts.get("metric") == NamedClass.metric else OneClass()
