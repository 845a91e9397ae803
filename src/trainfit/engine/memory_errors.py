"""Out-of-memory errors: recognising them, freeing memory, and repeating work safely.

Memory may run out in the middle of in-place work, and repeating all of it would apply the first
half twice. torch counts the writes to every tensor, which shows what is left to do.
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

# Messages of plain RuntimeErrors that libraries below torch raise when they cannot allocate.
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
)
_BEGINS = "CUBLAS_STATUS_NOT_INITIALIZED"
"""Message where cuBLAS cannot begin: for lack of memory, or in a context that is broken."""
_FULL = 512 << 20
"""Free bytes of a GPU below which it is for lack of memory."""
_TRIES = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise an out-of-memory error, also as the cause of another error."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
        return True
    if isinstance(error, RuntimeError) and _BEGINS in str(error) and _is_full():
        return True
    cause = error.__cause__ or getattr(error, "inner_exception", None)
    return isinstance(cause, BaseException) and is_out_of_memory(cause)


def _is_full() -> bool:
    """Tell if the GPU has next to no free memory; False where it no longer answers."""
    try:
        return torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < _FULL
    except RuntimeError:
        return False


def give_back_memory() -> None:
    """Collect garbage, and return the allocator's cache to the device."""
    gc.collect()  # a traceback that was caught may still hold the activations, in a cycle
    give_back_cache()


def give_back_cache() -> None:
    """Return the allocator's cache to the device."""
    with applied(RuntimeSettings(empty_cache=True)):
        pass


def retried(work: Callable[[], T]) -> T:
    """Run `work`, which has no side effect, and repeat it if memory runs out."""
    for _ in range(_TRIES - 1):
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        give_back_memory()
    return work()


def write_once(tensors: Sequence[Tensor], work: Callable[[list[Tensor]], object]) -> None:
    """Let `work` write to each tensor exactly once, also if memory runs out in between.

    `work` is called again with the tensors not yet written to.
    """
    versions = [tensor._version for tensor in tensors]

    def rest() -> None:
        pairs = zip(tensors, versions, strict=True)
        if left := [tensor for tensor, version in pairs if tensor._version == version]:
            work(left)

    retried(rest)
