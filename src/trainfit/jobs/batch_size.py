"""Search for the largest micro-batch that fits the GPU, for a job or for a step of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainfit.conf import compose
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan, TaskSpec
from trainfit.jobs.job_plan import answer, machine, question
from trainfit.tuning.finder import MARGIN, BatchSizeFound, BatchSizeJob, find

_SHAPE = ("rows", "width", "slots", "lengths", "micro_batches")


def find_batch_size(
    task: str | TaskSpec | Callable[[int], Callable[[], object]],
    *overrides: str,
    margin: float = MARGIN,
    at_least: int = 1,
    at_most: int | None = None,
    effective_batch_size: int | None = None,
    memory_gib: float | None = None,
    max_length: int | None = None,
    lengths: Sequence[int] | None = None,
) -> BatchSizeFound:
    """Find the largest micro-batch that fits the GPU as it is now, the advised one, and the knee.

    `task` is nli, textclass, pairs or gpt, with `overrides` as on the command line; or a step of
    your own: a TaskSpec (or module:function) whose function takes `rows` beside its arguments and
    returns a model and what makes its step, as for `trainfit.estimate`; or a function of `rows`
    that returns a step, which cannot be predicted and takes a little longer. For those,
    `max_length` is the number of tokens in a row.

    The advised size is `margin` of the largest, in the range from `at_least` to `at_most` rows.
    `memory_gib` bounds the memory. `lengths` are the tokens of the training sequences.
    """
    limits: dict[str, Any] = {
        "margin": margin,
        "at_least": at_least,
        "at_most": at_most,
        "memory_gib": memory_gib,
    }
    if isinstance(task, str) and ":" not in task:
        if max_length is not None:
            raise BadInput(
                "max_length is for a step of your own", f"say data.max_length={max_length}"
            )
        if effective_batch_size is not None:
            overrides = (*overrides, f"training.effective_batch_size={effective_batch_size}")
        return _for_task(task, overrides, lengths, limits)
    if overrides:
        raise BadInput(f"{' '.join(overrides)} beside a step of your own", "leave the words out")
    limits |= {"effective_batch_size": effective_batch_size, "width": max_length}
    if callable(task):
        return find(BatchSizeJob(make=task, **limits))
    spec = TaskSpec(factory=task, arguments={}) if isinstance(task, str) else task
    spec.check()
    given = spec.arguments
    return find(
        BatchSizeJob(factory=spec.factory, arguments=lambda rows: given | {"rows": rows}, **limits)
    )


def _for_task(
    task: str, overrides: Sequence[str], lengths: Sequence[int] | None, limits: dict[str, Any]
) -> BatchSizeFound:
    BatchSizeJob(factory="", **limits)  # a bad range is told before anything is planned
    composed = compose(task, list(overrides))
    profile = machine(composed)
    asked = question(composed, lengths)
    plan = answer(composed, asked, profile, memory_gib=limits["memory_gib"])
    return find(job_of(plan, **limits), profile)


def job_of(plan: Plan, **limits: Any) -> BatchSizeJob:
    """Make the finder's job of a plan: its step, with its settings, at any number of rows."""
    width, effective = plan.workload.max_length, plan.effective_batch_size
    settled = {name: v for name, v in plan.task.arguments.items() if name not in _SHAPE}

    def micro_batches(rows: int) -> int:
        # From the second micro-batch on, gradients occupy memory beside the activations.
        return 1 if rows * plan.ranks >= effective else 2

    def arguments(rows: int) -> dict[str, Any]:
        return settled | _shape(rows, width, plan.packed) | {"micro_batches": micro_batches(rows)}

    return BatchSizeJob(
        factory=plan.task.check().factory,
        arguments=arguments,
        micro_batches=micro_batches,
        width=width,
        packed=plan.packed,
        effective_batch_size=effective,
        runtime=plan.runtime,
        **limits,
    )


def _shape(rows: int, width: int, packed: bool) -> dict[str, Any]:
    """Arguments for `rows` sequences of the full length, the most memory they can take."""
    if packed:
        return {"rows": 1, "width": rows * width, "slots": rows, "lengths": [width] * rows}
    return {"rows": rows, "width": width, "slots": None, "lengths": None}
