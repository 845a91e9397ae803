"""Data of a job as `plan` sees it, without a tokenizer and without torch: counts and lengths.

A file of texts is read and its words are counted; token files have a header; a text to pretrain on
has a size. Where nothing is named, lengths are assumed, and the plan says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainfit.conf import Composed
from trainfit.conf.schema import GptConfig, TextFilesConfig
from trainfit.data.corpus import find_texts
from trainfit.data.text_files import infer_labels, read_chunks
from trainfit.data.token_files import read_header
from trainfit.jobs import gpt_choice
from trainfit.jobs.text_sources import columns_of

# ReDSM5 as published: words per post, and pairs of a post with nine criteria.
_POSTS, _CRITERIA, _MEAN_WORDS, _SPREAD, _TOKENS_PER_WORD = 1484, 9, 294.7, 0.9, 1.3
_GPT_TOKENS = 10_000_000
"""An epoch of pretraining where no data is named: about the standard library of Python."""
_SPECIAL = 2
"""Tokens around a text."""
_BLOCKS = 4096
"""Blocks of one length that stand for all of them."""
_NAMED_NOTHING = {
    "nli": "1,484 posts with 9 criteria each, as long as ReDSM5's",
    "textclass": "10,000 texts of about a third of data.max_length",
    "pairs": "10,000 pairs of about a third of data.max_length",
    "tokens": "10,000 sentences of about a third of data.max_length",
    "gpt": "10 million tokens, about as many as Python's standard library has",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownData:
    """Counts of the data that a job names."""

    lengths: tuple[int, ...]
    sequences: int
    about: str
    """The data in words."""
    assumed: tuple[str, ...] = ()


def known_data(composed: Composed) -> KnownData | None:
    """Look at the data that the configuration names; None where it names none."""
    config = composed.config
    if isinstance(config, GptConfig):
        return _tokens(composed)
    if isinstance(config, TextFilesConfig) and config.data.train is not None:
        return _texts(config, Path(config.data.train))
    return None


def assumption(composed: Composed) -> str:
    """Say which data is assumed, and why."""
    named = getattr(composed.config.data, "data_dir", None) is not None
    why = "the data is read by train alone" if named else "no data is named"
    return f"{_NAMED_NOTHING[composed.task]}: {why}"


def _tokens(composed: Composed) -> KnownData | None:
    config = composed.config
    assert isinstance(config, GptConfig)
    if config.data.data_dir is None:
        return None
    place, text = Path(config.data.data_dir), gpt_choice.text_of(composed)
    assumed: tuple[str, ...] = ()
    if text is None:
        tokens = read_header(place).train.tokens
    else:
        size = sum(path.stat().st_size for path in find_texts(text))
        tokens = gpt_choice.count_tokens(size, config.data.vocab_size)
        assumed = (f"{tokens:,} tokens, by the size of the text",)
    block = config.data.max_length
    blocks = max(1, (tokens - 1) // block)
    return KnownData(
        lengths=(block,) * min(blocks, _BLOCKS),
        sequences=blocks,
        about=f"{place.name}: {tokens:,} tokens to train on",
        assumed=assumed,
    )


def _texts(config: TextFilesConfig, path: Path) -> KnownData:
    """Count the words of the texts, and the classes; no text is kept."""
    data = config.data
    columns = columns_of(data)
    kind = infer_labels(path, columns, data.target)
    words: list[int] = []
    classes: set[str] = set()
    for chunk in read_chunks(path, columns, kind=kind):
        words += [len(" ".join(row).split()) for row in chunk.rows]
        for label in () if kind.target == "regression" else chunk.labels:
            classes |= {label} if isinstance(label, str) else set(label)  # type: ignore[arg-type]
    rows = len(words)
    shares = [
        share
        for share, other in (
            (data.test_share, data.test),
            (data.validation_share, data.validation),
        )
        if other is None
    ]
    kept = max(1, round(rows * float(np.prod([1 - share for share in shares]))))
    tokens = np.round(np.array(words) * _TOKENS_PER_WORD).astype(np.int64) + _SPECIAL
    trained = np.random.default_rng(0).permutation(tokens)[:kept]
    count = f", {len(classes):,} classes" if classes else ""
    return KnownData(
        lengths=tuple(trained.tolist()),
        sequences=kept,
        about=f"{path.name}: {rows:,} rows{count}, {kept:,} of them to train on",
        assumed=(f"{_TOKENS_PER_WORD} tokens per word of {path.name}",),
    )


def assumed_lengths(task: str, longest: int) -> Any:
    """Lengths where the data is not here: ReDSM5's, short texts, or full blocks."""
    if task == "gpt":
        return np.full(max(1, _GPT_TOKENS // longest), longest)
    draws = np.random.default_rng(0)
    if task in ("textclass", "pairs", "tokens"):
        words = np.exp(np.log(0.35 * longest) + 0.6 * draws.standard_normal(10_000))
        return np.clip(np.round(words), 3, longest).astype(np.int64)
    middle = np.log(_MEAN_WORDS) - _SPREAD**2 / 2
    words = np.exp(middle + _SPREAD * draws.standard_normal(_POSTS))
    tokens = np.maximum(2, np.round(words * _TOKENS_PER_WORD)).astype(np.int64)
    criteria = draws.integers(12, 40, _CRITERIA)
    return np.minimum(tokens[:, None] + criteria, longest).ravel()
