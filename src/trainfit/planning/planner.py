"""From a job and a machine to a plan: every setting, each with a reason and what lost.

Settings that do not depend on memory are decided first (decide.py, cuts.py). Then the cuts of the
step and the ways of checkpointing are compared by memory and speed (fit.py), and the winner is run
in full on fake tensors before it is promised. On the machine that will train, an upper bound of the
memory (bounds.py) decides instead where there is plenty of room.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from trainfit.core import caches, codec
from trainfit.core.errors import TrainfitWarning
from trainfit.core.plan_records import MemoryEstimate, Plan, Reason, RuntimeSettings, TaskSpec
from trainfit.core.records import GpuState, HardwareProfile, Measurements
from trainfit.core.settings import chosen_by
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import GpuSpec, catalogue_gpu, find
from trainfit.planning import decide
from trainfit.planning.bounds import bounded, fetched_bytes, unknown_step
from trainfit.planning.cpu_choice import choose
from trainfit.planning.cuts import (
    FixedSettings,
    Selection,
    checkpointing_modes,
    fitter_for,
    fixed_settings,
    select,
    steady,
    target_for,
    with_margin,
)
from trainfit.planning.estimator import estimate
from trainfit.planning.estimator.depths import folder_content
from trainfit.planning.estimator.estimate import NoEstimate, Target, start
from trainfit.planning.execution import (
    compiled_or_eager,
    execution,
    keep_activations,
    may_compile,
    step_flops,
    ways_of,
)
from trainfit.planning.explain import choices_for, memory_of, time_of, what_would_fit
from trainfit.planning.fit import WORTH_IT, Cutting, Fitter, Speed, StepCandidate, whole_cutting
from trainfit.planning.question import Choice, Question
from trainfit.planning.savers import cheapest, savings
from trainfit.planning.sharding import sharded

_SAMPLE = 256
_SM_STEP = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """A job on a machine, with the settings that do not depend on memory."""

    question: Question
    profile: HardwareProfile
    fixed: FixedSettings
    target: Target
    ranks: int = 1
    measured: Measurements | None = None

    @property
    def speed(self) -> Speed:
        gpu, fixed = self.profile.gpu, self.fixed
        spec = find(gpu.slug) if gpu is not None and gpu.slug is not None else None
        rounding: Any = {"precision": fixed.precision.value, "tf32": fixed.tf32.value}
        return Speed(gpu=spec, measured=self.measured, **rounding)

    @property
    def steps(self) -> float:
        return steps_of_job(self.question, self.fixed.effective.value)


def plan(
    question: Question,
    profile: HardwareProfile,
    *,
    memory_gib: float | None = None,
    ranks: int = 1,
    machines: int = 1,
    measured: Measurements | None = None,
    here: bool = False,
) -> Plan:
    """Plan a job on a machine; `memory_gib` bounds the memory of its GPU.

    `measured` has the rates of `check --measure`, which make the times more accurate. `here`: the
    job is about to run on this machine, so a bound of its memory will do.
    """
    caps = (memory_gib, question.pinned("memory_gib"))
    target = target_for(profile, min((cap for cap in caps if cap is not None), default=None))
    given: Any = {"profile": profile, "target": target, "ranks": ranks, "measured": measured}
    if here and question.sizes is not None:
        fixed = fixed_settings(question, profile, ranks)
        made = _by_bound(_Case(question=question, fixed=fixed, **given))
        if made is not None:
            return sharded(question, made, machines, None)
    asked = _asked(question, profile, target, ranks, measured)
    place = estimate.place("plans", *asked, str(machines))
    found = caches.read(Plan, place)
    if found is not None:
        return found
    start(1)

    def attempt(one: Question, advise: bool = False) -> Plan:
        fixed = fixed_settings(one, profile, ranks)
        if one is not question:  # a saver is tried: many small steps
            start(2)

        def with_more(gained: int) -> Plan:
            roomy = replace(target, capacity=target.capacity + gained)
            case = _Case(question=one, fixed=fixed, **given | {"target": roomy})
            return _planned(case, fitter_for(one, fixed, (roomy,)), 0, exact=True, advise=advise)

        return sharded(one, with_more(0), machines, with_more)

    try:
        made = cheapest(question, profile, attempt, max(1, ranks // machines))
        if not made.fits:
            made = attempt(question, advise=True)
    except NoEstimate as error:
        if not here:
            raise
        fixed = fixed_settings(question, profile, ranks)
        made = _unestimated(_Case(question=question, fixed=fixed, **given), error)
        return sharded(question, made, machines, None)
    caches.write(place, made)
    return made


def _asked(
    question: Question,
    profile: HardwareProfile,
    target: Target,
    ranks: int,
    measured: Measurements | None,
) -> list[str]:
    """List everything that a plan depends on, as the key of its cache."""
    gpu = profile.gpu
    parts = (
        question,
        folder_content(question.arguments),
        None if gpu is None else replace(gpu, state=GpuState()),
        target,
        _host(question, profile, ranks),
        profile.simulated,
        ranks,
        measured,
    )
    return [codec.dumps(part, indent=None) for part in parts]


def _host(question: Question, profile: HardwareProfile, ranks: int) -> Any:
    """Facts of the host that a plan depends on; only assumed cores for a GPU elsewhere."""
    if not profile.gpus:
        return profile.cpu, profile.compile, choose(question, profile, ranks)
    free = steady(profile.memory_available_gib)  # a plan may move moments and activations there
    return profile.cpu.cores if profile.simulated else (profile.cpu, profile.compile, free)


def compare(question: Question, gpus: Sequence[GpuSpec]) -> list[tuple[str, Plan]]:
    """Plan for many GPUs; those that run the same step share one estimate."""
    start(2)
    here = as_if(gpus[0])
    profiles = [replace(here, gpus=(catalogue_gpu(spec),)) for spec in gpus]
    groups: dict[tuple[Any, ...], list[int]] = {}
    bases = []
    for at, profile in enumerate(profiles):
        fixed = fixed_settings(question, profile, 1)
        bases.append(fixed)
        groups.setdefault(fixed.key, []).append(at)
    found: dict[int, Plan] = {}
    for members in groups.values():
        targets = [target_for(profiles[at]) for at in members]
        kinds = list(dict.fromkeys(map(_coarse, targets)))
        fitter = fitter_for(question, bases[members[0]], tuple(kinds))
        for target, at in zip(targets, members, strict=True):
            place = kinds.index(_coarse(target))
            one: Any = {"profile": profiles[at], "fixed": bases[at], "target": target}
            found[at] = _planned(_Case(question=question, **one), fitter, place, exact=False)
    return [(spec.slug, found[at]) for at, spec in enumerate(gpus)]


def curve(
    question: Question, profile: HardwareProfile, chosen: Plan
) -> list[tuple[int, MemoryEstimate]]:
    """Estimate memory for batch sizes around a plan, for its plot."""
    arguments = chosen.task.arguments | {"compile": False}
    capacity = chosen.memory.capacity_gib if chosen.memory else None
    target = target_for(profile, capacity)
    length = question.workload.max_length
    sizes = sorted({1, *(max(1, round(chosen.batch_size * f)) for f in (0.25, 0.5, 1, 1.5, 2, 3))})
    many = min(chosen.gradient_accumulation_steps, 2)
    cuttings = [whole_cutting(size, length, many, chosen.packed) for size in sizes]
    fitter = Fitter(question.factory, arguments, question.layers, cuttings, (target,))
    speed = Speed(gpu=None, precision=chosen.precision, tf32=False)
    found = fitter.candidates(0, (chosen.gradient_checkpointing,), speed)
    by_size = {c.cutting.rows * c.cutting.width // length: c for c in found}
    return [(size, memory_of(by_size[size], target, profile.gpu, None)) for size in sizes]


def _coarse(target: Target) -> Target:
    """Round the SMs up: GPUs with similar SMs need similar memory and share an estimate."""
    rounded = -(-target.sm_count // _SM_STEP) * _SM_STEP
    major = target.compute_capability.split(".")[0]
    return Target(sm_count=rounded, compute_capability=f"{major}.0", capacity=1 << 50)


def _planned(case: _Case, fitter: Fitter, place: int, *, exact: bool, advise: bool = True) -> Plan:
    question, profile, fixed, speed = case.question, case.profile, case.fixed, case.speed
    held = with_margin(case.target, fixed)
    later = may_compile(question, profile)
    selection = select(
        fitter, place, checkpointing_modes(question, fixed), held, speed, exact, later
    )
    graph = decide.captured(question, profile, selection.best.checkpointing, case.ranks)

    def timed(one: StepCandidate) -> StepCandidate:
        """Time a candidate as it will be launched."""
        spent = speed.step_seconds(one.taken, one.cutting, captured=bool(graph.value))
        return replace(one, seconds=spent)

    compiled, best, fits = compiled_or_eager(
        question,
        profile,
        timed(selection.best),
        selection.fits,
        (lambda: timed(fitter.exact(selection.best, held, speed, compile=True))) if exact else None,
        case.steps,
        _compiled_here(case),
    )
    if exact and fits and best.taken.fits is None:
        best = timed(fitter.exact(best, held, speed))
        fits = bool(best.taken.fits)
    how = {"compile": compiled, "cuda_graph": graph}
    if exact and fits and compiled.value:
        eager = replace(best, checkpointing="none")
        best, more = keep_activations(
            question,
            best,
            decide.captured(question, profile, "none", case.ranks),
            lambda share: timed(fitter.exact(eager, held, speed, compile=True, budget=share)),
        )
        how |= more
    made = _written(case, selection, best, fits, how)
    if fits or not advise:
        return made
    advice = what_would_fit(question, fixed.arguments, best, held, exact)
    return replace(made, advice=advice)


def _by_bound(case: _Case) -> Plan | None:
    """Plan without a simulation; None where bounds of the memory do not leave plenty of room.

    Packed rows take the coarsest cut. Padded ones take fewer micro-batches than pad the least where
    that is faster.
    """
    fixed = case.fixed
    checkpointing = "none" if fixed.checkpointing is None else fixed.checkpointing.value
    graph = decide.captured(case.question, case.profile, checkpointing, case.ranks)
    plain, *coarser = (fixed.cuttings[fixed.plain], *fixed.cuttings[: fixed.plain])
    found = _timed_bound(case, plain, graph)
    if found is None:
        return None
    for cutting in coarser:
        other = _timed_bound(case, cutting, graph)
        if other is not None and (other[0].seconds or 0) < WORTH_IT * (found[0].seconds or 0):
            found = other
    best, compiled = found
    selection = Selection(best=best, fits=True, candidates=[best])
    return _written(case, selection, best, True, {"compile": compiled, "cuda_graph": graph})


def _compiled_here(case: _Case) -> Choice | None:
    """Return the compile setting that `train` decides by a bound: estimates would differ."""
    fixed, profile = case.fixed, case.profile
    if profile.simulated or profile.gpu is None:
        return None
    graph = decide.captured(case.question, profile, "none", case.ranks)
    found = _timed_bound(case, fixed.cuttings[fixed.plain], graph)
    return None if found is None else found[1]


def _unestimated(case: _Case, error: NoEstimate) -> Plan:
    """Plan a step that no simulation can run: the largest cut, which the run cuts where it must."""
    warnings.warn(f"memory and time are not predicted: {error.what}", TrainfitWarning, stacklevel=3)
    best = unknown_step(case.fixed)
    without = Choice(value=False, why="the step cannot be simulated")
    how = {
        name: decide.pinned(case.question, name) or without for name in ("compile", "cuda_graph")
    }
    chosen = Selection(best=best, fits=True, candidates=[best])
    return replace(_written(case, chosen, best, True, how), memory=None, time=None)


def _timed_bound(
    case: _Case, cutting: Cutting, graph: Choice
) -> tuple[StepCandidate, Choice] | None:
    """Return a cut that is bounded, with its time by the best way to run it."""
    question, fixed = case.question, case.fixed
    sizes, method = question.sizes, question.workload.method
    best = bounded(question, fixed, cutting, case.target, case.ranks)
    if best is None or sizes is None:
        return None
    ways = ways_of(sizes, method, cutting, case.speed.rates, fetched_bytes(fixed.arguments))
    captured = bool(graph.value)
    way, compiled = execution(question, case.profile, ways, case.steps, captured=captured)
    seconds = None if way is None else way.seconds
    flops = step_flops(sizes, method, cutting, cutting.tokens)
    return replace(best, seconds=seconds, flops=flops), compiled


def steps_of_job(question: Question, effective: int) -> float:
    """Optimizer steps of all trainings of a job."""
    work = question.workload
    return math.ceil(work.sequences / effective) * work.epochs * work.trainings


def _written(
    case: _Case, chosen: Selection, best: StepCandidate, fits: bool, how: dict[str, Choice]
) -> Plan:
    """Write down the plan of a selection; `best` is its winner as it runs, perhaps compiled.

    `how` steps are run: compile and cuda_graph.
    """
    question, profile, fixed = case.question, case.profile, case.fixed
    gpu, measured = profile.gpu, case.measured
    held = with_margin(case.target, fixed)
    time = time_of(question, best, case.speed, case.ranks, fixed.effective.value)
    budget = how.get("activation_budget", fixed.budget).value
    choices = choices_for(question, profile, fixed, chosen, held, how)
    compiled = how["compile"].value
    memory = memory_of(best, case.target, gpu, fits, compiled)
    if budget < 1:
        memory = replace(memory, error_percent=None)  # no such step was recorded
    lengths = sorted(question.workload.lengths)
    cores = f"{profile.cpu.cores} usable cores beside the GPU, which is not in this machine"
    return Plan(
        fits=fits,
        task=TaskSpec(
            factory=question.factory,
            arguments=fixed.arguments
            | ({"activation_budget": budget} if budget < 1 else {})
            | best.cutting.shape
            | {"checkpointing": best.checkpointing, "compile": compiled},
        ),
        workload=replace(
            question.workload,
            lengths=tuple(lengths[:: max(1, len(lengths) // _SAMPLE)]),
            effective_batch_size=fixed.effective.value,
        ),
        gpu=None if gpu is None else gpu.slug,
        device=profile.device,
        ranks=case.ranks,
        weights_dtype=fixed.arguments.get("dtype", "float32"),
        runtime=RuntimeSettings(
            tf32=fixed.tf32.value,
            attention="efficient" if question.pinned("flash") is False else None,
            num_threads=None if fixed.threads is None else fixed.threads.value,
            **{
                row.field.removeprefix("runtime."): question.pinned(row.name)
                for row in chosen_by("user")
                if row.field.startswith("runtime.")
            },
        ),
        cuts=_fallbacks(fixed, best),
        compile_mode=question.pinned("compile_mode") or "default",
        liger=bool(question.pinned("liger")),
        reduce_dtype=question.pinned("reduce_dtype") or "fp32",
        memory=memory,
        time=time,
        reasons=tuple(
            Reason(
                setting=name,
                value=c.value,
                why=c.why,
                alternatives=(*c.alternatives, *savings(question, name, memory)),
            )
            for name, c in choices.items()
        ),
        measurements=tuple(replace(m, samples=()) for m in measured.items) if measured else (),
        assumptions=(*question.assumed, *([cores] if profile.cpu.assumed else [])),
        data=question.data,
        step_parts=best.cutting.parts,
        **{f.name: choices[f.name].value for f in fields(Plan) if f.name in choices},
    )


def _fallbacks(fixed: FixedSettings, best: StepCandidate) -> tuple[int, ...]:
    count = best.cutting.cut.micro_batches
    plain = [c.cut.micro_batches for c in fixed.cuttings[fixed.plain :]]
    return (count, *(c for c in plain if c > count))
