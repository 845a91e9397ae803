"""`train nli`: posts and criteria from ReDSM5 or made up, in a split or in folds by post."""

from __future__ import annotations

from functools import partial

import numpy as np

from trainfit.conf import Composed, NliConfig
from trainfit.data.folds import Folds, IntArray, check_folds, make_folds
from trainfit.data.redsm5 import (
    CRITERIA,
    Corpus,
    nli_dataset,
    read_redsm5,
    split_corpus,
    tokenize_corpus,
)
from trainfit.data.synthetic import make_corpus
from trainfit.jobs.baselines import pair_arrays
from trainfit.jobs.configuration import choose_weights
from trainfit.jobs.encoder import PreparedEncoder
from trainfit.jobs.run import train as train


def prepare(composed: Composed, *, nested: bool = True) -> PreparedEncoder:
    """The pairs, tokenised, in a split or in folds; `nested` as in split_parts."""
    config = composed.config
    assert isinstance(config, NliConfig)
    corpus = read_corpus(config)
    test, parts = split_parts(corpus, config, nested=nested)
    known = np.setdiff1d(np.arange(len(corpus.ids)), corpus.post_of[test])
    chosen = choose_weights(
        composed, lambda: [*(corpus.texts[post] for post in known), *corpus.criteria]
    )
    tokens = tokenize_corpus(corpus, chosen.tokenizer, config.data.max_length)
    ratio = config.data.negative_ratio
    datasets = [nli_dataset(tokens, part, negative_ratio=ratio, seed=config.seed) for part in parts]

    codes = [criterion.code for criterion in CRITERIA]
    return PreparedEncoder(
        composed=composed,
        chosen=chosen,
        datasets=tuple(datasets),
        ids=tuple([corpus.ids[post] for post in corpus.post_of[part.test]] for part in parts),
        baselines=partial(pair_arrays, corpus, parts, config.seed),
        use={"criteria": dict(zip(codes, corpus.criteria, strict=True))},
    )


def read_corpus(config: NliConfig) -> Corpus:
    """Read ReDSM5 where there is a copy, else make synthetic posts."""
    data = config.data
    if data.data_dir is None:
        return make_corpus(data.scale, config.seed, data.criteria)
    return read_redsm5(data.data_dir, data.criteria)


def split_parts(
    corpus: Corpus, config: NliConfig, *, nested: bool = True
) -> tuple[IntArray, tuple[Folds, ...]]:
    """The held-out test, and for each model its training, validation and scored pairs.

    In cross-validation a fold's own part is what its score is taken on, so the epoch is chosen by
    another part, split from the rest. The test stays out of it all. Where settings are compared
    and the test has the last word, folds are not `nested`: a fold's own part does both.
    """
    data, count = config.data, config.cv.folds
    whole = split_corpus(
        corpus,
        folds=count,
        test_share=data.test_share,
        validation_share=data.validation_share,
        seed=config.seed,
    )
    if count is None or not nested:
        return whole.test, tuple(Folds(test=whole.test, folds=(fold,)) for fold in whole.folds)
    strata = np.where(corpus.labels == 1, corpus.criterion_of + 1, 0)
    parts = []
    for number, fold in enumerate(whole.folds):
        [inner] = make_folds(
            fold.train,
            strata,
            corpus.post_of,
            folds=None,
            share=data.validation_share,
            seed=config.seed + 2 + number,
        )
        part = Folds(test=fold.validation, folds=(inner,))
        check_folds(part, corpus.post_of)
        parts.append(part)
    return whole.test, tuple(parts)
