"""A step of a model that is spread over the ranks: all go through it together, or none does."""

from __future__ import annotations

from trainfit.core.errors import OutOfMemory
from trainfit.data.batches import LoadedStep, to_device
from trainfit.engine.distributed import Verdict, lost_rank, sum_over_ranks, vote
from trainfit.engine.fsdp import joined_norm, synchronised
from trainfit.engine.memory_errors import is_out_of_memory
from trainfit.engine.recovery import Parts, Taken, nothing_finer
from trainfit.engine.relaunch import Otherwise, restarts_left
from trainfit.engine.step import accumulate, finish


class MustRestart(OutOfMemory):
    """Memory ran out on this rank while the others wait for it: only a new start helps."""

    def __init__(self, what: str, fix: str = "", change: Otherwise | None = None) -> None:
        """`change` is what the new start is to do otherwise."""
        again = "torchrun starts it again" if restarts_left() > 0 else "go on with --resume"
        super().__init__(what, fix or f"{again} from the newest checkpoint")
        self.change = change or Otherwise()


def take_sharded_step(
    parts: Parts, loaded: LoadedStep, weight: float, rung: int, *, stop: bool
) -> Taken:
    """Take a step by the cut of `rung`, on all ranks together.

    Where memory has run out before, gradients are kept in shards from micro-batch to micro-batch.
    """
    batches = to_device(loaded.batches, parts.device)
    try:
        loss = accumulate(
            parts.model,
            parts.task.loss,
            synchronised(parts.model, batches, len(loaded.batches), once=rung == 0),
            weight,
            device_type=parts.device.type,
            precision=parts.settings.precision,
            scale=parts.scale,
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise _out_of_memory(parts, rung) from None
        if lost := lost_rank(error):
            raise lost from None
        raise
    agreed = vote(parts.world, Verdict(stop=stop))
    sum_over_ranks(parts.world, [loss])
    numbers = finish(
        parts.optimizer,
        loss,
        max_grad_norm=parts.settings.optimizer.max_grad_norm,
        scale=parts.scale,
        join=joined_norm,
    )
    return Taken(numbers, rung, agreed.stop)


def _out_of_memory(parts: Parts, rung: int) -> OutOfMemory:
    cuts = parts.settings.cuts
    if rung + 1 == len(cuts):
        return OutOfMemory(*nothing_finer(parts))
    pieces = cuts[rung + 1].micro_batches
    return MustRestart(
        f"memory ran out on rank {parts.world.rank}: steps are to be cut into {pieces}",
        change=Otherwise(rung=rung + 1),
    )
