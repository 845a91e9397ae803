"""Cuts of a step to choose among, the memory they may use, and the search for the best."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from trainfit.core.errors import BadInput
from trainfit.core.records import HardwareProfile
from trainfit.packing import coarser_cuts, ladder
from trainfit.packing.steps import IntArray
from trainfit.planning import decide
from trainfit.planning.estimator.estimate import CONTEXT_GIB, GIB, MARGIN, OWN_MARGIN, Target
from trainfit.planning.fit import (
    HOPELESS,
    MODES,
    Checkpointing,
    Cutting,
    Fitter,
    Speed,
    StepCandidate,
    profile_cuts,
)
from trainfit.planning.question import Choice, Question

Folds: TypeAlias = tuple[tuple[int, ...], ...]
"""Lengths of the training sequences of every fold."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSettings:
    """Settings that do not depend on memory, and the cuts to choose among."""

    precision: Choice
    threads: Choice | None
    """Threads of CPU operations; None: torch's default."""
    tf32: Choice
    packed: Choice
    attention: Choice
    effective: Choice
    checkpointing: Choice | None
    offloaded: Choice
    budget: Choice
    """Share of the activations that compiled blocks keep."""
    cuttings: tuple[Cutting, ...]
    """Cuts, the largest micro-batches first."""
    plain: int
    """Index of the cut that pads the least; those before it have fewer micro-batches."""
    arguments: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of the step: GPUs with the same key run the same."""
        return self.precision.value, self.packed.value, self.attention.value


def fixed_settings(question: Question, profile: HardwareProfile, ranks: int) -> FixedSettings:
    """Decide the settings that do not depend on memory."""
    gpu = profile.gpu
    precise = decide.precision(question, profile, ranks)
    packed = decide.packing(question, gpu, precise.value)
    effective = decide.effective_batch(question, ranks)
    cap = decide.cap_tokens(question, effective.value, ranks)
    attention = decide.attention_path(question, packed.value, gpu, precise.value)
    cuttings = _cuttings(question, packed.value, effective.value, cap, ranks)
    coarser: tuple[Cutting, ...] = ()
    if gpu is not None and gpu.slug is not None and not packed.value and not _cut_by_hand(question):
        coarser = _coarser(question.folds, effective.value, cap, ranks)
    elif gpu is None and decide.drops_padding(question):
        cuttings = (*_coarser(question.folds, effective.value, cap, ranks)[:1], *cuttings)
    arguments = question.arguments | {
        "precision": precise.value,
        "optimizer": decide.optimizer(question).value,
    }
    if question.pinned("quantization"):
        arguments["quantization"] = question.pinned("quantization")
    if decide.offload(question, gpu).value:
        arguments["offload_optimizer"] = True
    if packed.value:
        efficient = attention.value == "varlen_efficient"
        arguments["attention"] = "varlen_efficient" if efficient else "varlen"
        if arguments.get("attention_dropout") is None:  # by default, packed rows have none
            arguments["attention_dropout"] = 0.0
    offloaded = decide.offloaded(question, gpu)
    if offloaded.value:
        arguments["offload_activations"] = True
    budget = decide.activation_budget(question)
    if budget.value < 1:
        arguments["activation_budget"] = budget.value
    if question.workload.method != "full":
        arguments["dtype"] = _DTYPES[precise.value]
    return FixedSettings(
        precision=precise,
        threads=decide.threads(question, profile, ranks),
        tf32=decide.tf32(question, gpu),
        packed=packed,
        attention=attention,
        effective=effective,
        checkpointing=decide.pinned(question, "gradient_checkpointing"),
        offloaded=offloaded,
        budget=budget,
        cuttings=(*coarser, *cuttings),
        plain=len(coarser),
        arguments=arguments,
    )


def _cuttings(
    question: Question, packed: bool, effective: int, cap: int, ranks: int
) -> tuple[Cutting, ...]:
    """Fit the ladder of cuts, from the pinned number of micro-batches on."""
    steps = question.pinned("gradient_accumulation_steps")
    cuttings = _cut(question.folds, packed, effective, cap, ranks, steps)
    count, batch = cuttings[0].cut.micro_batches, question.pinned("batch_size")
    if question.indivisible and count * ranks > 1:
        how = f"cut into {count} micro-batches" if ranks == 1 else f"divided over {ranks} ranks"
        left = "leave batch_size and gradient_accumulation_steps to the plan"
        fix = left if ranks == 1 else "take one device"
        raise BadInput(f"a step would be {how}, but {question.indivisible}", fix)
    if question.indivisible:
        cuttings = cuttings[:1]
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
def _coarser(folds: Folds, effective: int, cap: int, ranks: int) -> tuple[Cutting, ...]:
    """Fit padded cuts with fewer micro-batches, for GPUs that start slower than they compute."""
    first, *others = arrays = as_arrays(folds)
    found = coarser_cuts(first, effective, cap, ranks=ranks, folds=others)
    return profile_cuts(arrays, found, effective, ranks)


@lru_cache(maxsize=16)
def _cut(
    folds: Folds, packed: bool, effective: int, cap: int, ranks: int, steps: int | None
) -> tuple[Cutting, ...]:
    """Fit the ladder of cuts and profile each; cached for comparisons of many GPUs."""
    first, *others = arrays = as_arrays(folds)
    rungs = ladder(
        first,
        effective,
        cap,
        padded=not packed,
        ranks=ranks,
        at_least=steps or 1,
        at_most=steps,
        folds=others,
    )
    return profile_cuts(arrays, rungs, effective, ranks)


def as_arrays(folds: Folds) -> list[IntArray]:
    """Return the lengths of each fold as an array."""
    return [np.asarray(lengths, dtype=np.int64) for lengths in folds]


def target_for(profile: HardwareProfile, memory_gib: float | None = None) -> Target:
    """Describe the GPU, or the CPU, and the memory that may be used."""
    if memory_gib is not None and not memory_gib > 0:
        raise BadInput(f"the memory is {memory_gib} GiB", "give what may be used, above 0")
    gpu = profile.gpu
    if gpu is None:
        free = steady(profile.memory_available_gib) if memory_gib is None else memory_gib
        return Target(sm_count=1, compute_capability="0.0", capacity=int(free * GIB))
    others = gpu.state.memory_used_by_others_gib or 0.0
    free = max(gpu.memory_gib - CONTEXT_GIB - others, 0.1)
    return Target(
        sm_count=gpu.sm_count or 1,
        compute_capability=gpu.compute_capability,
        capacity=int((free if memory_gib is None else min(free, memory_gib)) * GIB),
    )


def steady(free_gib: float) -> float:
    """Round free memory down to coarse steps, so that repeated plans are equal."""
    return float(2 ** (math.floor(4 * math.log2(max(free_gib, 0.1))) / 4))


_STRICTER = 1.03
"""Factor by which the next candidate must be smaller after one that did not fit in full."""
_CLEAR = 0.9
"""Share of the capacity below which an estimate by small depths is safe."""


def fitter_for(question: Question, fixed: FixedSettings, targets: tuple[Target, ...]) -> Fitter:
    """Build the fitter of a job for these GPUs."""
    cuttings = fixed.cuttings
    if {"batch_size", "micro_batch_tokens"} & question.pins.keys():
        cuttings = cuttings[:1]  # the other cuts are fallbacks for out of memory
    held = tuple(with_margin(target, fixed) for target in targets)
    return Fitter(
        question.factory, fixed.arguments, question.layers, cuttings, held, plain=fixed.plain
    )


def with_margin(target: Target, fixed: FixedSettings) -> Target:
    """Reduce the capacity by the safety margin."""
    margin = OWN_MARGIN if fixed.attention.value == "own" else MARGIN
    return replace(target, capacity=int(target.capacity * (1 - margin)))


def checkpointing_modes(question: Question, fixed: FixedSettings) -> tuple[Checkpointing, ...]:
    """List the ways of checkpointing to choose among."""
    if fixed.checkpointing is not None:
        return (fixed.checkpointing.value,)
    # A frozen encoder has no backward pass to keep activations for.
    never = question.workload.method == "frozen" or question.not_recomputed is not None
    return ("none",) if never else MODES


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The candidate that won, and all candidates."""

    best: StepCandidate
    fits: bool
    candidates: list[StepCandidate]


def select(
    fitter: Fitter,
    at: int,
    modes: tuple[Checkpointing, ...],
    held: Target,
    speed: Speed,
    exact: bool,
    later: bool = False,
) -> Selection:
    """Choose the fastest candidate that fits, run in full; else the smallest.

    With `later` a clear winner is not run here, since it will be run compiled.
    """
    if "none" in modes and exact:
        told, ran = fitter.quickest(held, speed, compile=later)
        clear = told.taken.peak_reserved <= _CLEAR * held.capacity
        if later and clear:
            return Selection(best=told, fits=True, candidates=[told])
        if not later and ran is not None and ran.taken.fits:
            return Selection(best=ran, fits=True, candidates=[ran])
    candidates = fitter.candidates(at, modes, speed)
    more = 1.0
    for candidate in candidates:
        if more * candidate.taken.peak_allocated > held.capacity:
            continue
        ran = fitter.exact(candidate, held, speed) if exact else candidate
        if ran.taken.fits or not exact:
            return Selection(best=ran, fits=True, candidates=candidates)
        # Small depths underestimate other candidates as well, and fragmentation adds to it.
        more = max(_STRICTER, ran.taken.peak_allocated / candidate.taken.peak_allocated) * more
    smallest = min(candidates, key=lambda c: c.taken.peak_allocated)
    near = smallest.taken.peak_allocated <= HOPELESS * held.capacity
    ran = fitter.exact(smallest, held, speed) if exact and near else smallest
    return Selection(best=ran, fits=bool(ran.taken.fits), candidates=candidates)
