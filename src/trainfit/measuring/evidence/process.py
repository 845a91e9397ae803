"""What torch and the operating system say of this process, at this moment."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from trainfit.measuring.evidence.seen import BatchesSeen, SwitchesSeen
from trainfit.measuring.evidence.trace import Trace, cuda_in_use
from trainfit.records import Scalar

_WORKER = "pt_data_worker"
"""The name that torch's loader processes give themselves."""
_FETCH = "enumerate(DataLoader)"


def switches() -> SwitchesSeen:
    """What torch's own switches read."""
    import torch

    backends: Any = torch.backends
    cuda = torch.cuda.is_available()
    return SwitchesSeen(
        tf32=backends.cuda.matmul.fp32_precision == "tf32" if cuda else None,
        flash=backends.cuda.flash_sdp_enabled() if cuda else None,
        cudnn_benchmark=bool(backends.cudnn.benchmark),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        allocator=_allocator() if cuda_in_use() else {},
        threads=torch.get_num_threads(),
    )


def _allocator() -> dict[str, Scalar]:
    import torch

    memory: Any = torch.cuda.memory
    found: dict[str, Scalar] = {"backend": torch.cuda.get_allocator_backend()}
    if found["backend"] == "native":
        settings: Mapping[str, Any] = memory._snapshot()["allocator_settings"]
        found |= {
            str(name): value
            for name, value in settings.items()
            if value is None or isinstance(value, (bool, int, float, str))
        }
    return found


def count_workers() -> int:
    """Loader processes of this one that are alive."""
    if sys.platform != "linux":  # elsewhere they have no name; the others are seldom daemons
        return sum(child.daemon for child in multiprocessing.active_children())
    import psutil

    return sum(_name(child) == _WORKER for child in psutil.Process().children())


def _name(process: Any) -> str:
    import psutil

    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return str(process.name()) if alive else ""
    except psutil.Error:
        return ""


def batches(given: Iterable[Any], trace: Trace, seconds: float) -> BatchesSeen:
    """What the loader gave, as it was before it went to the device."""
    looked = [_look(batch) for batch in given]
    known = [seen for seen in looked if seen.capacity is not None]
    packed = [seen.packed for seen in looked if seen.packed is not None]
    fetched = [op.seconds for op in trace.operators if op.name.startswith(_FETCH)]
    copied = {"Pinned": 0, "Pageable": 0}
    for kernel in trace.kernels:
        for kind in copied:
            if kernel.name.startswith(f"Memcpy HtoD ({kind}"):
                copied[kind] += kernel.copied
    return BatchesSeen(
        tensors=sum(seen.tensors for seen in looked),
        pinned=sum(seen.pinned for seen in looked),
        tokens=sum(seen.tokens or 0 for seen in known) if known else None,
        capacity=sum(seen.capacity or 0 for seen in known) if known else None,
        packed=any(packed) if packed else None,
        sequences=sum(seen.sequences or 0 for seen in looked) or None,
        micro_batches=len(looked) or None,
        workers=count_workers(),
        waited_share=min(1.0, sum(fetched) / seconds) if fetched and seconds > 0 else None,
        pinned_bytes=copied["Pinned"],
        pageable_bytes=copied["Pageable"],
    )


def _look(batch: Any) -> BatchesSeen:
    """The tensors of one batch; its tokens where a mask or the ends of its sequences tell."""
    import torch

    named = dict(batch) if isinstance(batch, Mapping) else {}
    tensors = [t for t in _leaves(batch) if t.device.type == "cpu"]
    mask, ends, ids = (named.get(key) for key in ("attention_mask", "cu_seqlens", "input_ids"))
    tokens = capacity = packed = None
    rows = next((t.shape[0] for t in tensors if t.dim()), None)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        tokens, capacity, packed = int(mask.count_nonzero()), mask.numel(), False
    elif isinstance(ends, torch.Tensor) and isinstance(ids, torch.Tensor):
        tokens, capacity, packed = int(ends.max()), ids.numel(), True
    return BatchesSeen(
        tensors=len(tensors),
        pinned=sum(t.is_pinned() for t in tensors) if torch.cuda.is_available() else 0,
        tokens=tokens,
        capacity=capacity,
        packed=packed,
        sequences=None if packed else rows,
    )


def _leaves(value: Any) -> Iterable[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
