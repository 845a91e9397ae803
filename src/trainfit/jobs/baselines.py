"""Baselines that a model must beat: the majority class, and TF-IDF with a logistic regression.

Both see exactly the folds that the model sees. The regression's variant and threshold are chosen by
cross-validation inside the training part, without the held-out data.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainfit.data.folds import make_folds
from trainfit.data.redsm5 import Corpus
from trainfit.data.tokens import Dataset, Tokens
from trainfit.jobs.metrics import Metrics, binary_metrics, class_metrics

IntArray = NDArray[np.int64]
Floats = NDArray[np.float64]
VARIANTS: tuple[dict[str, Any], ...] = (
    {"ngram_range": (1, 1), "C": 1.0},
    {"ngram_range": (1, 1), "C": 10.0},
    {"ngram_range": (1, 2), "C": 1.0},
    {"ngram_range": (1, 2), "C": 10.0},
)
"""Single words, or words and pairs, with more or less regularisation."""
_INNER_FOLDS = 3


def majority_baseline(corpus: Corpus, train: IntArray, held: IntArray) -> Metrics:
    """Predict each criterion's more common training label; F1 is 0 where that is the negative."""
    scores = np.zeros(held.size)
    for k in range(len(corpus.criteria)):
        of_train, of_held = (corpus.criterion_of[part] == k for part in (train, held))
        if of_train.any():
            scores[of_held] = float(corpus.labels[train[of_train]].mean() > 0.5)
    return binary_metrics(corpus.labels[held], scores)


def tfidf_baseline(corpus: Corpus, train: IntArray, held: IntArray, *, seed: int = 0) -> Metrics:
    """Fit TF-IDF and a logistic regression for each criterion."""
    labels = corpus.labels[train]
    choices = [
        best_threshold(labels, _inner_scores(corpus, train, variant, seed)) for variant in VARIANTS
    ]
    best = max(range(len(VARIANTS)), key=lambda n: choices[n][1])
    scores = _fit_and_score(corpus, train, held, VARIANTS[best])
    return binary_metrics(corpus.labels[held], scores, choices[best][0])


def best_threshold(labels: IntArray, scores: Floats) -> tuple[float, float]:
    """Return the threshold with the best F1 on these (training) labels, and that F1."""
    grid = np.unique(np.quantile(scores, np.linspace(0, 1, 101)))
    f1s = [binary_metrics(labels, scores, float(threshold)).f1 for threshold in grid]
    best = int(np.argmax(f1s))
    return float(grid[best]), f1s[best]


def _inner_scores(corpus: Corpus, train: IntArray, variant: dict[str, Any], seed: int) -> Floats:
    """Score each training pair by a regression that has not seen its post."""
    strata = np.where(corpus.labels == 1, corpus.criterion_of + 1, 0)
    scores = np.zeros(corpus.labels.size)
    for fold in make_folds(train, strata, corpus.post_of, folds=_INNER_FOLDS, share=0.5, seed=seed):
        scores[fold.validation] = _fit_and_score(corpus, fold.train, fold.validation, variant)
    return scores[train]


def _fit_and_score(
    corpus: Corpus, train: IntArray, held: IntArray, variant: dict[str, Any]
) -> Floats:
    """Score the held-out pairs: one regression per criterion on the words of the posts."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    known = np.unique(corpus.post_of[train])
    words = TfidfVectorizer(ngram_range=variant["ngram_range"], sublinear_tf=True)
    words.fit([corpus.texts[post] for post in known])
    posts = np.union1d(known, corpus.post_of[held])
    counted = words.transform([corpus.texts[post] for post in posts])

    def of(pairs: IntArray) -> Any:
        return counted[np.searchsorted(posts, corpus.post_of[pairs])]

    scores = np.zeros(held.size)
    for k in range(len(corpus.criteria)):
        part, asked = (side[corpus.criterion_of[side] == k] for side in (train, held))
        if part.size and asked.size:
            answers = _regress(of(part), corpus.labels[part], of(asked), variant["C"])
            scores[corpus.criterion_of[held] == k] = answers
    return scores


def _regress(known: Any, labels: IntArray, asked: Any, strength: float) -> Floats:
    """Probability of label 1 for each asked row; constant if training has one label only."""
    from sklearn.linear_model import LogisticRegression

    if labels.min() == labels.max():
        return np.full(asked.shape[0], float(labels[0]))
    model = LogisticRegression(class_weight="balanced", C=strength, solver="liblinear")
    probabilities: Floats = model.fit(known, labels).predict_proba(asked)[:, 1]
    return probabilities


_MOST = 50_000
"""Maximum number of texts that the regression learns from."""


def text_baselines(dataset: Dataset, *, seed: int = 0) -> dict[str, float]:
    """F1 of both baselines on the test set, fitted on training and validation texts together."""
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
    """Count each token in each text, as a sparse matrix."""
    from scipy.sparse import csr_matrix

    rows = np.repeat(np.arange(len(tokens)), tokens.lengths)
    ids = np.concatenate([tokens.sequence(at) for at in range(len(tokens))])
    return csr_matrix((np.ones(ids.size), (rows, ids)), shape=(len(tokens), size))
