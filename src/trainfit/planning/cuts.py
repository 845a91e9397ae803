"""What is settled before memory is asked: by the machine, the pins, and the lengths of the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from trainfit.core.errors import BadInput
from trainfit.core.records import Gpu, HardwareProfile
from trainfit.packing import coarser_cuts, ladder
from trainfit.planning import decide
from trainfit.planning.estimator.estimate import CONTEXT_GIB, GIB, MARGIN, OWN_MARGIN, Target
from trainfit.planning.fit import MODES, Candidate, Checkpointing, Cutting, Fitter, Speed, look_at
from trainfit.planning.question import Choice, Question

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Basis:
    """What is settled before memory is asked."""

    precision: Choice
    threads: Choice | None
    """None: as torch has it."""
    tf32: Choice
    packed: Choice
    attention: Choice
    effective: Choice
    checkpointing: Choice | None
    cuttings: tuple[Cutting, ...]
    """The largest micro-batches first."""
    plain: int
    """Which of them pads the least; those before it start fewer micro-batches."""
    arguments: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """GPUs with the same key run the same step."""
        wide = self.precision.value == "fp32"  # bf16 and fp16 are of one size
        return wide, self.packed.value, self.attention.value


def basis_for(question: Question, profile: HardwareProfile, gpu: Gpu | None, ranks: int) -> Basis:
    """Decide what memory has no say in."""
    precise = decide.precision(question, profile, gpu, ranks)
    packed = decide.packing(question, gpu, precise.value)
    effective = decide.effective_batch(question, ranks)
    cap = decide.cap_tokens(question, effective.value, ranks)
    attention = decide.attention_path(question, packed.value, gpu)
    cuttings = _cuttings(question, packed.value, effective.value, cap, ranks)
    coarser: tuple[Cutting, ...] = ()
    if gpu is not None and gpu.slug is not None and not packed.value and not _cut_by_hand(question):
        coarser = _coarser(question.workload.lengths, effective.value, cap, ranks)
    arguments = question.arguments | {
        "precision": precise.value,
        "optimizer": decide.optimizer(question).value,
    }
    if packed.value:
        arguments |= {"attention": "varlen", "attention_dropout": 0.0}
    if question.workload.method != "full":
        arguments["dtype"] = _DTYPES[precise.value]
    return Basis(
        precision=precise,
        threads=decide.threads(question, profile, gpu, ranks),
        tf32=decide.tf32(question, gpu),
        packed=packed,
        attention=attention,
        effective=effective,
        checkpointing=decide.pinned(question, "gradient_checkpointing"),
        cuttings=(*coarser, *cuttings),
        plain=len(coarser),
        arguments=arguments,
    )


def _cuttings(
    question: Question, packed: bool, effective: int, cap: int, ranks: int
) -> tuple[Cutting, ...]:
    """The ladder, which begins with as many micro-batches as were asked for."""
    steps = question.pinned("gradient_accumulation_steps")
    cuttings = _cut(question.workload.lengths, packed, effective, cap, ranks, steps)
    count, batch = cuttings[0].cut.micro_batches, question.pinned("batch_size")
    if batch is not None and steps is not None and count > steps:
        raise BadInput(
            f"{effective} sequences do not fit {steps} micro-batches of "
            f"{batch} × {question.workload.max_length} tokens",
            f"leave gradient_accumulation_steps to the plan, or set it to {count}",
        )
    return cuttings


def _cut_by_hand(question: Question) -> bool:
    names = ("batch_size", "micro_batch_tokens", "gradient_accumulation_steps")
    return any(question.pinned(name) is not None for name in names)


@lru_cache(maxsize=16)
def _coarser(lengths: tuple[int, ...], effective: int, cap: int, ranks: int) -> tuple[Cutting, ...]:
    """Padded cuts into fewer micro-batches: a GPU may wait longer for them than it computes."""
    array = np.asarray(lengths, dtype=np.int64)
    found = coarser_cuts(array, effective, cap, ranks=ranks)
    return tuple(look_at(array, cut, effective, ranks, 0) for cut in found)


@lru_cache(maxsize=16)
def _cut(
    lengths: tuple[int, ...], packed: bool, effective: int, cap: int, ranks: int, steps: int | None
) -> tuple[Cutting, ...]:
    """The ladder, with what its steps are like; the same for all GPUs that are compared."""
    array = np.asarray(lengths, dtype=np.int64)
    rungs = ladder(
        array,
        effective,
        cap,
        padded=not packed,
        ranks=ranks,
        at_least=steps or 1,
        at_most=steps,
    )
    return tuple(look_at(array, rung, effective, ranks, 0) for rung in rungs)


def target_for(profile: HardwareProfile, gpu: Gpu | None, memory_gib: float | None) -> Target:
    """The GPU, or the CPU, and what may be taken of its memory."""
    if memory_gib is not None and not memory_gib > 0:
        raise BadInput(f"the memory is {memory_gib} GiB", "give what may be used, above 0")
    if gpu is None:
        free = _steady(profile.memory_available_gib) if memory_gib is None else memory_gib
        return Target(sm_count=1, compute_capability="0.0", capacity=int(free * GIB))
    if memory_gib is None:
        others = gpu.state.memory_used_by_others_gib or 0.0
        memory_gib = max(gpu.memory_gib - CONTEXT_GIB - others, 0.1)
    return Target(
        sm_count=gpu.sm_count or 1,
        compute_capability=gpu.compute_capability,
        capacity=int(memory_gib * GIB),
    )


def _steady(free_gib: float) -> float:
    """Free memory in coarse steps: from one call to the next it differs, and the plan must not."""
    return float(2 ** (math.floor(4 * math.log2(max(free_gib, 0.1))) / 4))


_STRICTER = 1.03
"""How much smaller the next candidate has to be after one that did not fit when it was run."""
_HOPELESS = 1.1
"""What takes more than this by small depths need not be run to know that it does not fit."""
_CLEAR = 0.9
"""What takes less than this share of the capacity by small depths will fit."""


def fitter_for(question: Question, basis: Basis, targets: tuple[Target, ...]) -> Fitter:
    """What weighs the candidates of a job on these GPUs."""
    cuttings = basis.cuttings
    if {"batch_size", "micro_batch_tokens"} & question.pins.keys():
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
