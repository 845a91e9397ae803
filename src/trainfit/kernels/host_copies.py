"""Tensors in the host's memory that a GPU copies from and to, and the copies.

They are operators, so that a profile shows them and the estimator tells them from work on the GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from trainfit.core.errors import OutOfMemory


@torch.library.custom_op("trainfit::host_zeros", mutates_args=())
def host_zeros(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    """Make a flat tensor in the host's memory; `like` is one on the device."""
    return torch.zeros(size, dtype=dtype, device="cpu")


@host_zeros.register_fake
def _(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return like.new_empty(size, dtype=dtype, device="cpu")


def pin(tensors: Sequence[Tensor], owner: object) -> None:
    """Pin memory where it is, until `owner` is gone.

    torch's own pinned memory is rounded up to a power of two, which may double it.
    """
    fix = "set optimization.offload_optimizer=false, or optimization.optimizer=adamw_bf16"
    needed, free = sum(t.nbytes for t in tensors), psutil.virtual_memory().available
    if needed > free:
        sizes = f"{needed / 2**30:.1f} GiB of moments, and {free / 2**30:.1f} GiB are free"
        raise OutOfMemory(f"the host's memory is too small for {sizes}", fix)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for tensor in tensors:
        if int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)):
            raise OutOfMemory(
                f"{tensor.nbytes / 2**30:.1f} GiB of host memory cannot be pinned",
                f"{fix}; or raise the limit of locked memory",
            )
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
def _(into: Tensor, held: Tensor) -> None:  # noqa: ARG001
    return None


@host_store_.register_fake
def _(held: Tensor, found: Tensor) -> None:  # noqa: ARG001
    return None
