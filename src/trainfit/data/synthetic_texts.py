"""Made-up texts of two unequal classes, the shape of a moderation job.

A text is to be flagged when it says one of the cues of its writer; most of the others hold the
same cues, said of someone else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainfit.data.invented import CUES, SENTENCE, compose
from trainfit.data.synthetic import Scale

CLASSES = ("clean", "flagged")
_COUNT: dict[Scale, int] = {"small": 1200, "full": 20_000}
_WORDS: dict[Scale, tuple[int, int]] = {"small": (8, 40), "full": (8, 160)}
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
        texts=[_text(_WORDS[scale], bool(label), random) for label in labels], labels=labels
    )


def _text(words: tuple[int, int], flagged: bool, random: np.random.Generator) -> str:
    low, high = np.log(words)
    size = max(SENTENCE, round(float(np.exp(random.uniform(low, high)))))
    cue = _CUES[int(random.integers(len(_CUES)))]
    telling = [(cue, flagged)] if flagged or random.random() < _LURED else []
    return " ".join(compose(size, telling, random)[0])
