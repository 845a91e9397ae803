"""A model that no GPU of the job holds alone: what FSDP2 leaves to each rank.

The planner runs the step of one rank. Spread over the ranks, weights and optimizer state are there
once instead of once per rank, so a step is planned as if the GPU had that much more memory. Two
blocks are whole at a time, the one that is computed and the one that is fetched, and gradients are
whole until they are summed at the end of a step.
"""

from __future__ import annotations

from dataclasses import replace

from trainfit.planning.memory import GIB
from trainfit.records import MemoryEstimate, Plan, Reason

_GATHERED = 2


def room_gained(memory: MemoryEstimate, layers: int, ranks: int) -> int:
    """The bytes that a rank need not hold."""
    weights = memory.weights_gib + memory.adapters_gib
    kept_away = (weights + memory.optimizer_gib) * (1 - 1 / ranks)
    gathered = weights * min(1.0, _GATHERED / max(1, layers))
    return max(0, int((kept_away - gathered) * GIB))


def spread(plan: Plan, gained: int) -> Plan:
    """A plan that was made for a GPU with so many bytes more, as it is on the real one."""
    memory = plan.memory
    assert memory is not None
    less = gained / GIB
    reason = Reason(
        setting="sharding",
        value="fsdp",
        why=f"the model with its optimizer does not fit one GPU; {plan.ranks} ranks share it",
    )
    return replace(
        plan,
        sharding="fsdp",
        memory=replace(
            memory,
            weights_gib=memory.weights_gib / plan.ranks,
            adapters_gib=memory.adapters_gib / plan.ranks,
            optimizer_gib=memory.optimizer_gib / plan.ranks,
            peak_allocated_gib=memory.peak_allocated_gib - less,
            peak_reserved_gib=memory.peak_reserved_gib - less,
            capacity_gib=memory.capacity_gib - less,
            error_percent=None,  # nothing was recorded of sharded steps
        ),
        reasons=(*plan.reasons, reason),
    )
