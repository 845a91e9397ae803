"""Invented words and sentences of them: what made-up data is written in.

A sentence is about the writer or about someone else, as its first word says. Whether a cue in it
counts depends on that word alone. A word stands between the two, so that neither words nor pairs
of neighbours tell.
"""

from __future__ import annotations

from itertools import product

import numpy as np

_WORDS = [
    "".join(pair)
    for pair in product(
        ("ba", "de", "fi", "go"),
        ("lan", "mor", "nik", "pel", "rus", "sam", "ton", "vid"),
    )
]
_WRITER = "mi"
_SOMEONE = "tu"
CUES = tuple(_WORDS[:12])
_FILLERS = tuple(_WORDS[12:])
SENTENCE = 4
"""Words of a sentence that holds a cue; the last of a text may have fewer."""


def sentence(words: int, cue: str | None, about_writer: bool, random: np.random.Generator) -> str:
    """A sentence of so many words, with the cue in third place."""
    rest = [_FILLERS[number] for number in random.integers(len(_FILLERS), size=words - 1)]
    if cue is not None:
        rest[1] = cue
    return f"{' '.join([_WRITER if about_writer else _SOMEONE, *rest])}."


def compose(
    words: int, telling: list[tuple[str, bool]], random: np.random.Generator
) -> tuple[list[str], list[int]]:
    """Sentences of so many words in all, and which of them tell each cue.

    `telling` has the cues, and whether each is told of the writer; the other sentences are about
    either, so that the first words alone say nothing.
    """
    whole, rest = divmod(words, SENTENCE)
    places = [int(n) for n in random.choice(whole, len(telling), replace=False)] if telling else []
    told = dict(zip(places, telling, strict=True))
    sizes = [SENTENCE] * whole + ([rest] if rest else [])
    sentences = []
    for place, size in enumerate(sizes):
        cue, about_writer = told.get(place, (None, bool(random.integers(2))))
        sentences.append(sentence(size, cue, about_writer, random))
    return sentences, places
