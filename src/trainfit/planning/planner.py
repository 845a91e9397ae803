"""From a job and a machine to a plan: every setting, each with a reason and what lost.

What follows from the machine alone is decided first (decisions.py). Then the cuts of the step and
the ways of checkpointing are weighed by what they take and how fast they are (fitting.py), and the
one that wins is run in full on fake tensors before it is promised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainfit.catalogue import GpuSpec, find
from trainfit.errors import BadInput
from trainfit.hardware import as_if
from trainfit.packing import Cut, PackedCut, PaddedCut, ladder
from trainfit.planning import decisions
from trainfit.planning.advice import what_would_fit
from trainfit.planning.compiling import Compiling, decide_compile
from trainfit.planning.fitting import (
    MODES,
    Candidate,
    Checkpointing,
    Cutting,
    Fitter,
    Speed,
    look_at,
)
from trainfit.planning.memory import CONTEXT_GIB, GIB, MARGIN, Target, recorded_error
from trainfit.planning.question import Choice, Question
from trainfit.planning.timing import recorded_time_error
from trainfit.records import (
    Gpu,
    HardwareProfile,
    MemoryEstimate,
    Plan,
    Reason,
    RuntimeSettings,
    TaskSpec,
    TimeEstimate,
)

_SAMPLE = 256
_CLOSE = 0.9
"""Up to this share of the capacity, what small depths tell is enough."""
_TRIES = 4
_SETTINGS = (
    "precision",
    "packed",
    "attention",
    "batch_size",
    "micro_batch_tokens",
    "gradient_accumulation_steps",
    "effective_batch_size",
    "gradient_checkpointing",
    "compile",
    "optimizer",
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
    "eval_batch_size",
)
"""The fields of a plan that have a reason of the same name."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Basis:
    """What is settled before memory is asked."""

    precision: Choice
    tf32: Choice
    packed: Choice
    attention: Choice
    effective: Choice
    checkpointing: Choice | None
    cuttings: tuple[Cutting, ...]
    arguments: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """GPUs with the same key run the same step."""
        return self.precision.value, self.packed.value, self.attention.value


def plan(
    question: Question,
    profile: HardwareProfile,
    *,
    memory_gib: float | None = None,
    ranks: int = 1,
) -> Plan:
    """The plan of a job on a machine; `memory_gib` bounds what may be taken of its GPU."""
    gpu = profile.gpus[0] if profile.gpus else None
    basis = _basis(question, profile, gpu, ranks)
    target = _target(profile, gpu, memory_gib)
    fitter = _fitter(question, basis, (target,))
    return _planned(question, profile, basis, fitter, 0, target, ranks, exact=True)


def compare(question: Question, gpus: Sequence[GpuSpec], ranks: int = 1) -> list[tuple[str, Plan]]:
    """The plans for many GPUs; those that run the same step are weighed together."""
    profiles = [as_if(spec) for spec in gpus]
    groups: dict[tuple[Any, ...], list[int]] = {}
    bases = []
    for at, profile in enumerate(profiles):
        basis = _basis(question, profile, profile.gpus[0], ranks)
        bases.append(basis)
        groups.setdefault(basis.key, []).append(at)
    found: dict[int, Plan] = {}
    for members in groups.values():
        targets = tuple(_target(profiles[at], profiles[at].gpus[0], None) for at in members)
        fitter = _fitter(question, bases[members[0]], targets)
        for place, at in enumerate(members):
            found[at] = _planned(
                question, profiles[at], bases[at], fitter, place, targets[place], ranks, exact=False
            )
    return [(spec.slug, found[at]) for at, spec in enumerate(gpus)]


def curve(
    question: Question, profile: HardwareProfile, chosen: Plan
) -> list[tuple[int, MemoryEstimate]]:
    """Memory against batch size around a plan, for its picture."""
    gpu = profile.gpus[0] if profile.gpus else None
    basis = _basis(question, profile, gpu, chosen.ranks)
    capacity = chosen.memory.capacity_gib if chosen.memory else None
    target = _target(profile, gpu, capacity)
    length = question.workload.max_length
    sizes = sorted({1, *(max(1, round(chosen.batch_size * f)) for f in (0.25, 0.5, 1, 1.5, 2, 3))})
    many = min(chosen.gradient_accumulation_steps, 2)
    cuttings = [_full(size, length, many, chosen.packed) for size in sizes]
    fitter = Fitter(question.factory, basis.arguments, question.layers, cuttings, (target,))
    speed = Speed(gpu=None, precision=chosen.precision, tf32=False)
    found = fitter.candidates(0, (chosen.gradient_checkpointing,), speed)
    by_size = {c.cutting.rows * c.cutting.width // length: c for c in found}
    return [(size, _memory(by_size[size], target, gpu, None)) for size in sizes]


def _full(size: int, length: int, micro_batches: int, packed: bool) -> Cutting:
    """Micro-batches of so many sequences of the full length."""
    cut: Cut
    if packed:
        tokens = size * length
        cut = PackedCut(
            part_size=size * micro_batches,
            micro_batches=micro_batches,
            budgets=(tokens,),
            slots=size,
        )
    else:
        cut = PaddedCut(tokens=size * length, widths=(length,), rows=(size,) * micro_batches)
    total = float(size * length * micro_batches)
    rows, width = (1, size * length) if packed else (size, length)
    lengths = (length,) * size
    return Cutting(cut=cut, rows=rows, width=width, lengths=lengths, computed=total, tokens=total)


def _basis(question: Question, profile: HardwareProfile, gpu: Gpu | None, ranks: int) -> _Basis:
    precise = decisions.precision(question, profile, gpu)
    packed = decisions.packing(question, gpu, precise.value)
    effective = decisions.effective_batch(question, ranks)
    cap = decisions.cap_tokens(question, effective.value, ranks)
    attention = decisions.attention(question, packed.value, gpu)
    arguments = question.arguments | {
        "precision": precise.value,
        "optimizer": decisions.optimizer(question).value,
    }
    if packed.value:
        arguments |= {"attention": "varlen", "attention_dropout": 0.0}
    if question.workload.method != "full":
        arguments["dtype"] = _DTYPES[precise.value]
    return _Basis(
        precision=precise,
        tf32=decisions.tf32(question, gpu),
        packed=packed,
        attention=attention,
        effective=effective,
        checkpointing=decisions.pinned(question, "gradient_checkpointing"),
        cuttings=_cuttings(question, packed.value, effective.value, cap, ranks),
        arguments=arguments,
    )


def _cuttings(
    question: Question, packed: bool, effective: int, cap: int, ranks: int
) -> tuple[Cutting, ...]:
    lengths = np.asarray(question.workload.lengths, dtype=np.int64)
    steps: int = question.pinned("gradient_accumulation_steps") or 1
    rungs = ladder(
        lengths, effective, cap, padded=not packed, ranks=ranks, at_least=min(steps, effective)
    )
    if question.pinned("batch_size") is not None:
        most = rungs[0].micro_batches
        if question.pinned("gradient_accumulation_steps") is not None and most > steps:
            raise BadInput(
                f"{effective} sequences do not fit {steps} micro-batches of "
                f"{question.pinned('batch_size')} × {question.workload.max_length} tokens",
                f"leave gradient_accumulation_steps to the plan, or set it to {most}",
            )
    return tuple(look_at(lengths, rung, effective, ranks, 0) for rung in rungs)


def _target(profile: HardwareProfile, gpu: Gpu | None, memory_gib: float | None) -> Target:
    if memory_gib is not None and not memory_gib > 0:
        raise BadInput(f"the memory is {memory_gib} GiB", "give what may be used, above 0")
    if gpu is None:
        free = profile.memory_available_gib if memory_gib is None else memory_gib
        return Target(sm_count=1, compute_capability="0.0", capacity=int(free * GIB))
    if memory_gib is None:
        others = gpu.state.memory_used_by_others_gib or 0.0
        memory_gib = max(gpu.memory_gib - CONTEXT_GIB - others, 0.1)
    return Target(
        sm_count=gpu.sm_count or 1,
        compute_capability=gpu.compute_capability,
        capacity=int(memory_gib * GIB),
    )


def _fitter(question: Question, basis: _Basis, targets: tuple[Target, ...]) -> Fitter:
    cuttings = basis.cuttings
    if question.pinned("batch_size") is not None:
        cuttings = cuttings[:1]  # pinned: the rest of the ladder is for running out of memory
    held = tuple(map(_held, targets))
    return Fitter(question.factory, basis.arguments, question.layers, cuttings, held)


def _held(target: Target) -> Target:
    """With the margin kept free."""
    return replace(target, capacity=int(target.capacity * (1 - MARGIN)))


def _modes(question: Question, basis: _Basis) -> tuple[Checkpointing, ...]:
    if basis.checkpointing is not None:
        return (basis.checkpointing.value,)
    # Nothing is kept for a backward pass that does not run.
    return ("none",) if question.workload.method == "frozen" else MODES


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weighed:
    """The candidate that won, and those it won against."""

    best: Candidate
    fits: bool
    candidates: list[Candidate]


def _weigh(
    fitter: Fitter,
    at: int,
    modes: tuple[Checkpointing, ...],
    held: Target,
    speed: Speed,
    exact: bool,
) -> _Weighed:
    """The fastest that fits, run in full where it is a close call; else the smallest."""
    if "none" in modes:
        largest = fitter.largest(at, speed)
        if largest.taken.peak_reserved <= _CLOSE * held.capacity:
            return _Weighed(best=largest, fits=True, candidates=[largest])
    candidates = fitter.candidates(at, modes, speed)
    for candidate in [c for c in candidates if c.taken.peak_allocated <= held.capacity][:_TRIES]:
        if candidate.taken.peak_reserved <= _CLOSE * held.capacity or not exact:
            return _Weighed(best=candidate, fits=True, candidates=candidates)
        ran = fitter.exact(candidate, held, speed)
        if ran.taken.fits:
            return _Weighed(best=ran, fits=True, candidates=candidates)
    smallest = min(candidates, key=lambda c: c.taken.peak_allocated)
    ran = fitter.exact(smallest, held, speed) if exact else smallest
    return _Weighed(best=ran, fits=bool(ran.taken.fits), candidates=candidates)


def _planned(
    question: Question,
    profile: HardwareProfile,
    basis: _Basis,
    fitter: Fitter,
    place: int,
    target: Target,
    ranks: int,
    *,
    exact: bool,
) -> Plan:
    gpu = profile.gpus[0] if profile.gpus else None
    spec = find(gpu.slug) if gpu is not None and gpu.slug is not None else None
    speed = Speed(gpu=spec, precision=basis.precision.value, tf32=basis.tf32.value)
    held = _held(target)
    weighed = _weigh(fitter, place, _modes(question, basis), held, speed, exact)
    best, fits = weighed.best, weighed.fits
    time = _time(question, best, speed, ranks, basis.effective.value)
    compiling = decide_compile(question, profile, gpu, time)
    reasons = _reasons(question, profile, basis, weighed, held, compiling)
    values: dict[str, Any] = {reason.setting: reason.value for reason in reasons}
    lengths = sorted(question.workload.lengths)
    return Plan(
        fits=fits,
        task=TaskSpec(
            factory=question.factory,
            arguments=basis.arguments | best.cutting.shape | {"checkpointing": best.checkpointing},
        ),
        workload=replace(
            question.workload,
            lengths=tuple(lengths[:: max(1, len(lengths) // _SAMPLE)]),
            effective_batch_size=basis.effective.value,
        ),
        gpu=None if gpu is None else gpu.slug,
        ranks=ranks,
        weights_dtype=basis.arguments.get("dtype", "float32"),
        runtime=RuntimeSettings(
            tf32=basis.tf32.value,
            cudnn_benchmark=question.pinned("cudnn_benchmark"),
            deterministic=question.pinned("deterministic"),
            attention="efficient" if question.pinned("flash") is False else None,
            seed=question.pinned("seed"),
        ),
        cuts=_fallbacks(basis, best),
        compile_mode=question.pinned("compile_mode") or "default",
        memory=_memory(best, target, gpu, fits),
        time=compiling.time,
        reasons=tuple(reasons),
        advice=() if fits else what_would_fit(question, basis.arguments, best, held, exact),
        **{name: values[name] for name in _SETTINGS},
    )


def _fallbacks(basis: _Basis, best: Candidate) -> tuple[int, ...]:
    counts = [c.cut.micro_batches for c in basis.cuttings]
    return tuple(c for c in counts if c >= best.cutting.cut.micro_batches)


def _reasons(
    question: Question,
    profile: HardwareProfile,
    basis: _Basis,
    weighed: _Weighed,
    held: Target,
    compiling: Compiling,
) -> list[Reason]:
    """Every setting with its reason."""
    gpu = profile.gpus[0] if profile.gpus else None
    best = weighed.best
    cut = best.cutting.cut
    length = question.workload.max_length
    batch = decisions.pinned(question, "batch_size") or Choice(
        value=max(1, math.ceil(cut.tokens / length)),
        why=f"a micro-batch of {cut.tokens:,} tokens holds so many sequences of {length}",
    )
    fill = best.cutting.tokens / best.cutting.computed
    choices = {
        "precision": basis.precision,
        "tf32": basis.tf32,
        "packed": basis.packed,
        "attention": basis.attention,
        "effective_batch_size": basis.effective,
        "batch_size": batch,
        "micro_batch_tokens": Choice(
            value=cut.tokens, why=f"fitted to the steps: {fill:.1%} of it are tokens of the data"
        ),
        "gradient_accumulation_steps": _accumulation(question, basis, weighed, held),
        "gradient_checkpointing": _checkpointing(question, basis, weighed, held),
        "compile": compiling.choice,
        "optimizer": decisions.optimizer(question),
        **decisions.loader(question, profile, gpu),
        "eval_batch_size": decisions.eval_batch(question, batch.value),
    }
    return [
        Reason(setting=name, value=c.value, why=c.why, alternatives=c.alternatives)
        for name, c in choices.items()
    ]


def _accumulation(question: Question, basis: _Basis, weighed: _Weighed, held: Target) -> Choice:
    best = weighed.best
    count, total = best.cutting.cut.micro_batches, basis.effective.value
    pin = decisions.pinned(question, "gradient_accumulation_steps")
    if pin is not None and pin.value == count:
        return pin
    if count == 1:
        return Choice(value=1, why=f"all {total} sequences of a step go through at once")
    fewer = [
        c
        for c in weighed.candidates
        if c.checkpointing == best.checkpointing and c.cutting.cut.micro_batches < count
    ]
    alternatives = tuple(
        f"{c.cutting.cut.micro_batches}: {c.taken.peak_allocated / GIB:.1f} GiB"
        for c in sorted(fewer, key=lambda c: -c.cutting.cut.micro_batches)[:2]
    )
    tight = fewer and min(c.taken.peak_allocated for c in fewer) > held.capacity
    limit = "fewer do not fit" if tight else "which pads the least"
    return Choice(
        value=count,
        why=f"{total} sequences cut into {count} micro-batches, {limit}",
        alternatives=alternatives,
    )


_CHECKPOINTING = {
    "none": "the activations fit, so nothing is computed twice",
    "selective": "every second block is computed again: the fastest that fits",
    "full": "every block is computed again: the fastest that fits",
}


def _checkpointing(question: Question, basis: _Basis, weighed: _Weighed, held: Target) -> Choice:
    best = weighed.best
    if basis.checkpointing is not None:
        return basis.checkpointing
    if question.workload.method == "frozen":
        return Choice(value="none", why="a frozen encoder keeps nothing for a backward pass")
    if not weighed.fits:
        return Choice(value=best.checkpointing, why="what takes the least memory; it does not fit")
    others = [
        _rival(mode, [c for c in weighed.candidates if c.checkpointing == mode], best, held)
        for mode in MODES
        if mode != best.checkpointing
    ]
    return Choice(
        value=best.checkpointing,
        why=_CHECKPOINTING[best.checkpointing],
        alternatives=tuple(others),
    )


def _rival(mode: str, rivals: Sequence[Candidate], best: Candidate, held: Target) -> str:
    """How another way of checkpointing fares."""
    if not rivals:
        return f"{mode}: computes {'half' if mode == 'selective' else 'all'} of the blocks twice"
    fitting = [c for c in rivals if c.taken.peak_allocated <= held.capacity]
    if not fitting:
        need = min(c.taken.peak_allocated for c in rivals) / GIB
        return f"{mode}: needs {need:.1f} GiB at the least"
    if best.seconds and fitting[0].seconds:
        return f"{mode}: {fitting[0].seconds / best.seconds - 1:+.0%} time"
    return f"{mode}: fits too"


def _memory(best: Candidate, target: Target, gpu: Gpu | None, fits: bool | None) -> MemoryEstimate:
    taken = best.taken
    return MemoryEstimate(
        weights_gib=taken.weights / GIB,
        gradients_gib=taken.gradients / GIB,
        optimizer_gib=taken.optimizer / GIB,
        activations_gib=taken.activations / GIB,
        workspace_gib=taken.workspace / GIB,
        peak_allocated_gib=taken.peak_allocated / GIB,
        peak_reserved_gib=min(taken.peak_reserved, target.capacity) / GIB
        if fits
        else taken.peak_reserved / GIB,
        capacity_gib=target.capacity / GIB,
        fits=taken.peak_allocated <= target.capacity if fits is None else fits,
        error_percent=None if gpu is None else recorded_error(gpu.compute_capability),
    )


def _time(
    question: Question, best: Candidate, speed: Speed, ranks: int, effective: int
) -> TimeEstimate | None:
    if speed.gpu is None or best.seconds is None:
        return None
    step = best.seconds
    work = question.workload
    steps = math.ceil(work.sequences / effective)
    peak = speed.gpu.peak_tflops(speed.precision)
    epoch = steps * step
    total = epoch * work.epochs
    hours = total / 3600
    return TimeEstimate(
        tokens_per_second=best.cutting.tokens * ranks / step,
        samples_per_second=effective / step,
        mfu=None if not peak else best.flops / (step * peak * 1e12),
        step_seconds=step,
        epoch_seconds=epoch,
        total_seconds=total,
        error_percent=recorded_time_error(speed.gpu.compute_capability),
        energy_kwh=None if question.watts is None else hours * question.watts / 1000,
        cost=None if question.price_per_hour is None else hours * question.price_per_hour,
    )
