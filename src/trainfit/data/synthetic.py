"""Synthetic data: ReDSM5's shape and short labelled texts, from a seed and invented words.

A post is a row of short sentences, each about the writer or about someone else, as its first word
tells. A sentence about the writer with a criterion's cue word is evidence of it; one about someone
else with the same cue is not (status 0). So counting words is not enough: a model must read their
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainfit.data.labels import VALUE, Target
from trainfit.data.redsm5 import CRITERIA, SPECIAL_CASE, Annotation, Corpus, Wording, label_posts

_WORDS = [
    "".join(pair)
    for pair in product(
        ("ba", "de", "fi", "go"), ("lan", "mor", "nik", "pel", "rus", "sam", "ton", "vid")
    )
]
_WRITER = "mi"
_SOMEONE = "tu"
CUES = tuple(_WORDS[:12])
_FILLERS = tuple(_WORDS[12:])
SENTENCE = 4
"""Words per sentence; the last sentence of a text may have fewer."""


def sentence(words: int, cue: str | None, about_writer: bool, random: np.random.Generator) -> str:
    """Make a sentence of `words` words, with the cue as its third word."""
    rest = [_FILLERS[number] for number in random.integers(len(_FILLERS), size=words - 1)]
    if cue is not None:
        rest[1] = cue
    return f"{' '.join([_WRITER if about_writer else _SOMEONE, *rest])}."


def compose(
    words: int, telling: list[tuple[str, bool]], random: np.random.Generator
) -> tuple[list[str], list[int]]:
    """Make sentences of `words` words in total; returns them and the place of each cue.

    `telling` has the cues, each with True where it is about the writer. The other sentences are
    about either at random, so that first words alone tell nothing.
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
    """Counts and lengths of a synthetic corpus."""

    posts: int
    positives: tuple[int, ...]
    """Number of posts with evidence, by criterion."""
    special: int
    without: int
    """Number of posts without any evidence."""
    words: float
    """Mean words per post."""
    shortest: int
    longest: int
    spread: float
    """Standard deviation of the logarithm of the words per post."""
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
    """Make the synthetic corpus of a seed, labelled like the real one."""
    drafts = list(make_drafts(scale, seed))
    posts = {draft.id: " ".join(draft.sentences) for draft in drafts}
    annotations = [
        Annotation(draft.id, mark.symptom, mark.status, "synthetic")
        for draft in drafts
        for mark in draft.marks
    ]
    return label_posts(posts, annotations, criteria_texts(wording))


def criteria_texts(wording: Wording) -> list[str]:
    """Texts of the synthetic criteria, which name their cues."""
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
    """Choose the criteria that each post gives evidence of, with exact counts."""
    evidence = np.zeros((size.posts, len(CRITERIA)), dtype=np.bool_)
    some = random.permutation(size.posts)[size.without :]
    # Round robin: every post gets one before any gets more.
    at = 0
    for k in random.permutation(np.repeat(np.arange(len(CRITERIA)), size.positives)):
        while evidence[some[at % some.size], k]:
            at += 1
        evidence[some[at % some.size], k] = True
        at += 1
    return evidence


def _spread_lures(size: Size, random: np.random.Generator) -> NDArray[np.bool_]:
    """Choose posts with a cue that is no evidence; some also have evidence of the same."""
    lures = np.zeros((size.posts, len(CRITERIA)), dtype=np.bool_)
    for k, positives in enumerate(size.positives):
        lures[random.choice(size.posts, round(positives * size.lures), replace=False), k] = True
    return lures


def _lengths(size: Size) -> NDArray[np.int64]:
    """Words per post, ascending: log-normal with exact minimum, maximum and mean."""
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
    """Draw a length for each post that is long enough for its cues."""
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
_PAIRS: dict[Scale, int] = {"small": 3000, "full": 20_000}
_PAIR_WORDS: dict[Scale, tuple[int, int]] = {"small": (12, 20), "full": (12, 80)}
_SHARED = 0.5
"""Chance of each cue in a text of a pair."""
_RATED = 0.4
"""Chance of each of several labels."""
_LURED = 0.4
"""Share of clean texts that hold a cue too, about someone else."""
_CUES = CUES[9:]


_TYPES, _SPAN_WORDS = ("LOC", "ORG", "PER"), (1, 2, 1)
"""Type of span of each cue, and the number of its words."""
_TOLD = 0.6
"""Chance of a cue in tagged sentences to be told of the writer."""
_AMOUNTS = (1.0, 2.5, 4.0)
"""Number that each cue adds, where labels are numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Texts and their labels."""

    texts: list[str] = field(repr=False)
    labels: NDArray[Any] = field(repr=False)
    classes: tuple[str, ...] = CLASSES
    seconds: list[str] | None = field(default=None, repr=False)
    """Second texts, where there are pairs."""


def make_texts(scale: Scale = "small", seed: int = 0, target: Target = "single") -> Texts:
    """Make the synthetic texts of a seed, with an exact share of flagged ones.

    Several labels are the cues of a text that are about the writer, and its number their sum.
    """
    random = np.random.default_rng((seed, 9))
    if target != "single":
        rated = (random.random((_COUNT[scale], len(_CUES))) < _RATED).astype(np.uint8)
        return _rated(rated, target, [_tell(row, _TEXT_WORDS[scale], random) for row in rated])
    count = _COUNT[scale]
    labels = random.permutation(np.arange(count) < round(_FLAGGED * count)).astype(np.int64)
    return Texts(
        texts=[_text(_TEXT_WORDS[scale], bool(label), random) for label in labels], labels=labels
    )


def make_pairs(scale: Scale = "small", seed: int = 0, target: Target = "single") -> Texts:
    """Make the synthetic pairs of a seed.

    Several labels are the cues that both texts share, and the number of a pair is their sum. A pair
    with one class has one cue in its second text; the class says if the first text has it too.
    """
    random = np.random.default_rng((seed, 13))
    count = _PAIRS[scale]
    first, second = (random.random((2, count, len(_CUES))) < _SHARED).astype(np.uint8)
    if target == "single":
        second = np.eye(len(_CUES), dtype=np.uint8)[random.integers(len(_CUES), size=count)]
    texts, seconds = (
        [_tell(row, _PAIR_WORDS[scale], random) for row in side] for side in (first, second)
    )
    both = first * second
    if target != "single":
        return _rated(both, target, texts, seconds)
    same = both.any(1).astype(np.int64)
    return Texts(texts=texts, seconds=seconds, labels=same, classes=("different", "same"))


def make_tagged(scale: Scale = "small", seed: int = 0) -> tuple[list[list[str]], list[list[str]]]:
    """Make the words and tags of a seed's sentences.

    A cue, for one type with the word after it, is a span where the writer tells it, so that a
    word's tag depends on another word.
    """
    random = np.random.default_rng((seed, 17))
    rows: list[list[str]] = []
    tags: list[list[str]] = []
    low, high = np.log(_TEXT_WORDS[scale])
    for _ in range(_COUNT[scale]):
        size = max(SENTENCE, round(float(np.exp(random.uniform(low, high)))))
        count = int(random.integers(0, min(len(_CUES), size // SENTENCE) + 1))
        chosen = random.choice(len(_CUES), count, replace=False)
        telling = [(_CUES[k], bool(random.random() < _TOLD)) for k in chosen]
        sentences, places = compose(size, telling, random)
        marks = [["O"] * len(one.split()) for one in sentences]
        for place, k, (_, told) in zip(places, chosen, telling, strict=True):
            if told:
                span = [f"B-{_TYPES[k]}", f"I-{_TYPES[k]}"][: _SPAN_WORDS[k]]
                marks[place][2 : 2 + len(span)] = span
        rows.append([word for one in sentences for word in one.split()])
        tags.append([tag for one in marks for tag in one])
    return rows, tags


def _tell(there: NDArray[np.uint8], words: tuple[int, int], random: np.random.Generator) -> str:
    """Make a text that tells the cues that are there of the writer, and some others of someone."""
    telling = [(cue, bool(is_there)) for cue, is_there in zip(_CUES, there, strict=True)]
    told = [one for one in telling if one[1] or random.random() < _LURED]
    low, high = np.log(words)
    size = max(SENTENCE * len(telling), round(float(np.exp(random.uniform(low, high)))))
    return " ".join(compose(size, told, random)[0])


def _rated(
    told: NDArray[np.uint8], target: Target, texts: list[str], seconds: list[str] | None = None
) -> Texts:
    """Label texts by the cues that are told: several labels, or the sum of their amounts."""
    if target == "regression":
        amounts = told @ np.array(_AMOUNTS)
        return Texts(texts=texts, seconds=seconds, labels=amounts, classes=(VALUE,))
    return Texts(texts=texts, seconds=seconds, labels=told, classes=_CUES)


def _text(words: tuple[int, int], flagged: bool, random: np.random.Generator) -> str:
    low, high = np.log(words)
    size = max(SENTENCE, round(float(np.exp(random.uniform(low, high)))))
    cue = _CUES[int(random.integers(len(_CUES)))]
    telling = [(cue, flagged)] if flagged or random.random() < _LURED else []
    return " ".join(compose(size, telling, random)[0])
