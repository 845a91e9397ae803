"""Baselines of texts: the commonest answer, and a regression on TF-IDF of the tokens.

Words with tags get the commonest tag that each has in training.

Classes and labels get a logistic regression, numbers a ridge regression. Files of pairs count the
tokens of both texts together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainfit.data.tokens import IGNORED, Dataset, Tokens
from trainfit.jobs import metrics

IntArray = NDArray[np.int64]
Floats = NDArray[np.float64]
Arrays = dict[str, NDArray[Any]]
"""Data of all folds, as it is sent to a child process."""
_MOST = 50_000
"""Maximum number of texts that the regression learns from."""
_QUICK_LABELS = 10
"""Number of labels up to which each has a regression on `_MOST` texts; with more, on fewer."""
_PARTS = ("train", "validation", "test")
_FIELDS = ("starts", "lengths", "labels")


def text_arrays(datasets: Sequence[Dataset], seed: int, special: Sequence[int] = ()) -> Arrays:
    """Data of the baselines of a text classification; `special` tokens are of no word."""
    arrays: Arrays = {
        "seed": np.array(seed),
        "classes": np.array(list(map(str, datasets[0].metadata["classes"]))),
        "special": np.array(special, dtype=np.int64),
    }
    for number, dataset in enumerate(datasets):
        for name in _PARTS:
            part: Tokens = getattr(dataset, name)
            home = f"ids {id(part.ids)}"  # most parts share one array
            arrays |= {home: part.ids, f"{number}.{name}": np.array(home)}
            if part.tags is not None:
                arrays[f"tags of {home}"] = part.tags
            arrays |= {f"{number}.{name}.{field}": getattr(part, field) for field in _FIELDS}
    return arrays


def score_texts(arrays: Arrays) -> list[dict[str, float]]:
    """Score both baselines in each fold."""

    def part(place: str) -> Tokens:
        fields = {field: arrays[f"{place}.{field}"] for field in _FIELDS}
        home = str(arrays[place])
        return Tokens(ids=arrays[home], tags=arrays.get(f"tags of {home}"), **fields)

    return [
        text_baselines(
            Dataset(
                metadata={"classes": arrays["classes"].tolist()},
                **{name: part(f"{number}.{name}") for name in _PARTS},
            ),
            seed=int(arrays["seed"]),
            special=arrays["special"],
        )
        for number in range(sum(name.endswith(".test") for name in arrays))
    ]


def text_baselines(
    dataset: Dataset, *, seed: int = 0, special: IntArray | None = None
) -> dict[str, float]:
    """Score both baselines on the test set: F1, or for numbers the root mean squared error."""
    if dataset.train.tags is not None:
        return _tag_baselines(dataset, set([] if special is None else special.tolist()))
    if dataset.train.labels.ndim == 2:
        return _label_baselines(dataset, seed)
    if dataset.train.labels.dtype.kind == "f":
        return _number_baselines(dataset, seed)
    classes = len(dataset.metadata["classes"])
    labels = np.concatenate([dataset.train.labels, dataset.validation.labels])
    common = int(np.bincount(labels, minlength=classes).argmax())
    answers = np.tile(np.eye(classes)[common], (len(dataset.test), 1))
    found = {"majority": answers, "bag_of_words": _regression(dataset, classes, seed)}
    scored = {name: metrics.class_metrics(dataset.test.labels, one) for name, one in found.items()}
    return {
        f"{name}_{figure}": getattr(one, figure)
        for figure in ("f1", "macro_f1", "accuracy")
        for name, one in scored.items()
    }


def _label_baselines(dataset: Dataset, seed: int) -> dict[str, float]:
    """Micro F1 of the commonest set of labels, and of a regression for each label.

    The regressions' thresholds are chosen on the validation part, as the model's are.
    """
    truth = dataset.test.labels
    sets = np.concatenate([dataset.train.labels, dataset.validation.labels])
    common, counts = np.unique(sets, axis=0, return_counts=True)
    answers = np.tile(common[counts.argmax()], (len(truth), 1)).astype(np.float64)
    labels = truth.shape[1]
    most = _MOST * _QUICK_LABELS // max(labels, _QUICK_LABELS)
    chosen = np.random.default_rng(seed).permutation(len(dataset.train))[:most]
    train = dataset.train.subset(chosen)
    known, *asked = weigh_tokens((train, dataset.validation, dataset.test))
    found = [
        np.stack([regress(known, train.labels[:, k], one, 10.0) for k in range(labels)], axis=1)
        for one in asked
    ]
    thresholds = metrics.best_thresholds(dataset.validation.labels, found[0])
    return {
        "majority_f1": metrics.label_metrics(truth, answers, [0.5] * labels).f1,
        "bag_of_words_f1": metrics.label_metrics(truth, found[1], thresholds).f1,
    }


def _tag_baselines(dataset: Dataset, special: set[int]) -> dict[str, float]:
    """F1 of one tag for all words, O where there is one, and of each word's commonest tag."""
    names = dataset.metadata["classes"]
    known = [*_words(dataset.train, special), *_words(dataset.validation, special)]
    every = Counter(tag for _, tag in known)
    usual = names.index("O") if "O" in names else every.most_common(1)[0][0]
    each: dict[tuple[int, ...], Counter[int]] = {}
    for word, tag in known:
        each.setdefault(word, Counter())[tag] += 1
    common = {word: tags.most_common(1)[0][0] for word, tags in each.items()}
    truth = dataset.test.truth
    found = [common.get(word, usual) for word, _ in _words(dataset.test, special)]
    name = "all_o_f1" if "O" in names else "majority_f1"
    return {
        name: metrics.tag_metrics(truth, np.full(len(truth), usual), names).f1,
        "word_tags_f1": metrics.tag_metrics(truth, np.array(found), names).f1,
    }


def _words(tokens: Tokens, special: set[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield each word with a tag as its tokens, and its tag."""
    assert tokens.tags is not None
    for at, start in enumerate(tokens.starts.tolist()):
        tags = tokens.tags[start : start + int(tokens.lengths[at])]
        begun = np.flatnonzero(tags != IGNORED)
        for word, place in zip(np.split(tokens.sequence(at), begun)[1:], begun, strict=True):
            yield tuple(token for token in word.tolist() if token not in special), int(tags[place])


def _number_baselines(dataset: Dataset, seed: int) -> dict[str, float]:
    """Root of the mean squared error of the mean, and of a ridge regression on words."""
    from sklearn.linear_model import Ridge

    truth = dataset.test.labels
    chosen = np.random.default_rng(seed).permutation(len(dataset.train))[:_MOST]
    train = dataset.train.subset(chosen)
    known, asked = weigh_tokens((train, dataset.test))
    mean = float(dataset.train.labels.mean())
    found = Ridge(alpha=1.0).fit(known, train.labels).predict(asked)
    return {
        "mean_rmse": metrics.number_metrics(truth, np.full(len(truth), mean)).rmse,
        "bag_of_words_rmse": metrics.number_metrics(truth, found).rmse,
    }


def weigh_tokens(parts: Sequence[Tokens]) -> list[Any]:
    """TF-IDF of the tokens of each text, by those of the first part."""
    from sklearn.feature_extraction.text import TfidfTransformer

    size = 1 + max(int(part.ids.max()) for part in parts)
    counts = [count_tokens(part, size) for part in parts]
    weigh = TfidfTransformer(sublinear_tf=True).fit(counts[0])
    return [weigh.transform(count) for count in counts]


def _regression(dataset: Dataset, classes: int, seed: int) -> Floats:
    """Probabilities of the classes on the test set."""
    from scipy.sparse import vstack
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.linear_model import LogisticRegression
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
    found = np.zeros((len(dataset.test), classes))  # a rare class may not be among the chosen
    found[:, model.classes_] = model.predict_proba(count_tokens(dataset.test, size))
    return found


def count_tokens(tokens: Tokens, size: int) -> Any:
    """Count each token in each text, as a sparse matrix."""
    from scipy.sparse import csr_matrix

    rows = np.repeat(np.arange(len(tokens)), tokens.lengths)
    ids = np.concatenate([tokens.sequence(at) for at in range(len(tokens))])
    return csr_matrix((np.ones(ids.size), (rows, ids)), shape=(len(tokens), size))


def best_threshold(labels: IntArray, scores: Floats) -> tuple[float, float]:
    """Return the threshold with the best F1 on these (training) labels, and that F1."""
    grid = np.unique(np.quantile(scores, np.linspace(0, 1, 101)))
    every, positive = np.sort(scores), np.sort(scores[labels == 1])
    predicted = every.size - np.searchsorted(every, grid)
    hits = positive.size - np.searchsorted(positive, grid)
    f1s = 2 * hits / np.maximum(predicted + positive.size, 1)
    best = int(np.argmax(f1s))
    return float(grid[best]), float(f1s[best])


def regress(known: Any, labels: IntArray, asked: Any, strength: float) -> Floats:
    """Probability of label 1 for each asked row; constant where there is nothing to learn."""
    from sklearn.linear_model import LogisticRegression

    if labels.min() == labels.max() or not known.shape[1]:
        return np.full(asked.shape[0], float(labels.mean()))
    model = LogisticRegression(class_weight="balanced", C=strength, solver="liblinear")
    probabilities: Floats = model.fit(known, labels).predict_proba(asked)[:, 1]
    return probabilities
