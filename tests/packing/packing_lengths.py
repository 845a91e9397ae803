"""Synthetic lengths of the shape that ReDSM5 has, and cuts fitted to lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from trainfit.packing import MicroBatch, PackedCut, PaddedCut
from trainfit.packing.cut_ladder import fit_padded_parts
from trainfit.packing.steps import IntArray, Lengths, fit_packed_parts, sample_parts

MEAN_WORDS, LEAST_WORDS, MOST_WORDS = 294.7, 2, 6990
SPREAD = 0.9
TOKENS_PER_WORD = 1.3
CRITERIA = 9


def words_per_post(posts: int = 1484, seed: int = 0) -> IntArray:
    """Log-normal, with the published mean, least and most."""
    draws = np.random.default_rng(seed).standard_normal(posts)
    words = np.exp(math.log(MEAN_WORDS) - SPREAD**2 / 2 + SPREAD * draws)
    words = np.clip(np.round(words), LEAST_WORDS, MOST_WORDS).astype(np.int64)
    words[:2] = LEAST_WORDS, MOST_WORDS
    return words


def redsm5_lengths(posts: int = 1484, seed: int = 0, max_length: int = 512) -> IntArray:
    """Tokens of every pair of post and criterion, the post truncated to what remains for it."""
    post = np.round(words_per_post(posts, seed) * TOKENS_PER_WORD).astype(np.int64)
    criterion = np.random.default_rng(seed + 1).integers(12, 40, CRITERIA)
    return np.minimum(post[:, None] + criterion, max_length).ravel()


def fit_budget(lengths: Lengths, batch: int, cap: int, *, ranks: int = 1, **how: Any) -> PackedCut:
    array = np.asarray(lengths)
    return fit_packed_parts(sample_parts(array, batch, ranks), int(array.max()), cap, **how)


def fit_padded(
    lengths: Lengths,
    batch: int,
    cap: int,
    *,
    ranks: int = 1,
    **how: Any,
) -> PaddedCut:
    array = np.asarray(lengths)
    return fit_padded_parts(sample_parts(array, batch, ranks), int(array.max()), cap, **how)


def fill_of(batches: Iterable[MicroBatch]) -> float:
    """The share of real tokens in what the model computes."""
    held = list(batches)
    return sum(b.tokens for b in held) / sum(b.rows * b.width for b in held)
