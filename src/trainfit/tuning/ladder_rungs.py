"""What a rung of the ladder is, and the naive baseline that all of them stand on.

A rung is data: what it sets in the plan, and what naive habit it ends. So any set of rungs is a
setting, and the best without one of them is the baseline with all the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from trainfit.records import Plan, Record

NAIVE_BATCH = 8
"""Sequences at a time where nobody has thought about it: Trainer's default."""
FUSIBLE = ("sdpa", "varlen")
"""Attention paths that begin as scaled_dot_product_attention on padded rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Naive(Record):
    """Habits of a naive loop, and what else a trial does that trainfit has no setting for."""

    eager: bool = True
    """Attention by matrix products and a softmax."""
    shuffled: bool = True
    """Sequences in random order, padded to the longest of a batch."""
    zeroed: bool = True
    """Gradients are kept and filled with zeros."""
    epoch_steps: int | None = None
    """Epochs of so few steps, to see what starting one costs."""
    liger: bool = False
    """Layers of transformers' models are Liger's."""


THOUGHTFUL = Naive(eager=False, shuffled=False, zeroed=False)
"""What trainfit does by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One optimization."""

    name: str
    what: str
    plan: dict[str, Any] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)
    naive: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Rungs without which it cannot be."""
    replaces: tuple[str, ...] = ()
    """Rungs that change nothing any more where this one is."""
    trades: bool = False
    """It gives something up for something else, so nothing is built on it."""
    between_epochs: bool = False
    """It changes nothing but the start of an epoch."""

    def is_in(self, plan: Plan) -> bool:
        """Whether the plan has it."""
        wanted = ((plan, self.plan), (plan.runtime, self.runtime))
        return all(getattr(has, name) == value for has, it in wanted for name, value in it.items())


def naive_plan(best: Plan) -> Plan:
    """The baseline: the same job as `best`, without a thought."""
    return replace(
        best,
        precision="fp32",
        runtime=replace(best.runtime, tf32=False, cudnn_benchmark=False),
        packed=False,
        attention="sdpa" if best.attention in FUSIBLE else "own",
        batch_size=min(NAIVE_BATCH, best.effective_batch_size),
        micro_batch_tokens=NAIVE_BATCH * best.workload.max_length,
        gradient_accumulation_steps=math.ceil(best.effective_batch_size / NAIVE_BATCH),
        gradient_checkpointing="none",
        compile=False,
        compile_mode="default",
        optimizer="adamw",
        num_workers=0,
        pin_memory=False,
        persistent_workers=False,
        prefetch_factor=None,
    )


def naive_habits(best: Plan) -> Naive:
    """Those that make a difference to the job."""
    return Naive(eager=best.attention in FUSIBLE, shuffled=len(set(best.workload.lengths)) > 1)


def setting(best: Plan, rungs: Iterable[Rung]) -> tuple[Plan, Naive]:
    """The baseline with these rungs."""
    plan, naive = naive_plan(best), naive_habits(best)
    for rung in rungs:
        runtime = replace(plan.runtime, **rung.runtime)
        plan = replace(plan, runtime=runtime, **rung.plan)
        naive = replace(naive, **rung.naive)
    return plan, naive


def describe(plan: Plan, naive: Naive) -> str:
    """The baseline in words, from what `setting` gives without a rung."""
    parts = [
        "fp32 without TF32",
        "eager attention" if naive.eager else "the model's own attention",
        "AdamW weight by weight",
        "gradients zeroed",
        f"{plan.batch_size} of {plan.effective_batch_size} sequences at a time",
        *(["in random order, padded to the longest of them"] if naive.shuffled else []),
        "no loader process",
        "unpinned",
    ]
    return ", ".join(parts)
