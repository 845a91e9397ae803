"""What every part of packing agrees on: arrays of lengths, checked once, and plain integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainfit.errors import BadInput

IntArray: TypeAlias = NDArray[np.int64]
Lengths: TypeAlias = Sequence[int] | IntArray


def check_lengths(lengths: Lengths) -> IntArray:
    """The lengths as an array, or an error that names the first one that cannot be."""
    array = np.asarray(lengths)
    if array.size == 0:
        raise BadInput("there are no sequences", "give one or more")
    if array.ndim != 1:
        raise BadInput(f"the lengths have the shape {array.shape}", "give one for each sequence")
    if not np.issubdtype(array.dtype, np.integer):
        raise BadInput(f"the lengths are of type {array.dtype}", "give whole numbers of tokens")
    if array.min() < 1:
        at = int(array.argmin())
        raise BadInput(
            f"sequence {at} has {array[at]} tokens", "leave out sequences without tokens"
        )
    return array.astype(np.int64, copy=False)


def check_whole(name: str, value: int, least: int = 1) -> int:
    """The value, or an error when it is below `least`."""
    if value < least:
        raise BadInput(f"{name} is {value}", f"give {least} or more")
    return value


def check_fits(longest: int, limit: int) -> None:
    """Refuse a sequence that no micro-batch can hold."""
    if longest > limit:
        raise BadInput(
            f"a sequence of {longest} tokens does not fit a micro-batch of {limit}",
            f"truncate to {limit} or less (data.max_length) or raise training.batch_size",
        )


def divide_up(value: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-value // by)


def round_up(values: IntArray | int, multiple: int, limit: int) -> IntArray:
    """The next multiples, but never over the limit, to which the values themselves keep."""
    rounded: IntArray = np.minimum(-(-np.asarray(values) // multiple) * multiple, limit)
    return rounded
