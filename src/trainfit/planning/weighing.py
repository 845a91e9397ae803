"""Which candidate wins: the fastest that fits, run in full before it is promised."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainfit.planning.basis import Basis
from trainfit.planning.fitting import MODES, Candidate, Checkpointing, Fitter, Speed
from trainfit.planning.memory import MARGIN, OWN_MARGIN, Target
from trainfit.planning.question import Question

_STRICTER = 1.03
"""How much smaller the next candidate has to be after one that did not fit when it was run."""
_HOPELESS = 1.1
"""What takes more than this by small depths need not be run to know that it does not fit."""
_CLEAR = 0.9
"""What takes less than this share of the capacity by small depths will fit."""


def fitter_for(question: Question, basis: Basis, targets: tuple[Target, ...]) -> Fitter:
    """What weighs the candidates of a job on these GPUs."""
    cuttings = basis.cuttings
    if question.pinned("batch_size") is not None:
        cuttings = cuttings[:1]  # pinned: the rest of the ladder is for running out of memory
    held = tuple(held_back(target, basis) for target in targets)
    return Fitter(
        question.factory, basis.arguments, question.layers, cuttings, held, plain=basis.plain
    )


def held_back(target: Target, basis: Basis) -> Target:
    """With the margin kept free."""
    margin = OWN_MARGIN if basis.attention.value == "own" else MARGIN
    return replace(target, capacity=int(target.capacity * (1 - margin)))


def modes_of(question: Question, basis: Basis) -> tuple[Checkpointing, ...]:
    """The ways of checkpointing to choose among."""
    if basis.checkpointing is not None:
        return (basis.checkpointing.value,)
    # Nothing is kept for a backward pass that does not run.
    return ("none",) if question.workload.method == "frozen" else MODES


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """The candidate that won, and those it won against."""

    best: Candidate
    fits: bool
    candidates: list[Candidate]


def weigh(
    fitter: Fitter,
    at: int,
    modes: tuple[Checkpointing, ...],
    held: Target,
    speed: Speed,
    exact: bool,
    later: bool = False,
) -> Weighed:
    """The fastest that fits, run in full before it is promised; else the smallest.

    With `later` a clear winner is not run: it is about to be run compiled.
    """
    if "none" in modes and exact:
        told, ran = fitter.quickest(held, speed, compile=later)
        clear = told.taken.peak_reserved <= _CLEAR * held.capacity
        if later and clear:
            return Weighed(best=told, fits=True, candidates=[told])
        if not later and ran.taken.fits:
            return Weighed(best=ran, fits=True, candidates=[ran])
    candidates = fitter.candidates(at, modes, speed)
    more = 1.0
    for candidate in candidates:
        if more * candidate.taken.peak_allocated > held.capacity:
            continue
        ran = fitter.exact(candidate, held, speed) if exact else candidate
        if ran.taken.fits or not exact:
            return Weighed(best=ran, fits=True, candidates=candidates)
        # What small depths missed here, they will miss elsewhere, and pieces are lost besides.
        more = max(_STRICTER, ran.taken.peak_allocated / candidate.taken.peak_allocated) * more
    smallest = min(candidates, key=lambda c: c.taken.peak_allocated)
    near = smallest.taken.peak_allocated <= _HOPELESS * held.capacity
    ran = fitter.exact(smallest, held, speed) if exact and near else smallest
    return Weighed(best=ran, fits=bool(ran.taken.fits), candidates=candidates)
