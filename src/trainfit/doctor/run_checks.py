"""Every check of a run, and its log beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainfit.core.errors import BadInput
from trainfit.core.files import is_file
from trainfit.doctor import run_facts
from trainfit.doctor.advice import (
    BUSY,
    LOSS_SCALING,
    LOWER_RATE,
    NO_FP16,
    RAISE_BATCH,
    WIDER_RANGE,
    nan_steps,
)
from trainfit.doctor.finding import Check, Fault, Finding, Seen, check, worst_first
from trainfit.doctor.logs import read_log
from trainfit.doctor.patterns.training import TRAINFIT_OOM
from trainfit.doctor.run_facts import FEWER_EVALUATIONS, RunFacts, run_low_mfu, run_underused
from trainfit.runs.event_log import LOG
from trainfit.runs.reader import read_run

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
    events = run.rows_of("oom")
    if not events:
        return
    cuts = [event["micro_batches"] for event in events if "micro_batches" in event]
    evaluations = sum("eval_batch_size" in event for event in events)
    lower, expandable, in_evaluations = TRAINFIT_OOM.mend
    steps = [lower] if cuts else []
    steps += [expandable] if len(events) > len(cuts) + evaluations else []
    steps += [in_evaluations] if evaluations else []
    told = f"memory ran out {len(events)} times"
    if cuts:
        told += f"; steps are cut into {cuts[-1]} from there on"
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


EVENT_CHECKS: tuple[Check[RunFacts], ...] = (
    run_failed,
    run_out_of_memory,
    run_not_finite,
    run_overflows,
    run_bf16_emulated,
    run_full_precision,
)

OVER_PLAN = 0.05
"""Where no error of the estimate was recorded."""
SPIKE = 0.10


@check(
    Fault(
        id="run_memory_unused",
        severity="info",
        title="GPU memory was left unused",
        why="A larger batch would use it, and the GPU better, unless it is busy already.",
        mend=(RAISE_BATCH, "model.use_gradient_checkpointing=false, where it is on."),
    )
)
def run_memory_unused(run: RunFacts) -> Iterator[Seen]:
    """Under 80% at the peak; worth a warning where the GPU was not busy either."""
    plan, peak = run.plan, max(run.figures("memory_gib"), default=None)
    if plan is None or plan.gpu is None or plan.memory is None or peak is None:
        return
    share = 100 * peak / plan.memory.capacity_gib
    if share < BUSY:
        slow = any(True for _ in run_low_mfu.look(run)) or any(
            True for _ in run_underused.look(run)
        )
        yield Seen(
            evidence=f"{run.where}at most {peak:.1f} of {plan.memory.capacity_gib:.1f} GiB "
            f"({share:.0f}%)",
            severity="warning" if slow else None,
        )


@check(
    Fault(
        id="run_over_plan",
        severity="warning",
        title="The run took more memory than was planned",
        why="What else the plan promises, such as the next larger batch, may not hold either.",
        mend=(
            "`trainfit plan nli` again with what the run really does; other programs on the GPU "
            "and custom kernels are not in the estimate.",
            "training.batch_size=8 (lower than now), to have room.",
        ),
    )
)
def run_over_plan(run: RunFacts) -> Iterator[Seen]:
    """The measured peak against the predicted one, with its error bar."""
    plan, peak = run.plan, max(run.figures("memory_gib"), default=None)
    if plan is None or plan.gpu is None or plan.memory is None or peak is None:
        return
    planned = plan.memory.peak_allocated_gib
    known = plan.memory.error_percent
    if peak > planned * (1 + (OVER_PLAN if known is None else max(known / 100, 0.02))):
        yield Seen(evidence=f"{run.where}peak {peak:.2f} GiB, planned {planned:.2f} GiB")


@check(
    Fault(
        id="run_evaluation_memory",
        severity="warning",
        title="Evaluations make the memory peak",
        why="Training would have had room for more, or an evaluation will run out.",
        mend=("Smaller evaluation batches: training.eval_batch_size=8.", *FEWER_EVALUATIONS),
    )
)
def run_evaluation_memory(run: RunFacts) -> Iterator[Seen]:
    """The peak so far jumps from the last row before an evaluation to the first after it."""
    train = run.part.train
    if "memory_gib" not in train:
        return
    for step in run.figures("step", run.part.evaluations):
        before, after = (
            run.figures("memory_gib", {"memory_gib": train["memory_gib"][chosen]})
            for chosen in (train["step"] <= step, train["step"] > step)
        )
        if before and after and before[-1] > 0 and after[0] > before[-1] * (1 + SPIKE):
            rise = f"from {before[-1]:.2f} to {after[0]:.2f} GiB"
            yield Seen(evidence=f"{run.where}the evaluation at step {step:.0f} raised it {rise}")
            return


MEMORY_CHECKS: tuple[Check[RunFacts], ...] = (
    run_memory_unused,
    run_over_plan,
    run_evaluation_memory,
)

CHECKS: tuple[Check[RunFacts], ...] = (
    *EVENT_CHECKS,
    *run_facts.CHECKS,
    *MEMORY_CHECKS,
)
_IN_NUMBERS = frozenset({"trainfit_oom", "nan_loss", "low_mfu"})
"""What the run's own numbers and events tell better than its log."""


def examine_run(folder: Path) -> tuple[Finding, ...]:
    """What went wrong, or could go better, in a run; what several folds share is said once."""
    findings: dict[tuple[str, str], Finding] = {}
    run = read_run(folder)
    begun = [part for part in run.parts if is_file(part.folder / LOG)]
    if not begun:
        raise BadInput(f"{folder} holds no training", "give the folder of a run that has begun")
    for part in begun:
        facts = RunFacts(part=part, plan=run.plan)
        found = [finding for check in CHECKS for finding in check(facts)]
        found += [f for f in read_log(part.folder / LOG) if f.id not in _IN_NUMBERS]
        for finding in found:
            findings.setdefault((finding.id, finding.title), finding)
    return worst_first(findings.values())
