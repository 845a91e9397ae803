"""Checks of a run: what happened in it, and what it computes in."""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.doctor.advice import LOSS_SCALING, LOWER_RATE, NO_FP16, WIDER_RANGE, nan_steps
from trainfit.doctor.finding import Check, Fault, Seen, check
from trainfit.doctor.patterns.training import TRAINFIT_OOM
from trainfit.doctor.run_facts import RunFacts

OVERFLOWS = 0.05
"""The share of steps from which on fp16 is more than looking for its scale."""


@check(
    Fault(
        id="run_failed",
        severity="error",
        title="The run failed",
        why="It did not reach its end; what was saved can be gone on from.",
        mend=("Do what the message says, then `trainfit train nli --resume RUN`.",),
    )
)
def run_failed(run: RunFacts) -> Iterator[Seen]:
    """The last event says why."""
    for event in run.said("failed")[-1:]:
        yield Seen(evidence=f"{run.where}step {event.step}: {event.text}")


@check(
    Fault(
        id="run_out_of_memory",
        severity="warning",
        title=TRAINFIT_OOM.title,
        why=TRAINFIT_OOM.why,
        mend=TRAINFIT_OOM.mend,
    )
)
def run_out_of_memory(run: RunFacts) -> Iterator[Seen]:
    """How far down the ladder of cuts the run had to go."""
    events = run.said("oom")
    if not events:
        return
    finer = [event for event in events if "steps are cut" in event.text]
    evaluations = [event for event in events if "evaluation" in event.text]
    retried = len(events) - len(finer) - len(evaluations)
    lower, expandable, in_evaluations = TRAINFIT_OOM.mend
    steps = [lower] if finer else []
    steps += [expandable] if retried else []
    steps += [in_evaluations] if evaluations else []
    told = f"memory ran out {len(events)} times"
    if finer:
        told += f"; {finer[-1].text.partition(': ')[2]}"
    yield Seen(evidence=f"{run.where}{told}", mend=tuple(steps))


@check(
    Fault(
        id="run_not_finite",
        severity="error",
        title="Losses or gradients were not finite",
        why="The steps were skipped, so that no weight was spoiled, but nothing was learned in "
        "them.",
        mend=(*nan_steps(fp16=True), NO_FP16),
    )
)
def run_not_finite(run: RunFacts) -> Iterator[Seen]:
    """Steps that were skipped, apart from fp16's search for its scale."""
    skipped = run.said("skipped")
    if skipped:
        fp16 = run.plan is not None and run.plan.precision == "fp16"
        first = skipped[0]
        yield Seen(
            evidence=f"{run.where}{len(skipped)} steps skipped, the first at step {first.step}",
            mend=nan_steps(fp16),
        )


@check(
    Fault(
        id="run_overflows",
        severity="warning",
        title="Many steps were lost to fp16's overflow",
        why="A few are how the loss scale is found; many are steps in which nothing is learned.",
        mend=(WIDER_RANGE, LOWER_RATE, LOSS_SCALING),
    )
)
def run_overflows(run: RunFacts) -> Iterator[Seen]:
    """More than one step in twenty."""
    lost, steps = len(run.said("overflow")), run.steps
    if lost > max(10, OVERFLOWS * steps):
        yield Seen(evidence=f"{run.where}{lost} of {steps} steps overflowed")


@check(
    Fault(
        id="run_bf16_emulated",
        severity="warning",
        title="The run computes in bfloat16 on a GPU that emulates it",
        why="torch says that it works there, and it is several times slower than fp16.",
        mend=("device.mixed_precision=auto, or fp16, which comes with loss scaling.",),
    )
)
def run_bf16_emulated(run: RunFacts) -> Iterator[Seen]:
    """bf16 before compute capability 8.0."""
    spec = run.spec
    if spec and run.plan and run.plan.precision == "bf16" and not spec.native_bf16:
        yield Seen(evidence=f"bf16 on {spec.slug}, compute capability {spec.compute_capability}")


@check(
    Fault(
        id="run_full_precision",
        severity="warning",
        title="The run computes in fp32 on a GPU with half precision",
        why="Mixed precision is about twice as fast and takes about half the memory.",
        mend=("device.mixed_precision=auto", "device.tf32=true, where fp32 has to be."),
    )
)
def run_full_precision(run: RunFacts) -> Iterator[Seen]:
    """fp32, with TF32 or without."""
    spec = run.spec
    if spec and run.plan and run.plan.precision == "fp32" and spec.native_fp16:
        tf32 = "" if run.plan.runtime.tf32 or not spec.native_tf32 else ", and TF32 is off"
        yield Seen(evidence=f"fp32 on {spec.slug}{tf32}")


CHECKS: tuple[Check[RunFacts], ...] = (
    run_failed,
    run_out_of_memory,
    run_not_finite,
    run_overflows,
    run_bf16_emulated,
    run_full_precision,
)
