"""Data of ReDSM5's shape, made from a seed out of invented words: nobody's posts.

A post is a row of short sentences, each about the writer or about someone else: its first word
says whom. A sentence about the writer that holds a cue of a criterion is evidence of it; one
about someone else with the same cue is none (status 0). So a count of words finds the cue but
not whom it is about, and only a model that reads the order tells the two apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainfit.data.redsm5 import (
    CRITERIA,
    SPECIAL_CASE,
    Annotation,
    Corpus,
    Post,
    Wording,
    label_posts,
)

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


Scale = Literal["small", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much to make."""

    posts: int
    positives: tuple[int, ...]
    """Posts with evidence, by criterion."""
    special: int
    without: int
    """Posts without evidence of anything."""
    words: float
    """Mean per post."""
    shortest: int
    longest: int
    spread: float
    """Of the logarithm of the words per post."""
    lures: float
    """Posts with a sentence that holds a criterion's cue but is about someone else, for each post
    with evidence of it."""


SIZES: dict[Scale, Size] = {
    "full": Size(
        posts=1484,
        positives=(328, 124, 44, 102, 35, 124, 311, 59, 165),
        special=92,
        without=392,
        words=294.7,
        shortest=2,
        longest=6990,
        spread=1.11,
        lures=1.5,
    ),
    "small": Size(
        posts=1000,
        positives=(221, 84, 30, 69, 24, 84, 210, 40, 111),
        special=62,
        without=264,
        words=15,
        shortest=2,
        longest=48,
        spread=0.4,
        lures=2.0,
    ),
}


def make_corpus(scale: Scale = "small", seed: int = 0, wording: Wording = "short") -> Corpus:
    """The made-up corpus, labelled as the real one is."""
    drafts = list(make_drafts(scale, seed))
    posts = [Post(id=draft.id, text=" ".join(draft.sentences)) for draft in drafts]
    annotations = [
        Annotation(post_id=draft.id, symptom=mark.symptom, status=mark.status, place="synthetic")
        for draft in drafts
        for mark in draft.marks
    ]
    return label_posts(posts, annotations, criteria_texts(wording))


def criteria_texts(wording: Wording) -> list[str]:
    """Made-up criteria: each names its cue, as a real one names what to look for."""
    cues = CUES[: len(CRITERIA)]
    return [cue if wording == "short" else f"the writer tells of {cue}" for cue in cues]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    sentence: int
    symptom: str
    status: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    id: str
    sentences: list[str]
    marks: list[_Mark]


def make_drafts(scale: Scale, seed: int) -> Iterator[_Draft]:
    """Posts of a seed as sentences, with the symptoms that sentences are marked with."""
    size = SIZES[scale]
    random = np.random.default_rng((seed, 5))
    evidence = _spread_evidence(size, random)
    lures = _spread_lures(size, random)
    told = evidence.sum(1) + lures.sum(1)
    lengths = _assign_lengths(_lengths(size), told, random)
    special = set(random.choice(np.flatnonzero(evidence.any(1)), size.special, replace=False))
    for number in range(size.posts):
        kinds = [(int(k), True) for k in np.flatnonzero(evidence[number])]
        kinds += [(int(k), False) for k in np.flatnonzero(lures[number])]
        sentences, places = compose(
            int(lengths[number]), [(CUES[k], status) for k, status in kinds], random
        )
        marks = [
            _Mark(sentence=place, symptom=CRITERIA[k].symptom, status=status)
            for place, (k, status) in zip(places, kinds, strict=True)
        ]
        if number in special:
            marks.append(_Mark(sentence=0, symptom=SPECIAL_CASE, status=True))
        post_id = f"s_{random.integers(1, 3000)}_{number}"
        yield _Draft(id=post_id, sentences=sentences, marks=marks)


def _spread_evidence(size: Size, random: np.random.Generator) -> NDArray[np.bool_]:
    """Which posts give evidence of what: the exact number of each criterion, and none in some."""
    evidence = np.zeros((size.posts, len(CRITERIA)), dtype=np.bool_)
    some = random.permutation(size.posts)[size.without :]
    # Dealt round, every one of them gets something before one gets more.
    at = 0
    for k in random.permutation(np.repeat(np.arange(len(CRITERIA)), size.positives)):
        while evidence[some[at % some.size], k]:
            at += 1
        evidence[some[at % some.size], k] = True
        at += 1
    return evidence


def _spread_lures(size: Size, random: np.random.Generator) -> NDArray[np.bool_]:
    """Which posts hold a cue that is no evidence; some give evidence of the same as well."""
    lures = np.zeros((size.posts, len(CRITERIA)), dtype=np.bool_)
    for k, positives in enumerate(size.positives):
        lures[random.choice(size.posts, round(positives * size.lures), replace=False), k] = True
    return lures


def _lengths(size: Size) -> NDArray[np.int64]:
    """Words per post, ascending: log-normal, with the shortest, the longest and the mean exact."""
    shares = (np.arange(size.posts) + 0.5) / size.posts
    normal = np.array([NormalDist().inv_cdf(share) for share in shares])
    inner = np.exp(size.spread * normal)[1:-1]
    total = round(size.words * size.posts) - size.shortest - size.longest
    inner = np.clip(inner * total / inner.sum(), size.shortest, size.longest).astype(np.int64)
    middle = inner.size // 2
    missing = total - int(inner.sum())
    inner[middle:] += np.diff(np.linspace(0, missing, inner.size - middle + 1).astype(np.int64))
    return np.sort([size.shortest, *np.clip(inner, size.shortest, size.longest), size.longest])


def _assign_lengths(
    lengths: NDArray[np.int64], told: NDArray[np.int64], random: np.random.Generator
) -> NDArray[np.int64]:
    """A length for each post, at random among those that can hold what it tells."""
    free = list(lengths)
    assigned = np.zeros(told.size, dtype=np.int64)
    for number in sorted(random.permutation(told.size), key=lambda n: -told[n]):
        fitting = int(np.searchsorted(free, told[number] * SENTENCE))
        assigned[number] = free.pop(int(random.integers(fitting, len(free))))
    return assigned


CLASSES = ("clean", "flagged")
_COUNT: dict[Scale, int] = {"small": 1200, "full": 20_000}
_TEXT_WORDS: dict[Scale, tuple[int, int]] = {"small": (8, 40), "full": (8, 160)}
_FLAGGED = 0.2
_LURED = 0.4
"""The share of clean texts that hold a cue too."""
_CUES = CUES[9:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Texts and the class of each."""

    texts: list[str] = field(repr=False)
    labels: NDArray[np.int64] = field(repr=False)


def make_texts(scale: Scale = "small", seed: int = 0) -> Texts:
    """The made-up texts of a seed, with the share of flagged ones exact."""
    random = np.random.default_rng((seed, 9))
    count = _COUNT[scale]
    labels = random.permutation(np.arange(count) < round(_FLAGGED * count)).astype(np.int64)
    return Texts(
        texts=[_text(_TEXT_WORDS[scale], bool(label), random) for label in labels], labels=labels
    )


def _text(words: tuple[int, int], flagged: bool, random: np.random.Generator) -> str:
    low, high = np.log(words)
    size = max(SENTENCE, round(float(np.exp(random.uniform(low, high)))))
    cue = _CUES[int(random.integers(len(_CUES)))]
    telling = [(cue, flagged)] if flagged or random.random() < _LURED else []
    return " ".join(compose(size, telling, random)[0])
