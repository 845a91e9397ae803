"""From a job and a machine to a plan: every setting, each with a reason and what lost.

What follows from the machine alone is decided first (decisions.py). Then the cuts of the step and
the ways of checkpointing are weighed by what they take and how fast they are (fitting.py), and the
one that wins is run in full on fake tensors before it is promised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from trainfit.core import caches, codec
from trainfit.core.plan_records import MemoryEstimate, Plan, Reason, RuntimeSettings, TaskSpec
from trainfit.core.records import Gpu, GpuState, HardwareProfile, Measurements
from trainfit.core.settings import chosen_by
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import GpuSpec, find
from trainfit.hardware.gpus import catalogue_gpu
from trainfit.packing import Cut, PackedCut, PaddedCut
from trainfit.planning.compile_choice import decide_compile, may_compile
from trainfit.planning.cpu_choice import choose
from trainfit.planning.cuts import (
    Basis,
    basis_for,
    fitter_for,
    held_back,
    modes_of,
    target_for,
    weigh,
)
from trainfit.planning.estimator import estimate
from trainfit.planning.estimator.depths import folder_content, room_gained, spread
from trainfit.planning.estimator.estimate import Target, start
from trainfit.planning.explain import choices_for, memory_of, time_of, what_would_fit
from trainfit.planning.fit import Candidate, Cutting, Fitter, Speed
from trainfit.planning.question import Question

_SAMPLE = 256
_SM_STEP = 48


def plan(
    question: Question,
    profile: HardwareProfile,
    *,
    memory_gib: float | None = None,
    ranks: int = 1,
    measured: Measurements | None = None,
) -> Plan:
    """The plan of a job on a machine; `memory_gib` bounds what may be taken of its GPU.

    `measured` is what `check --measure` found on the machine, and makes its times better.
    """
    gpu = profile.gpus[0] if profile.gpus else None
    target = target_for(profile, gpu, memory_gib)
    place = estimate.place("plans", *_asked(question, profile, target, ranks, measured))
    found = caches.read(Plan, place)
    if found is not None:
        return found
    start(2)
    basis = basis_for(question, profile, gpu, ranks)
    fitter = fitter_for(question, basis, (target,))
    made = _planned(question, profile, basis, fitter, 0, target, ranks, measured, exact=True)
    if not made.fits and ranks > 1 and gpu is not None and made.memory is not None:
        gained = room_gained(made.memory, question.layers, ranks)
        roomy = replace(target, capacity=target.capacity + gained)
        fitter = fitter_for(question, basis, (roomy,))
        shared = _planned(question, profile, basis, fitter, 0, roomy, ranks, measured, exact=True)
        made = spread(shared, gained) if shared.fits else made
    caches.write(place, made)
    return made


def _asked(
    question: Question,
    profile: HardwareProfile,
    target: Target,
    ranks: int,
    measured: Measurements | None,
) -> list[str]:
    """Everything that a plan depends on."""
    gpu = profile.gpus[0] if profile.gpus else None
    parts = (
        question,
        folder_content(question.arguments),
        None if gpu is None else replace(gpu, state=GpuState()),
        target,
        _host(question, profile, gpu, ranks),
        profile.simulated,
        ranks,
        measured,
    )
    return [codec.dumps(part, indent=None) for part in parts]


def _host(question: Question, profile: HardwareProfile, gpu: Gpu | None, ranks: int) -> Any:
    """The facts about the host that a plan depends on: none of this machine for a GPU elsewhere."""
    if gpu is None:
        return profile.cpu, profile.compile, choose(question, profile, ranks)
    return profile.cpu.cores if profile.simulated else (profile.cpu, profile.compile)


def compare(question: Question, gpus: Sequence[GpuSpec], ranks: int = 1) -> list[tuple[str, Plan]]:
    """The plans for many GPUs; those that run the same step are weighed together."""
    start(2)
    here = as_if(gpus[0])
    profiles = [replace(here, gpus=(catalogue_gpu(spec),)) for spec in gpus]
    groups: dict[tuple[Any, ...], list[int]] = {}
    bases = []
    for at, profile in enumerate(profiles):
        basis = basis_for(question, profile, profile.gpus[0], ranks)
        bases.append(basis)
        groups.setdefault(basis.key, []).append(at)
    found: dict[int, Plan] = {}
    for members in groups.values():
        targets = [target_for(profiles[at], profiles[at].gpus[0], None) for at in members]
        kinds = list(dict.fromkeys(map(_coarse, targets)))
        fitter = fitter_for(question, bases[members[0]], tuple(kinds))
        for target, at in zip(targets, members, strict=True):
            place = kinds.index(_coarse(target))
            found[at] = _planned(
                question, profiles[at], bases[at], fitter, place, target, ranks, exact=False
            )
    return [(spec.slug, found[at]) for at, spec in enumerate(gpus)]


def curve(
    question: Question, profile: HardwareProfile, chosen: Plan
) -> list[tuple[int, MemoryEstimate]]:
    """Memory against batch size around a plan, for its picture."""
    gpu = profile.gpus[0] if profile.gpus else None
    basis = basis_for(question, profile, gpu, chosen.ranks)
    capacity = chosen.memory.capacity_gib if chosen.memory else None
    target = target_for(profile, gpu, capacity)
    length = question.workload.max_length
    sizes = sorted({1, *(max(1, round(chosen.batch_size * f)) for f in (0.25, 0.5, 1, 1.5, 2, 3))})
    many = min(chosen.gradient_accumulation_steps, 2)
    cuttings = [_full(size, length, many, chosen.packed) for size in sizes]
    fitter = Fitter(question.factory, basis.arguments, question.layers, cuttings, (target,))
    speed = Speed(gpu=None, precision=chosen.precision, tf32=False)
    found = fitter.candidates(0, (chosen.gradient_checkpointing,), speed)
    by_size = {c.cutting.rows * c.cutting.width // length: c for c in found}
    return [(size, memory_of(by_size[size], target, gpu, None)) for size in sizes]


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


def _coarse(target: Target) -> Target:
    """GPUs with about as many SMs take about the same: theirs is rounded up to compare many."""
    rounded = -(-target.sm_count // _SM_STEP) * _SM_STEP
    major = target.compute_capability.split(".")[0]
    return Target(sm_count=rounded, compute_capability=f"{major}.0", capacity=1 << 50)


def _planned(
    question: Question,
    profile: HardwareProfile,
    basis: Basis,
    fitter: Fitter,
    place: int,
    target: Target,
    ranks: int,
    measured: Measurements | None = None,
    *,
    exact: bool,
) -> Plan:
    gpu = profile.gpus[0] if profile.gpus else None
    spec = find(gpu.slug) if gpu is not None and gpu.slug is not None else None
    speed = Speed(
        gpu=spec, precision=basis.precision.value, tf32=basis.tf32.value, measured=measured
    )
    held = held_back(target, basis)
    later = may_compile(question, profile, gpu)
    weighed = weigh(fitter, place, modes_of(question, basis), held, speed, exact, later)
    steps = math.ceil(question.workload.sequences / basis.effective.value)
    compiling = decide_compile(
        question,
        profile,
        gpu,
        weighed.best,
        weighed.fits,
        (lambda: fitter.exact(weighed.best, held, speed, compile=True)) if exact else None,
        steps * question.workload.epochs,
    )
    best, fits = compiling.candidate, compiling.fits
    if exact and fits and best.taken.fits is None:
        best = fitter.exact(best, held, speed)
        fits = bool(best.taken.fits)
    time = time_of(question, best, speed, ranks, basis.effective.value)
    choices = choices_for(question, profile, basis, weighed, held, compiling)
    lengths = sorted(question.workload.lengths)
    return Plan(
        fits=fits,
        task=TaskSpec(
            factory=question.factory,
            arguments=basis.arguments
            | best.cutting.shape
            | {"checkpointing": best.checkpointing, "compile": compiling.choice.value},
        ),
        workload=replace(
            question.workload,
            lengths=tuple(lengths[:: max(1, len(lengths) // _SAMPLE)]),
            effective_batch_size=basis.effective.value,
        ),
        gpu=None if gpu is None else gpu.slug,
        device=profile.device,
        ranks=ranks,
        weights_dtype=basis.arguments.get("dtype", "float32"),
        runtime=RuntimeSettings(
            tf32=basis.tf32.value,
            attention="efficient" if question.pinned("flash") is False else None,
            num_threads=None if basis.threads is None else basis.threads.value,
            **{
                row.field.removeprefix("runtime."): question.pinned(row.name)
                for row in chosen_by("user")
                if row.field.startswith("runtime.")
            },
        ),
        cuts=_fallbacks(basis, best),
        compile_mode=question.pinned("compile_mode") or "default",
        liger=bool(question.pinned("liger")),
        memory=memory_of(best, target, gpu, fits, compiling.choice.value),
        time=time,
        reasons=tuple(
            Reason(setting=name, value=c.value, why=c.why, alternatives=c.alternatives)
            for name, c in choices.items()
        ),
        measurements=tuple(replace(m, samples=()) for m in measured.items) if measured else (),
        advice=() if fits else what_would_fit(question, basis.arguments, best, held, exact),
        assumptions=_assumptions(profile),
        **{f.name: choices[f.name].value for f in fields(Plan) if f.name in choices},
    )


def _assumptions(profile: HardwareProfile) -> tuple[str, ...]:
    if not profile.cpu.assumed:
        return ()
    return (f"{profile.cpu.cores} usable cores beside the GPU, which is not in this machine",)


def _fallbacks(basis: Basis, best: Candidate) -> tuple[int, ...]:
    count = best.cutting.cut.micro_batches
    plain = [c.cut.micro_batches for c in basis.cuttings[basis.plain :]]
    return (count, *(c for c in plain if c > count))
