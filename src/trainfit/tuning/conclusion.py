"""From what was tried to a plan: what was measured goes into it, with a reason for each change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainfit.records import Measurement, MemoryEstimate, Plan, Reason, Scalar, TimeEstimate
from trainfit.tuning.records import Interval, Trial, TuneResult
from trainfit.tuning.search import Found, Tried

RATE = "tuned_samples_per_second"
"""The measurement that a tuned plan has."""
_WORSE = {
    "oom": "ran out of memory",
    "crashed": "crashed",
    "hung": "was not done in time",
    "failed": "failed",
}


def conclude(base: Plan, found: Found, seconds: float, notes: Sequence[str] = ()) -> TuneResult:
    """The result: the best plan that was measured, or the planner's own where nothing could be."""
    planned = next((tried for tried in found.tried if not tried.candidate.settings), None)
    best = found.tried[0] if found.tried else None
    if best is None:
        notes = (*notes, "nothing could be measured")
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
    changes = best.candidate.settings
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
        time=_time(base, plan, rate),
    )


def _memory(plan: Plan, trials: Sequence[Trial]) -> MemoryEstimate | None:
    """What was predicted, or what was seen where that was more."""
    told = plan.memory
    if told is None:
        return None
    seen = [
        (one.peak_memory_gib, one.peak_reserved_gib)
        for one in trials
        if one.peak_memory_gib is not None and one.peak_reserved_gib is not None
    ]
    allocated = max([told.peak_allocated_gib, *(one for one, _ in seen)])
    return replace(
        told,
        activations_gib=told.activations_gib + allocated - told.peak_allocated_gib,
        peak_allocated_gib=allocated,
        peak_reserved_gib=max([told.peak_reserved_gib, *(one for _, one in seen)]),
    )


def _reasons(base: Plan, plan: Plan, changes: dict[str, Scalar], why: str) -> tuple[Reason, ...]:
    """The planner's own, but for what was changed; and what follows from that keeps its value."""
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


def _time(base: Plan, plan: Plan, rate: Interval) -> TimeEstimate:
    """What was measured in place of what was predicted."""
    workload = plan.workload
    whole = rate.value * plan.ranks  # a trial is one rank's share
    step = plan.effective_batch_size / whole
    epoch = workload.sequences / whole
    mean = sum(workload.lengths) / max(len(workload.lengths), 1)
    told = base.time
    mfu = None
    if told is not None and told.mfu is not None and told.step_seconds is not None:
        mfu = told.mfu * told.step_seconds / step  # the same work in another time
    return TimeEstimate(
        tokens_per_second=mean * whole,
        samples_per_second=whole,
        mfu=mfu if mfu is not None and mfu <= 1 else None,
        step_seconds=step,
        epoch_seconds=epoch,
        total_seconds=epoch * workload.epochs,
        error_percent=None,
    )
