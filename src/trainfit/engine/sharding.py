"""FSDP2: weights, gradients and optimizer state spread over the ranks, for what no GPU holds alone.

Every repeated block, and what is left of the model, is gathered when it is computed and let go
after it. So ranks talk inside forward and backward, one that runs out of memory cannot take its
step again while the others wait for it, and the run starts again from its newest checkpoint with
the next cut. Gradients are summed, not averaged: a step's loss is divided by the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainfit.runtime.compiling import repeated_blocks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")


def shard(model: nn.Module, device: torch.device) -> None:
    """Spread a model that every rank has on its CPU, block by block; each keeps its shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*repeated_blocks(model), model):
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def reshard(model: nn.Module) -> None:
    """Let go of what a forward pass without a backward pass left gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def synchronised(model: nn.Module, batches: Iterable[T], count: int, *, once: bool) -> Iterator[T]:
    """The `count` micro-batches of a step; gradients are summed after the last one.

    Until then each rank holds its own whole gradient. Without `once` they are summed after every
    micro-batch, and only shards of them are ever kept: more talk for less memory.
    """
    root = cast("FSDPModule", model)
    for number, batch in enumerate(batches, start=1):
        root.set_requires_gradient_sync(not once or number == count)
        yield batch


def joined_norm(norm: Tensor) -> Tensor:
    """The norm of the whole gradient from that of this rank's shards."""
    norms = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    return cast(Tensor, torch.linalg.vector_norm(torch.stack(norms)))


def local(tensor: Tensor) -> Tensor:
    """The shard of this rank, or the tensor itself where it is whole; the same memory."""
    # Asked by its method: to import the class takes as long as all the rest of the engine.
    return cast(Tensor, tensor.to_local()) if hasattr(tensor, "to_local") else tensor
