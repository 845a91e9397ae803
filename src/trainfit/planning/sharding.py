"""Sharding of a plan over ranks: as asked for, or where a replica does not fit one GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import MemoryEstimate, Plan, Reason, Sharding
from trainfit.planning.decide import pinned
from trainfit.planning.estimator.estimate import GIB
from trainfit.planning.question import Question

_GATHERED = 2
"""Layers whose weights a rank holds whole at a time."""


_SHARDED = ("adamw_fused", "adamw", "adamw_bf16")
"""Optimizers whose state is sharded like the weights."""


def shards_of(sharding: str, ranks: int, machines: int) -> int:
    """Number of ranks that share one copy of the model."""
    return {"none": 1, "fsdp": ranks, "hybrid": ranks // machines}[sharding]


def sharded(
    question: Question, plan: Plan, machines: int, replan: Callable[[int], Plan] | None
) -> Plan:
    """Shard a plan, as the question pins it or where several ranks can share what does not fit.

    `replan` plans with the given number of bytes more; None where memory is plenty.
    """
    pin = pinned(question, "sharding")
    if pin is not None and pin.value == "none":
        return plan
    obstacle = _obstacle(plan)
    if pin is None:
        if not _is_short(plan) or obstacle is not None or replan is None:
            return plan
        kind, why = "fsdp", "the model with its optimizer does not fit one GPU"
    else:
        kind, why = str(pin.value), pin.why
        if obstacle is not None:
            raise BadInput(f"sharding is {kind}, {obstacle[0]}", obstacle[1])
    if kind == "hybrid" and plan.ranks % machines:
        raise BadInput(
            f"sharding is hybrid, and {plan.ranks} ranks are not divided evenly by machines",
            "start as many ranks on each machine, or use optimization.sharding=fsdp",
        )
    shards = shards_of(kind, plan.ranks, machines)
    reason = Reason(setting="sharding", value=kind, why=f"{why}; {_sharers(shards)}")
    asked = replace(plan, sharding=cast(Sharding, kind), reasons=(*plan.reasons, reason))
    if plan.memory is None or replan is None:
        return asked
    gained = room_gained(plan.memory, question.layers, shards)
    roomy = replan(gained)
    if not roomy.fits and pin is None:
        return plan
    memory = roomy.memory
    assert memory is not None
    return replace(
        roomy,
        sharding=asked.sharding,
        reasons=(*roomy.reasons, reason),
        memory=_spread(memory, gained / GIB, shards),
    )


def _is_short(plan: Plan) -> bool:
    """Tell a plan of several GPUs of which one does not hold the model."""
    return plan.ranks > 1 and not plan.fits and plan.memory is not None and plan.device == "cuda"


def _obstacle(plan: Plan) -> tuple[str, str] | None:
    """Setting of a plan that does not go with sharding, and the fix."""
    if plan.quantization != "none":
        fix = "set optimization.sharding=none, or model.quantization=none"
        return "and quantized weights are not shared among ranks", fix
    if plan.optimizer in _SHARDED and not plan.offload_optimizer:
        return None
    asked = "offload_optimizer" if plan.offload_optimizer else plan.optimizer
    fix = f"use {', '.join(_SHARDED)} on the GPU, or optimization.sharding=none"
    return f"which does not go with {asked}", fix


def _sharers(shards: int) -> str:
    return f"{shards} ranks share it" if shards > 1 else "one rank shares it with nobody"


def room_gained(memory: MemoryEstimate, layers: int, ranks: int) -> int:
    """Bytes that sharding over `ranks` saves on each of them; below 0 where copies take more."""
    weights = memory.weights_gib + memory.adapters_gib
    kept_away = (weights + memory.optimizer_gib) * (1 - 1 / ranks)
    gathered = weights * min(1.0, _GATHERED / max(1, layers))
    return int((kept_away - gathered) * GIB)


def _spread(memory: MemoryEstimate, less: float, shards: int) -> MemoryEstimate:
    """Convert memory planned with `less` GiB more than a GPU has to that of each rank."""
    return replace(
        memory,
        weights_gib=memory.weights_gib / shards,
        adapters_gib=memory.adapters_gib / shards,
        optimizer_gib=memory.optimizer_gib / shards,
        peak_allocated_gib=memory.peak_allocated_gib - less,
        peak_reserved_gib=memory.peak_reserved_gib - less,
        capacity_gib=memory.capacity_gib - less,
        error_percent=None,  # nothing was recorded of sharded steps
    )
