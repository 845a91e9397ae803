"""Lengths of the shape that ReDSM5 has, made up from a seed."""

from __future__ import annotations

import math

import numpy as np

from trainfit.packing.steps import IntArray

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
