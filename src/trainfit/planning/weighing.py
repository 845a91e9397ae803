"""Which candidate wins: the fastest that fits, run in full before it is promised."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainfit.planning.basis import Basis
from trainfit.planning.fitting import MODES, Candidate, Checkpointing, Fitter, Speed
from trainfit.planning.memory import MARGIN, OWN_MARGIN, Target
from trainfit.planning.question import Question

_TRIES = 4
_CLEAR = 0.9
"""What takes less than this share of the capacity by small depths will fit."""


def fitter_for(question: Question, basis: Basis, targets: tuple[Target, ...]) -> Fitter:
    """What weighs the candidates of a job on these GPUs."""
    cuttings = basis.cuttings
    if question.pinned("batch_size") is not None:
        cuttings = cuttings[:1]  # pinned: the rest of the ladder is for running out of memory
    held = tuple(held_back(target, basis) for target in targets)
    return Fitter(question.factory, basis.arguments, question.layers, cuttings, held)


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
    if "none" in modes and exact and not later:
        largest = fitter.exact_largest(held, speed)
        if largest.taken.fits:
            return Weighed(best=largest, fits=True, candidates=[largest])
    elif "none" in modes:
        largest = fitter.largest(at, speed)
        most = held.capacity if not exact else _CLEAR * held.capacity
        if largest.taken.peak_reserved <= most:
            return Weighed(best=largest, fits=True, candidates=[largest])
    candidates = fitter.candidates(at, modes, speed)
    for candidate in [c for c in candidates if c.taken.peak_allocated <= held.capacity][:_TRIES]:
        ran = fitter.exact(candidate, held, speed) if exact else candidate
        if ran.taken.fits or not exact:
            return Weighed(best=ran, fits=True, candidates=candidates)
    smallest = min(candidates, key=lambda c: c.taken.peak_allocated)
    ran = fitter.exact(smallest, held, speed) if exact else smallest
    return Weighed(best=ran, fits=bool(ran.taken.fits), candidates=candidates)
