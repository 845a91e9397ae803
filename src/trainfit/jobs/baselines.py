"""Baselines that a model must beat: the majority class, and TF-IDF with a logistic regression.

Both see exactly the folds that the model sees. The regression's variant and threshold are chosen by
cross-validation inside the training part, without the held-out data. Words are counted once for all
folds. Beside a GPU a child process scores them while the model trains (`in_background`).
"""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainfit.core.libraries import end_with_parent, search_path
from trainfit.data.folds import Folds, make_folds
from trainfit.data.redsm5 import Corpus
from trainfit.jobs.metrics import Metrics, binary_metrics
from trainfit.jobs.text_baselines import Arrays, best_threshold, regress, score_texts

IntArray = NDArray[np.int64]
Floats = NDArray[np.float64]
VARIANTS = ((False, 1.0), (False, 10.0), (True, 1.0), (True, 10.0))
"""Single words, or words and pairs (True), with more or less regularisation."""
_INNER_FOLDS = 3


def score(arrays: Arrays) -> dict[str, float]:
    """Mean score of both baselines over the folds."""
    each = _score_pairs(arrays) if "evidence" in arrays else score_texts(arrays)
    return {name: float(np.mean([fold[name] for fold in each])) for name in each[0]}


# ── pairs of a post and a criterion ───────────────────────────────────────────────────────────


def pair_arrays(corpus: Corpus, parts: Sequence[Folds], seed: int) -> Arrays:
    """Data of the baselines of NLI."""
    texts = [text.encode("utf-8", "surrogatepass") for text in corpus.texts]
    arrays = {
        "texts": np.frombuffer(b"".join(texts), np.uint8),
        "sizes": np.array([len(text) for text in texts]),
        "evidence": corpus.evidence,
        "seed": np.array(seed),
    }
    for number, part in enumerate(parts):
        seen = [part.folds[0].train, part.folds[0].validation]
        arrays |= {f"{number}.seen": np.sort(np.concatenate(seen)), f"{number}.held": part.test}
    return arrays


def _score_pairs(arrays: Arrays) -> list[dict[str, float]]:
    whole, ends, evidence = arrays["texts"].tobytes(), arrays["sizes"].cumsum(), arrays["evidence"]
    starts = ends - arrays["sizes"]
    posts, criteria = evidence.shape
    corpus = Corpus(
        ids=("",) * posts,
        texts=tuple(
            whole[a:b].decode("utf-8", "surrogatepass") for a, b in zip(starts, ends, strict=True)
        ),
        criteria=("",) * criteria,
        evidence=evidence,
    )
    counts = count_words(corpus.texts)
    scored = []
    for number in range(sum(name.endswith(".held") for name in arrays)):
        seen, held = arrays[f"{number}.seen"], arrays[f"{number}.held"]
        words = tfidf_baseline(corpus, seen, held, seed=int(arrays["seed"]), counts=counts)
        majority = majority_baseline(corpus, seen, held)
        scored.append({"majority_f1": majority.f1, "bag_of_words_f1": words.f1})
    return scored


def majority_baseline(corpus: Corpus, train: IntArray, held: IntArray) -> Metrics:
    """Predict each criterion's more common training label; F1 is 0 where that is the negative."""
    scores = np.zeros(held.size)
    for k in range(len(corpus.criteria)):
        of_train, of_held = (corpus.criterion_of[part] == k for part in (train, held))
        if of_train.any():
            scores[of_held] = float(corpus.labels[train[of_train]].mean() > 0.5)
    return binary_metrics(corpus.labels[held], scores)


Counts = tuple[Any, NDArray[np.bool_]]
"""Sparse counts of words and pairs of words in each text, and which columns are pairs."""


def count_words(texts: Sequence[str]) -> Counts:
    """Count words and pairs of words in each text."""
    from scipy.sparse import csr_matrix
    from sklearn.feature_extraction.text import CountVectorizer

    counter = CountVectorizer(ngram_range=(1, 2), dtype=np.float64)
    try:
        counts = counter.fit_transform(texts)
    except ValueError:  # no text has a word of two letters
        return csr_matrix((len(texts), 0)), np.zeros(0, dtype=np.bool_)
    return counts, np.array([" " in name for name in counter.get_feature_names_out()])


def tfidf_baseline(
    corpus: Corpus, train: IntArray, held: IntArray, *, seed: int = 0, counts: Counts | None = None
) -> Metrics:
    """Fit TF-IDF and a logistic regression for each criterion; `counts` are those of the texts."""
    fit = partial(_fit_and_score, corpus, count_words(corpus.texts) if counts is None else counts)
    strata = np.where(corpus.labels == 1, corpus.criterion_of + 1, 0)
    inner = np.zeros((len(VARIANTS), corpus.labels.size))
    for fold in make_folds(train, strata, corpus.post_of, folds=_INNER_FOLDS, share=0.5, seed=seed):
        inner[:, fold.validation] = fit(fold.train, fold.validation, VARIANTS)
    choices = [best_threshold(corpus.labels[train], scores[train]) for scores in inner]
    best = max(range(len(VARIANTS)), key=lambda n: choices[n][1])
    [scores] = fit(train, held, VARIANTS[best : best + 1])
    return binary_metrics(corpus.labels[held], scores, choices[best][0])


def _fit_and_score(
    corpus: Corpus,
    counts: Counts,
    train: IntArray,
    held: IntArray,
    variants: Sequence[tuple[bool, float]],
) -> Floats:
    """Scores `[variants, held]`: one regression per criterion on the words of the posts."""
    known = np.unique(corpus.post_of[train])
    tables = {pairs: _weigh(counts, known, pairs) for pairs in {pairs for pairs, _ in variants}}
    scores = np.zeros((len(variants), held.size))
    for k in range(len(corpus.criteria)):
        part, asked = (side[corpus.criterion_of[side] == k] for side in (train, held))
        if not part.size or not asked.size:
            continue
        for row, (pairs, strength) in enumerate(variants):
            table = tables[pairs]
            scores[row, corpus.criterion_of[held] == k] = regress(
                table[corpus.post_of[part]],
                corpus.labels[part],
                table[corpus.post_of[asked]],
                strength,
            )
    return scores


def _weigh(counts: Counts, known: IntArray, pairs: bool) -> Any:
    """TF-IDF of all texts by the words of the known ones alone, as if no other was counted."""
    from sklearn.feature_extraction.text import TfidfTransformer

    table, is_pair = counts
    seen = table[known].getnnz(axis=0) > 0
    columns = table[:, np.flatnonzero(seen if pairs else seen & ~is_pair)]
    if not columns.shape[1]:
        return columns
    columns.sort_indices()  # else each regression would
    return TfidfTransformer(sublinear_tf=True).fit(columns[known]).transform(columns)


# ── in the background ─────────────────────────────────────────────────────────────────────────

_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
_PATIENCE = 120.0
"""Seconds to wait for the child once it is asked: on a busy machine its priority starves it."""
_MOST_BYTES = 1 << 28
"""Larger data is scored after the training, in this process."""


@contextmanager
def in_background(
    arrays: Callable[[], Arrays], *, cores: int
) -> Iterator[Callable[[], dict[str, float]]]:
    """Score in a child process, on one core and at a low priority, where any is idle.

    `cores` is the number of idle ones. The function that is given waits for the scores, or computes
    them here where no child has them. Data goes through a pipe: no text is written to a file.
    """
    if cores < 1:
        yield lambda: score(arrays())
        return
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "trainfit.jobs.baselines"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **_ONE_THREAD, "PYTHONPATH": search_path(), "CUDA_VISIBLE_DEVICES": ""},
    )
    # In a thread: the pipe is full until the child has been started.
    pool = ThreadPoolExecutor(1)
    answer = pool.submit(lambda: child.communicate(_packed(arrays()))[0])

    def wait() -> dict[str, float]:
        try:
            said = answer.result(_PATIENCE)
        except TimeoutError:
            said = b""
        scores: dict[str, float] = json.loads(said) if said else score(arrays())
        return scores

    try:
        yield wait
    finally:
        child.kill()
        pool.shutdown()


def _packed(arrays: Arrays) -> bytes:
    """Pack the data for the child; no bytes where it is too large."""
    data = io.BytesIO()
    if sum(array.nbytes for array in arrays.values()) <= _MOST_BYTES:
        np.savez(data, allow_pickle=False, **arrays)
    return data.getvalue()


def main() -> None:
    """Run the child: read the data, write the scores as a line."""
    if hasattr(os, "nice"):
        os.nice(10)
    end_with_parent()
    gc.disable()  # it imports for half of its time, and ends soon
    if sent := sys.stdin.buffer.read():
        with np.load(io.BytesIO(sent), allow_pickle=False) as arrays:
            print(json.dumps(score(dict(arrays))), flush=True)


if __name__ == "__main__":
    main()
