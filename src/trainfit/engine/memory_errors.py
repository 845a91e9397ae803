"""Running out of memory: what it looks like, how to give memory back, and how to do work once.

In-place work is the hard part: memory may run out when half of it is done, and to do it all again
would do that half twice. torch counts the writes to every tensor, so what is left can be told.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from trainfit.core.plan_records import RuntimeSettings
from trainfit.runtime import applied

T = TypeVar("T")

# What libraries below torch raise as a plain RuntimeError when they cannot allocate.
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
)
_TRIES = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is memory that ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
        return True
    cause = error.__cause__ or getattr(error, "inner_exception", None)
    return isinstance(cause, BaseException) and is_out_of_memory(cause)


def give_back_memory() -> None:
    """Free what is unreachable, and give what the allocator caches back to the device."""
    gc.collect()  # a traceback that was caught may still hold the activations, in a cycle
    give_back_cache()


def give_back_cache() -> None:
    """Give what the allocator caches back to the device."""
    with applied(RuntimeSettings(empty_cache=True)):
        pass


def retried(work: Callable[[], T]) -> T:
    """Do `work` that changes nothing, again if memory runs out."""
    for _ in range(_TRIES - 1):
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        give_back_memory()
    return work()


def once(tensors: Sequence[Tensor], work: Callable[[list[Tensor]], object]) -> None:
    """Have `work` write to each of the tensors once, also if memory runs out in between.

    `work` is called again with the tensors that it had not written to.
    """
    versions = [tensor._version for tensor in tensors]

    def rest() -> None:
        pairs = zip(tensors, versions, strict=True)
        if left := [tensor for tensor, version in pairs if tensor._version == version]:
            work(left)

    retried(rest)
