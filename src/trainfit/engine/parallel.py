"""Models over several ranks: sharded by FSDP2, or replicated with gradients summed in buckets.

FSDP2 shards weights, gradients and optimizer state, for models larger than a GPU. Each repeated
block, and the rest of the model, is gathered for its computation and freed after it. So ranks
communicate inside forward and backward, and a rank that runs out of memory cannot repeat its step
while the others wait for it: the run restarts from its newest checkpoint with the next cut.
Gradients are summed, not averaged: a step's loss is divided by the weight of all ranks.

Gradients of a replicated model are summed in flat buckets during the backward pass. A rank that
runs out of memory there must not leave others waiting. So every rank sums every bucket once per
try, in one order, whatever happens to it: a rank that fails, or has no sequences, adds zeros for
the buckets that it did not reach. All ranks then vote, and sums of a try that failed anywhere are
dropped: nothing was applied.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainfit.core.errors import BadInput, RunFailed
from trainfit.engine.distributed import World, communicating
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


# ── gradients of replicated models ────────────────────────────────────────────────────────────────


def sum_over_ranks(world: World, tensors: Sequence[Tensor]) -> None:
    """Sum each tensor over all ranks, in place."""
    if world.size == 1:
        return
    with communicating():
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


def spread_weights(world: World, model: nn.Module) -> None:
    """Copy the first rank's weights and buffers to every rank."""
    if world.size == 1:
        return
    with torch.no_grad(), communicating():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)


_BUCKET = 25 * 2**20
"""Bytes of a bucket, as of DistributedDataParallel: enough for the full rate of a link."""


@dataclass(slots=True)
class _Bucket:
    """Parameters whose gradients are summed at once, and the state of a try."""

    parameters: list[Tensor]
    views: dict[Tensor, Tensor] = field(default_factory=dict)
    flat: Tensor | None = None
    half: Tensor | None = None
    """Copy in the dtype of the sum, where that is another."""
    arrived: set[Tensor] = field(default_factory=set)
    """Parameters whose gradient is complete."""
    work: dist.Work | None = None

    def allocate(self) -> Tensor:
        """Give the flat gradient, zeros at first."""
        if self.flat is None:
            like = self.parameters[0]
            sizes = [parameter.numel() for parameter in self.parameters]
            self.flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
            parts = zip(self.parameters, torch.split(self.flat, sizes), strict=True)
            self.views = {parameter: part.view_as(parameter) for parameter, part in parts}
        return self.flat

    def clear(self) -> None:
        """Drop everything of a try."""
        self.flat = self.half = self.work = None
        self.views = {}
        self.arrived = set()


class GradientBuckets:
    """Buckets of a model's trained parameters, the last of which get their gradients first.

    Memory is taken when a bucket's first gradient arrives, as it would be without buckets.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        dtype: torch.dtype | None = None,
        *,
        bucket_bytes: int = _BUCKET,
    ) -> None:
        """Watch the parameters; `dtype` is that of the sum where it differs from theirs."""
        self._parameters, self._dtype = tuple(parameters), dtype
        self._buckets = [_Bucket(part) for part in _divided(parameters, bucket_bytes)]
        self._owner = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._used: set[Tensor] = set()
        self._last = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]

    def watched(self, batches: Iterable[T], count: int) -> Iterator[T]:
        """Yield the `count` micro-batches of a try; buckets are summed during the last one."""
        for number, batch in enumerate(batches, start=1):
            self._last = number == count
            yield batch

    def sum_rest(self) -> tuple[bool, ...]:
        """Start the sums that are left; tells for each parameter if it got a gradient here."""
        self._last = False
        for bucket in self._buckets:
            if bucket.work is None:
                self._sum(bucket)
        return tuple(parameter in self._used for parameter in self._parameters)

    def finish(self, used: Sequence[bool]) -> None:
        """Wait for the sums, and make them the gradients of parameters that any rank used."""
        wanted = dict(zip(self._parameters, used, strict=True))
        for bucket in self._buckets:
            _wait(bucket)
            if bucket.half is not None and bucket.flat is not None:
                bucket.flat.copy_(bucket.half)
            for parameter in bucket.parameters:
                parameter.grad = bucket.views[parameter] if wanted[parameter] else None
            bucket.clear()
        self._used = set()

    def drop(self) -> None:
        """Wait for the sums of a try that failed, and forget them."""
        for bucket in self._buckets:
            _wait(bucket)
            bucket.clear()
        self._used = set()

    def _arrive(self, parameter: Tensor) -> None:
        bucket = self._owner[parameter]
        if bucket.work is not None:
            raise RunFailed(
                "a weight got a gradient after its sum over ranks had begun",
                "checkpoint activations with use_reentrant=False",
            )
        self._used.add(parameter)
        bucket.allocate()
        view = bucket.views[parameter]
        if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view
        if self._last:
            bucket.arrived.add(parameter)
            self._sum_complete()

    def _sum_complete(self) -> None:
        """Start the sums of complete buckets, in order: the order is the same on all ranks."""
        for bucket in self._buckets:
            if bucket.work is None:
                if len(bucket.arrived) < len(bucket.parameters):
                    return
                self._sum(bucket)

    def _sum(self, bucket: _Bucket) -> None:
        summed = bucket.allocate()
        if self._dtype is not None and self._dtype != summed.dtype:
            summed = bucket.half = summed.to(self._dtype)
        bucket.work = dist.all_reduce(summed, async_op=True)


def _wait(bucket: _Bucket) -> None:
    if bucket.work is not None:
        bucket.work.wait()


def _divided(parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Divide into buckets of one dtype and about that size, the last parameters first."""
    parts: list[list[Tensor]] = []
    size = 0
    for parameter in reversed(parameters):
        alike = parts and parts[-1][0].dtype == parameter.dtype
        alike = alike and parts[-1][0].device == parameter.device
        if not alike or size >= bucket_bytes:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return parts
