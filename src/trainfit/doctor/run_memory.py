"""Checks of a run: memory planned, measured, left over, and in evaluations."""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.doctor.advice import BUSY, RAISE_BATCH
from trainfit.doctor.finding import Check, Fault, Seen, check
from trainfit.doctor.run_facts import RunFacts
from trainfit.doctor.run_speed import FEWER_EVALUATIONS, run_low_mfu, run_underused

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
    for evaluation in run.evaluations:
        step = evaluation["step"]
        before = run.figures("memory_gib", (row for row in run.rows if row["step"] <= step))
        after = run.figures("memory_gib", (row for row in run.rows if row["step"] > step))
        if before and after and before[-1] > 0 and after[0] > before[-1] * (1 + SPIKE):
            rise = f"from {before[-1]:.2f} to {after[0]:.2f} GiB"
            yield Seen(evidence=f"{run.where}the evaluation at step {step} raised it {rise}")
            return


CHECKS: tuple[Check[RunFacts], ...] = (
    run_memory_unused,
    run_over_plan,
    run_evaluation_memory,
)
