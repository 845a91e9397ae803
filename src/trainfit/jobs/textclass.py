"""`train textclass`, `pairs` and `tokens`: labels of texts, pairs or words, given or made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from trainfit.conf import Composed, TextFilesConfig
from trainfit.conf.schema import PairsData, TokensData
from trainfit.data.labelled_texts import load_text_files, text_datasets
from trainfit.data.labels import class_order
from trainfit.data.row_files import check_file
from trainfit.data.synthetic import Texts, make_pairs, make_tagged, make_texts
from trainfit.data.text_files import read_chunks
from trainfit.data.tokens import Dataset, tokenize_texts, tokenize_words
from trainfit.jobs.configuration import Chosen, choose_weights, kind_of
from trainfit.jobs.encoder import PreparedEncoder
from trainfit.jobs.known_data import columns_of
from trainfit.jobs.run import train as train
from trainfit.jobs.text_baselines import text_arrays

_LEARN_FROM = 100_000
"""Texts that a tokenizer is learned from, at most."""


def prepare(composed: Composed, *, nested: bool = True) -> PreparedEncoder:
    """The texts, tokenised, in a split or in folds; `nested` as for NLI."""
    config = composed.config
    assert isinstance(config, TextFilesConfig)
    texts = read_texts(config)
    chosen = choose_weights(composed, lambda: islice(texts(), _LEARN_FROM))
    whole = _load(config, chosen)
    plain = config.cv.folds is None or not nested
    datasets = whole if plain else _nested(whole, config)
    return PreparedEncoder(
        composed=composed,
        chosen=chosen,
        datasets=datasets,
        ids=tuple(
            [str(row) for row in data.test.rows] for data in datasets if data.test.rows is not None
        ),
        baselines=partial(
            text_arrays, datasets, config.seed, special=chosen.tokenizer.all_special_ids
        ),
        use={"pairs": True} if isinstance(config.data, PairsData) else {},
    )


def read_texts(config: TextFilesConfig) -> Callable[[], Iterator[str]]:
    """Return a function that reads the training texts; each call reads them from the start."""
    data, kind = config.data, kind_of(config)
    if isinstance(data, TokensData) and data.train is None:
        rows, _ = make_tagged(data.scale, config.seed)
        return lambda: map(" ".join, rows)
    if data.train is None:
        made = _make(config)
        return lambda: chain(made.texts, made.seconds or ())
    columns = columns_of(data)
    path = check_file(Path(data.train), columns.kinds)
    return lambda: (text for chunk in read_chunks(path, columns, kind=kind) for text in chunk.plain)


def _make(config: TextFilesConfig) -> Texts:
    make = make_pairs if isinstance(config.data, PairsData) else make_texts
    return make(config.data.scale, config.seed, kind_of(config).target)


def _load(config: TextFilesConfig, chosen: Chosen) -> tuple[Dataset, ...]:
    data, kind = config.data, kind_of(config)
    shares: dict[str, Any] = {
        "folds": config.cv.folds,
        "test_share": data.test_share,
        "validation_share": data.validation_share,
        "seed": config.seed,
    }
    if isinstance(data, TokensData) and data.train is None:
        rows, tags = make_tagged(data.scale, config.seed)
        names = class_order(tag for row in tags for tag in row)
        numbers = [[names.index(tag) for tag in row] for row in tags]
        words = tokenize_words(chosen.tokenizer, rows, numbers, max_length=data.max_length)
        return text_datasets(words, names, **shares)
    if data.train is None:
        made = _make(config)
        tokens = tokenize_texts(
            chosen.tokenizer,
            made.texts,
            made.labels,
            seconds=made.seconds,
            max_length=data.max_length,
        )
        return text_datasets(tokens, made.classes, **shares)
    return load_text_files(
        data.train,
        chosen.tokenizer,
        validation=data.validation,
        test=data.test,
        columns=columns_of(data),
        kind=kind,
        max_length=data.max_length,
        **shares,
    )


def _nested(folds: Sequence[Dataset], config: TextFilesConfig) -> tuple[Dataset, ...]:
    """Each fold scored on its own part, with the epoch chosen by a part of the rest."""
    return tuple(
        text_datasets(
            fold.train,
            fold.metadata["classes"],
            test=fold.validation,
            validation_share=config.data.validation_share,
            seed=config.seed + 2 + number,
        )[0]
        for number, fold in enumerate(folds)
    )
