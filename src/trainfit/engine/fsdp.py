"""FSDP2: weights, gradients and optimizer state sharded over ranks, for models larger than a GPU.

Each repeated block, and the rest of the model, is gathered for its computation and freed after it.
So ranks communicate inside forward and backward, and a rank that runs out of memory cannot repeat
its step while the others wait for it: the run restarts from its newest checkpoint with the next
cut. Gradients are summed, not averaged: a step's loss is divided by the weight of all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainfit.core.errors import BadInput, RunFailed
from trainfit.runtime.compile import repeated_blocks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.fsdp import FSDPModule


T = TypeVar("T")


def shard(
    model: nn.Module, device: torch.device, machines: int = 1, reduce: torch.dtype | None = None
) -> None:
    """Shard a model that every rank has on its CPU, block by block.

    With several machines each holds a copy, sharded over its ranks (hybrid). `reduce` is the dtype
    in which gradients are summed where it is not theirs.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    each = dist.get_world_size() // machines
    shape, names = ((each,), ("shard",))
    if machines > 1:
        shape, names = ((machines, each), ("copy", "shard"))  # type: ignore[assignment]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce)
    for module in (*repeated_blocks(model), model):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo supports nothing else


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward pass without backward pass left gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def synchronised(model: nn.Module, batches: Iterable[T], count: int, *, once: bool) -> Iterator[T]:
    """Yield the `count` micro-batches of a step; gradients are summed after the last one.

    Until then each rank holds a whole gradient. Without `once` gradients are summed after every
    micro-batch and kept as shards: more communication for less memory.
    """
    root = cast("FSDPModule", model)
    for number, batch in enumerate(batches, start=1):
        root.set_requires_gradient_sync(not once or number == count)
        yield batch


def joined_norm(norm: Tensor, shards: int) -> Tensor:
    """Combine the gradient norms of the first `shards` ranks, which hold one copy of the model."""
    norms = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    return cast(Tensor, torch.linalg.vector_norm(torch.stack(norms[:shards])))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor without a copy, or the tensor itself if not sharded."""
    # hasattr, because importing DTensor takes as long as the rest of the engine.
    return cast(Tensor, tensor.to_local()) if hasattr(tensor, "to_local") else tensor


_SHARD = "shard-{:05d}-*.safetensors"


def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the shards of all ranks; the first rank writes tensors that are not sharded."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with _one_line(f"cannot write {folder}"):
        save(dict(tensors), storage_writer=writer, planner=planner)


def own_files(folder: Path, rank: int) -> list[Path]:
    """List the files that `write` made for this rank."""
    return sorted(folder.glob(_SHARD.format(rank + 1)))


def is_sharded(folder: Path) -> bool:
    """Tell a folder of shards from one with whole tensors."""
    return any(folder.glob("shard-*.safetensors"))


@torch.no_grad()
def read_into(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors`, sharded or not, from a folder that must hold the same names and shapes.

    With a process group, every rank calls this. Any number of ranks may have written the files,
    sharded or not.
    """
    check_same({name: saved.size for name, saved in _saved(folder).items()}, tensors)
    _load(folder, tensors, alone=False)


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Read the shards in `folder` as whole tensors."""
    saved = _saved(folder)
    tensors = {n: torch.empty(s.size, dtype=s.properties.dtype) for n, s in saved.items()}
    _load(folder, tensors, alone=True)
    return tensors


def is_state(name: str, saved: Mapping[str, object]) -> bool:
    """Tell optimizer state (WEIGHT/key) from a weight by its name."""
    return name.rpartition("/")[0] in saved


def _saved(folder: Path) -> dict[str, TensorStorageMetadata]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return dict(found)  # type: ignore[arg-type]


def _load(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    with _one_line(f"cannot read {folder}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(tensors), storage_reader=reader, no_dist=alone)


def check_same(saved: Mapping[str, torch.Size], own: Mapping[str, Tensor]) -> None:
    """Raise BadInput where names or shapes of a checkpoint's tensors differ from the model's."""
    if missing := sorted(own.keys() ^ saved.keys()):
        raise BadInput(
            f"the checkpoint and the model differ in {len(missing)} tensors, such as {missing[0]}",
            "use the configuration of the run",
        )
    for name, tensor in own.items():
        if saved[name] != tensor.shape:
            shapes = f"{tuple(saved[name])} in the checkpoint, {tuple(tensor.shape)} here"
            raise BadInput(f"{name} is {shapes}", "use the configuration of the run")


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Convert a failure on any rank to RunFailed with the first cause in one line."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:  # a BaseException with a message of many lines
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        text = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise RunFailed(
            f"{what} on rank {rank} ({text})",
            "free some space or make it writable, and continue with --resume",
        ) from None
