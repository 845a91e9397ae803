"""What a text classifier must beat: the commonest class, and a regression on counts of tokens.

Counted by token, not by word: the tokens are at hand, whatever the size of the files.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainfit.data.tokens import Dataset, Tokens
from trainfit.tasks.encoder.baselines import best_threshold
from trainfit.tasks.encoder.metrics import Metrics, binary_metrics, class_metrics

_MOST = 50_000
"""Texts that the regression learns from, at most."""


def text_baselines(dataset: Dataset, *, seed: int = 0) -> dict[str, float]:
    """The F1 of both on the test; they learn from training and validation texts together."""
    classes = len(dataset.metadata["classes"])
    labels = np.concatenate([dataset.train.labels, dataset.validation.labels])
    common = int(np.bincount(labels, minlength=classes).argmax())
    answers = np.tile(np.eye(classes)[common], (len(dataset.test), 1))
    return {
        "majority_f1": class_metrics(dataset.test.labels, answers).f1,
        "bag_of_words_f1": _regression(dataset, classes, seed).f1,
    }


def _regression(dataset: Dataset, classes: int, seed: int) -> Metrics:
    from scipy.sparse import vstack
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict
    from sklearn.pipeline import make_pipeline

    parts = (dataset.train, dataset.validation, dataset.test)
    size = 1 + max(int(part.ids.max()) for part in parts)
    known = vstack([count_tokens(part, size) for part in parts[:2]]).tocsr()
    labels = np.concatenate([part.labels for part in parts[:2]])
    chosen = np.random.default_rng(seed).permutation(labels.size)[:_MOST]
    known, labels = known[chosen], labels[chosen]
    model = make_pipeline(
        TfidfTransformer(sublinear_tf=True),
        LogisticRegression(C=10.0, class_weight="balanced", max_iter=1000),
    )
    model.fit(known, labels)
    found = model.predict_proba(count_tokens(dataset.test, size))
    if classes > 2 or np.bincount(labels).min() < 3:
        return class_metrics(dataset.test.labels, found)
    inner = cross_val_predict(model, known, labels, cv=3, method="predict_proba")[:, 1]
    threshold, _ = best_threshold(labels, inner)
    return binary_metrics(dataset.test.labels, found[:, 1], threshold)


def count_tokens(tokens: Tokens, size: int) -> Any:
    """How often each token is in each text, as a sparse matrix."""
    from scipy.sparse import csr_matrix

    rows = np.repeat(np.arange(len(tokens)), tokens.lengths)
    ids = np.concatenate([tokens.sequence(at) for at in range(len(tokens))])
    return csr_matrix((np.ones(ids.size), (rows, ids)), shape=(len(tokens), size))
