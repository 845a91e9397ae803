"""Plans that differ from the planner's: made consistent, with the memory that they will take.

Where a change leaves memory as it is, or makes it smaller, the plan is made right here; what it
needs more is predicted from the plan's own breakdown, and only where that says no is the planner
asked, since that takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from trainfit.packing import Cut, ladder
from trainfit.planning.fitting import look_at
from trainfit.planning.memory import MARGIN
from trainfit.planning.question import Question
from trainfit.records import HardwareProfile, MemoryEstimate, Plan, Scalar

Ask = Callable[[Mapping[str, Scalar]], Plan]
"""The planner's answer with further settings pinned."""
KEPT = {"none": 1.0, "selective": 0.6, "full": 0.3}
"""Activations that stay, as an upper bound."""
_EAGER = 2.2
"""Activations of a step that is not compiled, against one that is, as an upper bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What may be varied, and around what."""

    question: Question
    profile: HardwareProfile
    base: Plan
    """The planner's own answer."""
    ask: Ask

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU to train on."""
        return bool(self.profile.gpus)

    def free(self, *names: str) -> bool:
        """Whether nobody has set any of these: not the user, nor a preset."""
        pins = self.question.pins
        return all(name not in pins or pins[name].origin == "default" for name in names)


def settings_of(plan: Plan) -> dict[str, Scalar]:
    """The settings that are tuned, by their names."""
    return {
        "precision": plan.precision,
        "tf32": plan.runtime.tf32,
        "packed": plan.packed,
        "attention": plan.attention,
        "attention_kernel": plan.runtime.attention,
        "compile": plan.compile,
        "compile_mode": plan.compile_mode,
        "liger": plan.liger,
        "gradient_checkpointing": plan.gradient_checkpointing,
        "micro_batch_tokens": plan.micro_batch_tokens,
        "optimizer": plan.optimizer,
        "num_workers": plan.num_workers,
        "pin_memory": plan.pin_memory,
    }


def differences(base: Plan, plan: Plan) -> dict[str, Scalar]:
    """What `plan` has other than `base`."""
    before = settings_of(base)
    return {name: value for name, value in settings_of(plan).items() if value != before[name]}


# ── consistent plans ──────────────────────────────────────────────────────────────────────────


def changed(plan: Plan, **changes: Any) -> Plan:
    """The plan with other settings of the step, which the task to estimate is told as well."""
    names = {"gradient_checkpointing": "checkpointing"}
    arguments = plan.task.arguments | {names.get(k, k): v for k, v in changes.items()}
    return replace(plan, task=replace(plan.task, arguments=arguments), **changes)


def with_budget(space: Space, plan: Plan, factor: float) -> Plan:
    """The plan with micro-batches of about `factor` times the tokens, and the same steps."""
    workload = space.question.workload
    longest, share = max(workload.lengths), math.ceil(plan.effective_batch_size / plan.ranks)
    rows = share if space.free("batch_size") else space.base.batch_size
    most = max(longest, rows * workload.max_length)
    if not plan.packed:
        most = min(most, max(longest, round(plan.micro_batch_tokens * factor)))
    count = min(max(1, round(plan.gradient_accumulation_steps / factor)), share)
    batch, ranks = plan.effective_batch_size, plan.ranks
    rungs, shape = _cut(workload.lengths, plan.packed, batch, most, ranks, count)
    cut = rungs[0]
    return replace(
        plan,
        task=replace(plan.task, arguments=plan.task.arguments | shape),
        micro_batch_tokens=cut.tokens,
        batch_size=max(1, math.ceil(cut.tokens / workload.max_length)),
        gradient_accumulation_steps=cut.micro_batches,
        cuts=tuple(rung.micro_batches for rung in rungs),
        memory=_scaled(plan.memory, cut.tokens / plan.micro_batch_tokens),
        time=None,
    )


@lru_cache(maxsize=32)
def _cut(
    lengths: tuple[int, ...], packed: bool, effective: int, cap: int, ranks: int, count: int
) -> tuple[tuple[Cut, ...], dict[str, Any]]:
    """The ladder of cuts, and the shape of the first; it takes a while, and is asked for again.

    Packed micro-batches are at least so many, padded ones at most.
    """
    array = np.asarray(lengths, dtype=np.int64)
    least = count if packed else 1
    rungs = ladder(
        array, effective, cap, padded=not packed, ranks=ranks, at_least=least, at_most=count
    )
    return rungs, look_at(array, rungs[0], effective, ranks, 0).shape


def _scaled(memory: MemoryEstimate | None, factor: float) -> MemoryEstimate | None:
    """Activations grow with the tokens; all else stays."""
    if memory is None:
        return None
    more = memory.activations_gib * (factor - 1)
    return replace(
        memory,
        activations_gib=memory.activations_gib + more,
        peak_allocated_gib=memory.peak_allocated_gib + more,
        peak_reserved_gib=memory.peak_reserved_gib + more,
    )


# ── what fits ─────────────────────────────────────────────────────────────────────────────────


def fits(space: Space, plan: Plan) -> bool:
    """Whether it fits by an upper bound; where that is too much, by the planner."""
    if predicted_gib(space.base, plan) <= room(space.base):
        return True
    pins: dict[str, Scalar] = {
        "batch_size": plan.batch_size,
        "gradient_checkpointing": plan.gradient_checkpointing,
        "compile": plan.compile,
    }
    return space.ask(pins).fits


def predicted_gib(base: Plan, plan: Plan) -> float:
    """What a step by `plan` reserves at most, from the breakdown of `base`."""
    memory = base.memory
    if memory is None:
        return 0.0
    factor = plan.micro_batch_tokens / base.micro_batch_tokens
    factor *= KEPT[plan.gradient_checkpointing] / KEPT[base.gradient_checkpointing]
    if base.compile and not plan.compile:
        factor *= _EAGER
    return memory.peak_reserved_gib + memory.activations_gib * (factor - 1)


def room(base: Plan) -> float:
    """What a step may take, with the margin kept free."""
    return math.inf if base.memory is None else base.memory.capacity_gib * (1 - MARGIN)
