"""Tags of the words of new sentences, by a model of `train tokens`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.data.tokens import tokenize_words
from trainfit.jobs.predict import load_export, predict_within
from trainfit.jobs.targets import Outputs, target_of


def answer_words(folders: Sequence[Path], rows: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return a row for each word: its sentence's number, its tag, and the tag's probability.

    The probabilities are the mean over the exports. Words beyond the model's length have no tag.
    """
    if not rows:
        raise BadInput("there is no word to tag", "give a file with a sentence per row")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total: Outputs | None = None
    for folder in folders:
        exported = load_export(folder, device)
        facts, places = exported.facts, [np.arange(len(row)) for row in rows]
        # The place of a word stands for its tag: it tells which words have an output.
        tokens = tokenize_words(exported.tokenizer, rows, places, max_length=facts["max_length"])
        found, _ = predict_within(
            exported.model,
            tokens,
            facts["eval_batch_size"],
            pad_id=facts["pad_id"],
            target=target_of(facts),
        )
        total = found if total is None else total + found
    assert total is not None
    names, chances = facts["classes"], total / len(folders)
    there = {(row, word): at for at, (row, word) in enumerate(tokens.truth.tolist())}
    if lost := sum(map(len, rows)) - len(there):
        what = f"{lost:,} words have no tag: they are beyond the {facts['max_length']} tokens of"
        warnings.warn(f"{what} a sentence, or without any token", TrainfitWarning, stacklevel=2)
    answers = []
    for row, words in enumerate(rows):
        for place, word in enumerate(words):
            at = there.get((row, place))
            best = None if at is None else int(chances[at].argmax())
            tag = {} if best is None else {"tag": names[best], "p": float(chances[at, best])}
            answers.append({"row": row + 1, "word": word, "tag": None, "p": None} | tag)
    return answers
