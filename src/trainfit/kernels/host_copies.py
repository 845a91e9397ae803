"""Tensors in the host's memory that a GPU copies from and to, and the copies.

They are operators, so that a profile shows them and the estimator tells them from work on the GPU.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from trainfit.core.errors import OutOfMemory


@torch.library.custom_op("trainfit::host_zeros", mutates_args=())
def host_zeros(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Make a flat tensor in pinned memory, for the device of `like`; pageable without a GPU."""
    made = torch.zeros(size, dtype=dtype, device="cpu")
    if like.is_cuda and size:
        _pin(made)
    return made


@host_zeros.register_fake
def _(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return like.new_empty(size, dtype=dtype, device="cpu")


def _pin(tensor: Tensor) -> None:
    """Pin memory where it is: torch's own pinned memory is rounded up to a power of two."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    if int(runtime.cudaHostRegister(address, tensor.nbytes, 0)):
        raise OutOfMemory(
            f"{tensor.nbytes / 2**30:.1f} GiB of host memory cannot be pinned",
            "set optimization.offload_optimizer=false, or raise the limit of locked memory",
        )
    weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address)


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
