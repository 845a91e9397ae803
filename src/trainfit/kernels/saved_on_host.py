"""Memory of the host beside the GPU's: copies in both directions, and activations that wait there.

What autograd saves in a forward pass is copied out on a stream of its own while the pass goes on,
and copied back, ahead of its use, while the backward pass runs. The numbers are the same bits.
A storage is copied once, however many tensors view it; small ones and weights stay where they are.

The copies of an optimizer's state are operators, so that a profile shows them and the estimator
tells them from work on the GPU.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

from trainfit.core.errors import OutOfMemory
from trainfit.hardware.host import memory_left


@torch.library.custom_op("trainfit::host_zeros", mutates_args=())
def host_zeros(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    """Make a flat tensor in the host's memory; `like` is one on the device."""
    return torch.zeros(size, dtype=dtype, device="cpu")


@host_zeros.register_fake
def _(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return like.new_empty(size, dtype=dtype, device="cpu")


_FIX = "set optimization.offload_optimizer=false, or optimization.optimizer=adamw_bf16"


def check_free(needed: int) -> None:
    """Raise OutOfMemory where the host has no room for moments of so many bytes."""
    if needed > (free := memory_left()):
        sizes = f"{needed / 2**30:.1f} GiB of moments, and {free / 2**30:.1f} GiB are free"
        raise OutOfMemory(f"the host's memory is too small for {sizes}", _FIX)


def pin(tensors: Sequence[Tensor], owner: object) -> None:
    """Pin memory where it is, until `owner` is gone.

    torch's own pinned memory is rounded up to a power of two, which may double it.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for tensor in tensors:
        if int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)):
            what = f"{tensor.nbytes / 2**30:.1f} GiB of host memory cannot be pinned"
            raise OutOfMemory(what, f"{_FIX}; or raise the limit of locked memory")
        # It holds the tensor: memory must not be freed before it is released.
        weakref.finalize(owner, _release, tensor).atexit = False


def _release(tensor: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(tensor.data_ptr())


@torch.library.custom_op("trainfit::host_fetch_", mutates_args={"into"})
def host_fetch_(into: Tensor, held: Tensor) -> None:
    """Copy from the host to the device, without waiting."""
    into.copy_(held, non_blocking=True)


@torch.library.custom_op("trainfit::host_store_", mutates_args={"held"})
def host_store_(held: Tensor, found: Tensor) -> None:
    """Copy from the device to the host, without waiting."""
    held.copy_(found, non_blocking=True)


@host_fetch_.register_fake
@host_store_.register_fake
def _(_into: Tensor, _source: Tensor) -> None:
    return None


# ── activations that wait on the host ───────────────────────────────────────────────────────────

SMALLEST = 1 << 20
"""Bytes below which a copy costs more than the memory is worth."""
ON_THE_WAY = 256 << 20
"""Bytes that may be on their way at a time, in either direction; the GPU holds them meanwhile."""


@dataclass(slots=True, eq=False)
class HostCopy:
    """One storage in host memory, and on the GPU again from shortly before its use."""

    place: int
    """Number in the order of saving; the backward pass asks in the reverse order."""
    nbytes: int
    device: torch.device
    host: Any
    uses: int = 0
    """Saved tensors that view it and were not asked for yet."""
    back: Any = None
    """Bytes on the GPU and the event of their arrival; None: not on the way."""


class SavedView(NamedTuple):
    """A saved tensor, as a view of a copied storage."""

    copy: HostCopy
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedOnHost:
    """The saved tensors of one forward pass."""

    def __init__(self) -> None:
        self._copies: list[HostCopy] = []
        self._known: dict[int, tuple[Any, int, HostCopy]] = {}
        """Weak reference, version and copy by the place of a storage."""
        self._leaving: deque[tuple[Any, Any, int]] = deque()
        self._leaving_bytes = 0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Copy tensors that are saved for the backward pass inside the block to the host."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._wait_until(0)
        self._known.clear()

    def takes(self, tensor: Tensor) -> bool:
        """True for a tensor on a GPU: others gain nothing from a copy to the host."""
        return tensor.is_cuda

    def copy_out(self, storage: torch.UntypedStorage, device: torch.device) -> tuple[Any, Any]:
        """Start a copy to the host; returns it and the event of its end."""
        source = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            host.copy_(source, non_blocking=True)
        return host, side.record_event()

    def copy_back(self, copy: HostCopy) -> tuple[Tensor, Any]:
        """Start a copy to the GPU; returns it and the event of its end."""
        found = torch.empty(copy.nbytes, dtype=torch.uint8, device=copy.device)
        side = _side_stream(copy.device)
        # The memory may still be read by what the main stream was told before.
        side.wait_stream(torch.cuda.current_stream(copy.device))
        with torch.cuda.stream(side):
            found.copy_(copy.host, non_blocking=True)
        return found, side.record_event()

    def wait(self, event: Any) -> None:
        """Have the main stream wait for a copy."""
        torch.cuda.current_stream().wait_event(event)

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        whole = 2 * tensor.nbytes >= storage.nbytes()  # else another part of it may live on
        if not whole or storage.nbytes() < SMALLEST or not self.takes(tensor) or _is_weight(tensor):
            return tensor
        copy = self._copied(storage, tensor)
        copy.uses += 1
        offset = int(tensor.storage_offset())
        return SavedView(copy, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _copied(self, storage: torch.UntypedStorage, tensor: Tensor) -> HostCopy:
        """Return the copy of a storage, made now unless it was before and is unchanged."""
        key, version = storage._cdata, tensor._version
        known = self._known.get(key)
        if known is not None and not known[0].expired() and known[1] == version:
            return known[2]
        host, event = self.copy_out(storage, tensor.device)
        copy = HostCopy(len(self._copies), storage.nbytes(), tensor.device, host)
        self._copies.append(copy)
        reference: Any = StorageWeakRef
        self._known[key] = reference(storage), version, copy
        self._leaving.append((event, storage, copy.nbytes))
        self._leaving_bytes += copy.nbytes
        self._wait_until(ON_THE_WAY)
        return copy

    def _wait_until(self, most: int) -> None:
        """Free storages that were copied out, until at most `most` bytes are still being copied."""
        while self._leaving and self._leaving_bytes > most:
            event, _, nbytes = self._leaving.popleft()
            self.wait(event)  # so that the main stream may write to the memory again
            self._leaving_bytes -= nbytes

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._fetch(saved.copy)
        found, event = saved.copy.back
        self.wait(event)
        saved.copy.uses -= 1
        if saved.copy.uses <= 0:
            saved.copy.back = None
        restored: Tensor = found.view(saved.dtype).as_strided(
            saved.shape, saved.stride, saved.offset
        )
        return restored

    def _fetch(self, copy: HostCopy) -> None:
        """Start the copy of a storage, and of those that are asked for after it."""
        ahead = 0
        for one in reversed(self._copies[: copy.place + 1]):
            if ahead > ON_THE_WAY and one is not copy:
                return
            if one.back is None and (one.uses > 0 or one is copy):
                one.back = self.copy_back(one)
            ahead += one.nbytes if one.back is not None else 0


_STREAMS: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    """The stream for copies, one for each GPU."""
    if device not in _STREAMS:
        stream: Any = torch.cuda.Stream
        _STREAMS[device] = stream(device)
    return _STREAMS[device]


_CASTS_AND_VIEWS = re.compile(r"(ToCopy|View|UnsafeView|T|Transpose|Permute|Expand|Alias)Backward0")


def _is_weight(tensor: Tensor) -> bool:
    """Tell a weight, or a cast or view of one, which is in memory anyway."""
    if isinstance(tensor, torch.nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and _CASTS_AND_VIEWS.fullmatch(node.name()):
        node = node.next_functions[0][0]
    found = getattr(node, "variable", None)  # of the node that adds up a leaf's gradient
    return isinstance(found, torch.nn.Parameter)


# ── random results that are kept ────────────────────────────────────────────────────────────────

LEAST_BUDGET = 1e-6
"""At a budget of 0 the partitioner would keep nothing at all, these results included."""


def keep_random(graph: fx.Graph) -> None:
    """Mark the results of random operations, attention with dropout too, as kept.

    torch's partitioner, given a budget for activations, may draw a dropout's mask again in the
    backward pass, and it is another one: the gradients would be wrong without a word.
    """
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
