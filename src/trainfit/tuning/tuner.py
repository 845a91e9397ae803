"""tune: plan a job, time candidates, choose the fastest, and store the result."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import MemoryEstimate, Plan, Reason, TaskSpec, TimeEstimate
from trainfit.core.records import HardwareProfile, Measurement, Scalar
from trainfit.hardware.nvml import NvmlGpu, load_nvml, probe_nvml
from trainfit.measuring import remembered
from trainfit.planning import planner
from trainfit.planning.question import Pin, Question
from trainfit.tuning import tuned_cache
from trainfit.tuning.candidates import Ask, Space, Variant, differences, neighbours, promising
from trainfit.tuning.children import Children
from trainfit.tuning.search import Found, Tried, search
from trainfit.tuning.tuned_cache import (
    NOTHING_MEASURED,
    Trial,
    TrialCandidate,
    TuneResult,
)

EVERY = 0.25
"""Seconds between two samples; the driver's own figures are means over about as long."""
_HOLDS_BACK = {
    "sw_power_cap": "its power cap",
    "hw_slowdown": "heat or power",
    "sw_thermal_slowdown": "heat",
    "hw_thermal_slowdown": "heat",
    "hw_power_brake_slowdown": "the power supply",
    "board_limit": "the board's limit",
}

Look = Callable[[], Sequence[NvmlGpu]]


@dataclass(slots=True)
class GpuSamples:
    """Samples of one GPU over a block."""

    gpus: list[NvmlGpu]

    def mean(self, figure: str) -> float | None:
        """Mean of a field of GpuState, over the samples that have it."""
        found = [value for gpu in self.gpus if (value := getattr(gpu.state, figure)) is not None]
        return statistics.fmean(found) if found else None

    def throttling(self) -> tuple[str, ...]:
        """Sentences on the reasons that slowed the GPU down, and in how many samples."""
        said = []
        for reason, cause in _HOLDS_BACK.items():
            held = sum(reason in gpu.state.throttle_reasons for gpu in self.gpus)
            if held:
                of = f"{held} of {len(self.gpus)} samples"
                said.append(f"the GPU was held back by {cause} in {of}")
        return tuple(dict.fromkeys(said))


@contextmanager
def sampled(
    uuid: str | None = None, *, every: float = EVERY, look: Look | None = None
) -> Iterator[GpuSamples]:
    """Sample a GPU while the block runs, or a slice's whole GPU; without NVML there is no sample.

    Without a UUID it is the driver's first one, which need not be CUDA's.
    """
    ask = look or (lambda: probe_nvml(load_nvml, os.getpid()).gpus)
    samples = GpuSamples([])
    over = threading.Event()

    def run() -> None:
        while True:
            found = [gpu for gpu in ask() if uuid is None or _is(gpu, uuid)]
            if not found:
                return
            samples.gpus.append(found[0])
            if over.wait(every):
                return

    thread = threading.Thread(target=run, name="GPU samples", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def _is(gpu: NvmlGpu, uuid: str) -> bool:
    return uuid in (gpu.uuid, *(part.uuid for part in gpu.slices))


# ── the tuner ────────────────────────────────────────────────────────────────────────────────────


RATE = "tuned_samples_per_second"
"""Name of the measurement that marks a tuned plan."""
_WORSE = {
    "oom": "ran out of memory",
    "crashed": "crashed",
    "hung": "was not done in time",
    "failed": "failed",
}


def conclude(base: Plan, found: Found, seconds: float, notes: Sequence[str] = ()) -> TuneResult:
    """Result with the best plan, or the planner's own where nothing could be measured."""
    planned = next((tried for tried in found.tried if not tried.candidate.settings), None)
    best = found.tried[0] if found.tried else None
    if best is None:
        notes = (*notes, NOTHING_MEASURED)
    return TuneResult(
        best=base if best is None else _measured(base, best, found.trials, planned),
        trials=found.trials,
        seconds=seconds,
        changes={} if best is None else best.candidate.settings,
        samples_per_second=None if best is None else best.rate,
        planned_samples_per_second=None if planned is None else planned.rate,
        ended=found.ended,
        notes=tuple(notes),
    )


def _against(planned: Tried | None, trials: Sequence[Trial]) -> str:
    if planned is not None:
        return f"against {planned.rate.value:,.1f} as planned"
    own = [trial.status for trial in trials if not trial.settings]
    return f"as planned it {_WORSE.get(own[0], 'was not tried')}" if own else "nothing else was"


def _measured(base: Plan, best: Tried, trials: Sequence[Trial], planned: Tried | None) -> Plan:
    rate, plan = best.rate, best.candidate.plan
    changes, batch = best.candidate.settings, plan.effective_batch_size
    step = batch / (rate.value * plan.ranks)  # a trial is one rank's share
    why = f"measured: {rate.value:,.1f} samples/s {_against(planned, trials)}"
    if len(changes) > 1:
        why += f", with {len(changes)} settings changed"
    return replace(
        plan,
        reasons=_reasons(base, plan, changes, why),
        measurements=(
            *base.measurements,
            Measurement(name=RATE, unit="samples/s", value=rate.value, samples=best.rates),
        ),
        memory=_memory(plan, [one for one in trials if one.settings == changes]),
        time=(base.time or TimeEstimate()).at(step, batch, plan.workload),
    )


def _memory(plan: Plan, trials: Sequence[Trial]) -> MemoryEstimate | None:
    """Predicted memory, raised to the measured peaks where they were higher."""
    told = plan.memory
    if told is None:
        return None
    seen = [
        (one.peak_memory_gib, one.peak_reserved_gib)
        for one in trials
        if one.peak_memory_gib is not None and one.peak_reserved_gib is not None
    ]
    bound = told.bound and not seen
    if bound or not told.bound:  # an upper bound gives way to what was measured
        seen.append((told.peak_allocated_gib, told.peak_reserved_gib))
    allocated = max(one for one, _ in seen)
    others = told.peak_allocated_gib - told.activations_gib
    return replace(
        told,
        activations_gib=max(0.0, allocated - others),
        peak_allocated_gib=allocated,
        peak_reserved_gib=max(one for _, one in seen),
        bound=bound,
    )


def _reasons(base: Plan, plan: Plan, changes: dict[str, Scalar], why: str) -> tuple[Reason, ...]:
    """Planner's reasons, with those of changed settings replaced."""
    reasons = []
    for reason in base.reasons:
        name = reason.setting
        value: Scalar = getattr(plan, name, reason.value)
        if name in changes:
            others = (f"{reason.value}: {reason.why}",)
            reasons.append(Reason(setting=name, value=changes[name], why=why, alternatives=others))
        elif value != reason.value:
            follows = "follows from what was measured"
            reasons.append(Reason(setting=name, value=value, why=follows))
        else:
            reasons.append(reason)
    named = {reason.setting for reason in reasons}
    new = [
        Reason(setting=name, value=value, why=why)
        for name, value in changes.items()
        if name not in named
    ]
    return (*reasons, *new)


MINUTES = 3.0


def tune(
    question: Question,
    profile: HardwareProfile,
    task: TaskSpec,
    *,
    ask: Ask | None = None,
    ranks: int = 1,
    minutes: float = MINUTES,
    tell: Callable[[Trial], None] = lambda _trial: None,
    keep: bool = True,
) -> TuneResult:
    """Tune for `minutes`, planning included.

    `task` is the factory of trials: `factory(plan, **arguments)` returns a trial.Setup. `ask` plans
    with further pins; by default the planner plans `question`. With `keep` the result is stored for
    the same question on the same machine.
    """
    if not isinstance(minutes, int | float) or not minutes > 0:
        raise BadInput(f"minutes is {minutes!r}", "give a number above 0")

    def plan(pins: Mapping[str, Scalar]) -> Plan:
        decided = pinned(question, pins)
        return planner.plan(decided, profile, ranks=ranks, measured=remembered(profile))

    ask = ask or plan
    began = time.monotonic()
    watched = sampled(profile.gpu.uuid) if profile.gpu is not None else sampled(look=list)
    with _children(profile, task) as children, watched as samples:
        base = ask({})
        if not base.fits:
            advice = base.advice[0] if base.advice else "take a smaller model"
            raise BadInput("the job does not fit this machine", advice)
        space = Space(question=question, profile=profile, base=base, ask=ask)
        make = partial(_candidate, base, task)
        found = search(
            [make(Variant(plan=base)), *map(make, promising(space))],
            lambda winner: map(make, neighbours(space, winner.plan)),
            children.run,
            seconds=minutes * 60 - (time.monotonic() - began),
            tell=tell,
        )
    result = conclude(base, found, time.monotonic() - began, samples.throttling())
    if keep and result.samples_per_second is not None:
        tuned_cache.write(question, profile, result, ranks)
    return result


def pinned(question: Question, pins: Mapping[str, Scalar]) -> Question:
    """Pin these settings in a question."""
    decided = {name: Pin(value=value, origin="tune") for name, value in pins.items()}
    return replace(question, pins=question.pins | decided)


def _candidate(base: Plan, task: TaskSpec, variant: Variant) -> TrialCandidate | Trial:
    """Convert a variant to a candidate, or to the record of a skipped trial."""
    settings = differences(base, variant.plan)
    if variant.skipped:
        return Trial(settings=settings, status="skipped", note=variant.skipped)
    return TrialCandidate(settings=settings, plan=variant.plan, task=task)


def _children(profile: HardwareProfile, task: TaskSpec) -> Children:
    """Start child processes, which import while the planner works."""
    children = Children([task.check().factory.partition(":")[0]])
    compiles = bool(profile.gpus) and not profile.compile.missing(gpu=True)
    children.start(["eager", *(["default"] if compiles else [])])
    return children
