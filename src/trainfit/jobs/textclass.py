"""`train textclass`, `pairs` and `tokens`: labels of texts, pairs or words, given or made up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from trainfit.conf import Composed, TextFilesConfig
from trainfit.conf.schema import PairsData, TextFilesData, TokensData
from trainfit.core.errors import BadInput, TrainfitWarning, brief
from trainfit.data.columnar import shown_name
from trainfit.data.folds import Shares, check_apart, hold_out, keep_rare, make_folds
from trainfit.data.labels import (
    LabelKind,
    balanced_weights,
    class_order,
    count_classes,
    one_class,
    shown,
    strata_of,
)
from trainfit.data.row_files import check_file
from trainfit.data.synthetic import Texts, make_pairs, make_tagged, make_texts
from trainfit.data.text_files import Columns, read_chunks
from trainfit.data.token_cache import LabelledTokens, Progress, tokenize_file
from trainfit.data.tokens import (
    IGNORED,
    Dataset,
    IntArray,
    Tokens,
    tell_cut,
    tokenize_texts,
    tokenize_words,
)
from trainfit.jobs.configuration import Chosen, choose_weights, kind_of
from trainfit.jobs.encoder import PreparedEncoder
from trainfit.jobs.known_data import columns_of
from trainfit.jobs.run import train as train
from trainfit.jobs.targets import NamedClass
from trainfit.jobs.text_baselines import text_arrays

if TYPE_CHECKING:
    from trainfit.data.tokenizers import Tokenizer


_LEARN_FROM = 100_000
"""Texts that a tokenizer is learned from, at most."""


def prepare(composed: Composed, *, nested: bool = True) -> PreparedEncoder:
    """The texts, tokenised, in a split or in folds; `nested` as for NLI."""
    config = composed.config
    assert isinstance(config, TextFilesConfig)
    texts = training_texts(config)
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
        use=_use(config.data),
    )


def _use(data: TextFilesData) -> dict[str, Any]:
    """Describe the texts for `predict`: are there pairs, and in which columns do they stand?"""
    use: dict[str, Any] = {"pairs": True} if isinstance(data, PairsData) else {}
    if data.train is not None and not isinstance(data, TokensData):
        names = zip(("text", "second"), columns_of(data).texts, strict=False)
        use["columns"] = {role: name for role, name in names if shown_name(name) == name}
    return use


def training_texts(config: TextFilesConfig) -> Callable[[], Iterator[str]]:
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


# ── files or synthetic texts as train, validation and test ────────────────────────────────────────

_MOST_COMPARED = 1_000_000
"""Training rows that test rows are compared with, at most: all are in memory."""
_FEW = 0.01
"""Share of repeated test rows that is worth a warning."""


def load_text_files(
    train: Path | str,
    tokenizer: Tokenizer,
    *,
    validation: Path | str | None = None,
    test: Path | str | None = None,
    columns: Columns | None = None,
    kind: LabelKind | None = None,
    max_length: int,
    processes: int | None = None,
    progress: Progress | None = None,
    **shares: Unpack[Shares],
) -> tuple[Dataset, ...]:
    """Load a dataset per fold, or one; parts without a file are split from the training file."""

    def read(path: Path | str, part: str, known: list[str] | None = None) -> LabelledTokens:
        return tokenize_file(
            Path(path),
            tokenizer,
            max_length=max_length,
            columns=(columns or Columns()).of_part(part, alone=str(path) != str(train)),
            kind=kind,
            known=known,
            processes=processes,
            progress=progress,
        )

    base = read(train, "train")
    tagged = base.tokens.tags is not None
    if not tagged:  # of words those that were lost are counted
        tell_cut(base.tokens, max_length)
    known = None if tagged else base.classes
    others = {
        name: None if path is None else read(path, name, known)
        for name, path in (("validation", validation), ("test", test))
    }
    classes = base.classes
    if tagged:  # a rare tag may stand in one file alone
        every = [one.classes for one in others.values() if one is not None]
        classes = class_order(name for names in (classes, *every) for name in names)
    parts = {
        name: None if one is None else _same_classes(one, classes) for name, one in others.items()
    }
    datasets = text_datasets(_same_classes(base, classes), classes, **parts, **shares)
    _tell_alike(classes)
    _tell_repeated(datasets[0], tokenizer.unk_token_id)
    if not tagged:
        _tell_unmeasured(datasets[0], classes)
    return datasets


def _tell_alike(classes: Sequence[str]) -> None:
    """Warn of classes whose names differ in capitals or spaces alone."""
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault("".join(name.casefold().split()), []).append(shown(name))
    if said := [" and ".join(names) for names in alike.values() if len(names) > 1]:
        what = f"classes of their own: {brief(', '.join(said))}; write them alike where they mean"
        warnings.warn(f"{what} the same", TrainfitWarning, stacklevel=3)


def _tell_unmeasured(data: Dataset, classes: Sequence[str]) -> None:
    """Warn of classes that no row of the test or of the validation part has."""
    found = {
        name: sum(not count for count in data.metadata[name].get("by_class", ()))
        for name in ("test", "validation")
    }
    if said := [f"{count:,} in the {name} part" for name, count in found.items() if count]:
        what = f"of {len(classes):,} classes some have no row: {', '.join(said)}"
        why = "nothing is measured of them there; give more rows of them, or join rare classes"
        warnings.warn(f"{what}; {why}", TrainfitWarning, stacklevel=3)


def _tell_repeated(data: Dataset, unknown: int | None) -> None:
    """Warn of test rows that are in the training data too."""
    if len(data.train) > _MOST_COMPARED:
        return
    seen = set(_contents(data.train, unknown))
    repeated = sum(row in seen for row in _contents(data.test, unknown))
    if repeated >= max(1, _FEW * len(data.test)):
        what = f"{repeated:,} of {len(data.test):,} test rows are in the training data too"
        why = "scores will be too good; remove duplicates, or set data.group_column"
        warnings.warn(f"{what}: {why}", TrainfitWarning, stacklevel=3)


def _contents(tokens: Tokens, unknown: int | None) -> Iterator[bytes]:
    """Tokens of each sequence, unless one of them is unknown and may be any."""
    for start, length in zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True):
        row = tokens.ids[start : start + length]
        if unknown is None or unknown not in row:
            yield row.tobytes()


def text_datasets(
    tokens: Tokens,
    classes: Sequence[str],
    *,
    validation: Tokens | None = None,
    test: Tokens | None = None,
    folds: int | None = None,
    test_share: float = 0.2,
    validation_share: float = 0.2,
    seed: int = 0,
) -> tuple[Dataset, ...]:
    """Split tokenised texts into datasets; the held-out test set is taken first, unless given."""
    if len(classes) < 2 and tokens.labels.dtype.kind != "f":
        if not classes:
            raise BadInput("the training data has no label at all", "name the right column")
        raise one_class(classes[0])
    if validation is not None and folds is not None:
        fix = "leave one of them out"
        raise BadInput(f"cv.folds is {folds}, but there is a validation file", fix)
    if tokens.rows is None:
        tokens = replace(tokens, rows=np.arange(1, len(tokens) + 1))
    items, strata = np.arange(len(tokens)), _strata(tokens)
    if test is None:
        items, held = keep_rare(
            *hold_out(items, strata, tokens.groups, test_share, seed), strata, tokens.groups
        )
        test = tokens.subset(held)
    if validation is not None:
        return (_dataset(tokens.subset(items), validation, test, classes),)
    made = make_folds(
        items, strata, tokens.groups, folds=folds, share=validation_share, seed=seed + 1
    )
    sides = [keep_rare(fold.train, fold.validation, strata, tokens.groups) for fold in made]
    return tuple(
        _dataset(tokens.subset(train), tokens.subset(held), test, classes) for train, held in sides
    )


def _strata(tokens: Tokens) -> IntArray:
    """Group sequences for a split by their labels, or by the rarest tag of their words."""
    if tokens.tags is None:
        return strata_of(tokens.labels)
    words = tokens.truth
    rarity = np.argsort(np.argsort(-np.bincount(words[:, 1])))
    rarest = np.zeros(len(tokens), dtype=np.int64)
    np.maximum.at(rarest, words[:, 0], rarity[words[:, 1]])
    return rarest


def _same_classes(read: LabelledTokens, classes: list[str]) -> Tokens:
    """Renumber the labels as in the training data."""
    labels = read.tokens.labels
    if read.classes == classes:
        return read.tokens
    numbers = np.array([classes.index(name) for name in read.classes], dtype=np.int64)
    if read.tokens.tags is not None:
        tags = read.tokens.tags
        renumbered = np.where(tags < 0, IGNORED, numbers[np.maximum(tags, 0)])
        return replace(read.tokens, tags=renumbered.astype(np.int32))
    if labels.ndim == 2:
        table = np.zeros((len(labels), len(classes)), dtype=labels.dtype)
        table[:, numbers] = labels
        return replace(read.tokens, labels=table)
    return read.tokens if labels.dtype.kind == "f" else replace(read.tokens, labels=numbers[labels])


def _dataset(train: Tokens, validation: Tokens, test: Tokens, classes: Sequence[str]) -> Dataset:
    parts = {"train": train, "validation": validation, "test": test}
    groups = {name: part.groups for name, part in parts.items() if part.groups is not None}
    check_apart(groups)
    metadata: dict[str, Any] = {"classes": list(classes), **_learned(train, classes)}
    for name, part in parts.items():
        metadata[name] = {
            "texts": len(part),
            **_counted(part, len(classes)),
            "tokens": int(part.lengths.sum()),
            "mean_length": round(float(part.lengths.mean()), 1),
            "longest": int(part.lengths.max()),
        }
    return Dataset(**parts, metadata=metadata)


def _learned(tokens: Tokens, classes: Sequence[str]) -> dict[str, Any]:
    """Describe the training labels for the loss, with transformers' word for their kind."""
    labels = tokens.labels
    if tokens.tags is not None:
        counts = np.maximum(np.bincount(tokens.truth[:, 1], minlength=len(classes)), 1)
        weights = (counts.sum() / (len(classes) * counts)).tolist()
        return {"problem_type": "token_classification", "class_weights": weights}
    if labels.ndim == 2:
        return {"problem_type": "multi_label_classification"}
    if labels.dtype.kind != "f":
        weights = balanced_weights(labels, classes)
        kind = {"problem_type": NamedClass.problem_type, "metric": NamedClass.metric}
        return kind | {"class_weights": weights}
    mean, std = float(labels.mean()), float(labels.std())
    if not std:
        raise BadInput("all training labels are the same number", "give examples of others")
    return {"problem_type": "regression", "target_mean": mean, "target_std": std}


def _counted(tokens: Tokens, classes: int) -> dict[str, Any]:
    """Describe the labels of a part: texts or words by class, or the range of its numbers."""
    labels = tokens.labels
    if tokens.tags is not None:
        by_class = count_classes(tokens.truth[:, 1], classes)
        return {"words": sum(by_class), "by_class": by_class}
    if labels.dtype.kind == "f":
        figures = {"mean": labels.mean(), "std": labels.std(), "min": labels.min()}
        return {name: float(value) for name, value in (figures | {"max": labels.max()}).items()}
    if labels.ndim == 2:
        return {"by_class": labels.sum(0, dtype=np.int64).tolist()}
    return {"by_class": count_classes(labels, classes)}
