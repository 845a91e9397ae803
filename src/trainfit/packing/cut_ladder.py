"""A step into micro-batches, packed or padded, on one rank or several, and the ladder of cuts.

A step owns its sequences. How it is cut is a decision about memory alone, so the union over all
micro-batches of all ranks is the step, whatever the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from trainfit.packing.packed import MicroBatch, PackedCut, fit_packed_parts
from trainfit.packing.padded import PaddedCut, fit_coarser_parts, fit_padded_parts
from trainfit.packing.steps import (
    IntArray,
    Lengths,
    check_fits,
    check_lengths,
    check_whole,
    sample_parts,
    share_step,
)

Cut: TypeAlias = PackedCut | PaddedCut

_FEW = 256
"""Steps used to fit the fallback cuts."""


def cut_step(
    lengths: IntArray, step: Sequence[int] | IntArray, cut: Cut, ranks: int = 1
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Cut a step into micro-batches, for each rank.

    All ranks get the same number, since some kinds of parallel training communicate in each of
    them; a rank with less to do gets empty ones at the end.
    """
    parts = share_step(lengths, np.asarray(step, dtype=np.int64), ranks)
    batches = [cut.cut(lengths, part) for part in parts]
    most = max(map(len, batches))
    return tuple((*own, *[cut.empty()] * (most - len(own))) for own in batches)


def ladder(
    lengths: Lengths,
    effective_batch: int,
    cap_tokens: int,
    *,
    padded: bool = False,
    ranks: int = 1,
    seed: int = 0,
    at_least: int = 1,
    at_most: int | None = None,
    folds: Sequence[Lengths] = (),
) -> tuple[Cut, ...]:
    """Fit the cut to start with, then smaller ones to fall back on when memory runs out.

    Each next cut has twice the micro-batches (packed) or half the tokens (padded); the last one
    holds little more than the longest sequence. The first has `at_least` that many micro-batches
    per step: as few as the cap allows (packed), or those that pad the least, but no more than
    `at_most` as far as the cap allows (padded). `folds` are the lengths of further folds that
    share the cuts, so that every fold has the same shapes.
    """
    arrays = tuple(check_lengths(each).tobytes() for each in (lengths, *folds))
    return _ladder(arrays, effective_batch, cap_tokens, padded, ranks, seed, at_least, at_most)


@lru_cache(maxsize=32)
def _ladder(
    folds: tuple[bytes, ...],
    effective_batch: int,
    cap_tokens: int,
    padded: bool,
    ranks: int,
    seed: int,
    at_least: int,
    at_most: int | None,
) -> tuple[Cut, ...]:
    """Fit the ladder of these lengths; cached, since every fold and trial asks for the same."""
    arrays = [np.frombuffer(each, dtype=np.int64) for each in folds]
    parts, longest = _sample(arrays, effective_batch, cap_tokens, ranks, seed)
    few = _some(parts)

    def below(rung: Cut) -> Cut:
        if padded:
            return fit_padded_parts(few, longest, max(rung.tokens // 2, longest))
        return fit_packed_parts(few, longest, cap_tokens, at_least=2 * rung.micro_batches)

    rungs: list[Cut] = [
        fit_padded_parts(parts, longest, cap_tokens, at_least, at_most)
        if padded
        else fit_packed_parts(parts, longest, cap_tokens, at_least=at_least)
    ]
    while (rung := below(rungs[-1])).tokens < rungs[-1].tokens:
        rungs.append(rung)
    return tuple(rungs)


def coarser_cuts(
    lengths: Lengths,
    effective_batch: int,
    cap_tokens: int,
    *,
    ranks: int = 1,
    folds: Sequence[Lengths] = (),
) -> tuple[PaddedCut, ...]:
    """Fit padded cuts with fewer micro-batches than pad the least, the fewest first.

    They suit a device that takes longer to start a micro-batch than to compute some padding.
    """
    parts, longest = _sample((lengths, *folds), effective_batch, cap_tokens, ranks)
    return tuple(fit_coarser_parts(parts, longest, cap_tokens))


def _sample(
    folds: Sequence[Lengths], effective_batch: int, cap_tokens: int, ranks: int, seed: int = 0
) -> tuple[list[list[int]], int]:
    """Sample the steps of every fold, and find the longest sequence.

    Fold n is dealt with the seed `seed + n`, as in training.
    """
    arrays = [check_lengths(lengths) for lengths in folds]
    longest = max(int(array.max()) for array in arrays)
    check_fits(longest, check_whole("the cap in tokens", cap_tokens))
    parts = [
        part
        for number, array in enumerate(arrays)
        for part in sample_parts(array, effective_batch, ranks, seed + number, len(arrays))
    ]
    return parts, longest


def _some(parts: list[list[int]]) -> list[list[int]]:
    """Select parts of some steps, whole ones first: enough for shapes that are rarely needed."""
    return [*sorted(parts, key=len, reverse=True)[: _FEW - 1], min(parts, key=len)]
