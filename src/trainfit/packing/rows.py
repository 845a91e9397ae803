"""Where sequences begin and end in a packed row, for kernels that take cumulative lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainfit.core.errors import BadInput
from trainfit.packing.steps import check_whole, divide_up


def row_offsets(
    lengths: Sequence[int], width: int, *, slots: int | None = None, longest: int | None = None
) -> NDArray[np.int32]:
    """The offsets (cu_seqlens) of the sequences in a packed row, then of its filler.

    The slack is one filler, or several where it is longer than `longest`: no kernel and no table
    of positions then meets a sequence over max_length. With `slots` (a PackedCut has them) there
    are always as many offsets, whatever the micro-batch holds: sequences of no tokens at the end.
    """
    used = int(sum(lengths))
    if used > width:
        raise BadInput(f"{used} tokens do not fit a row of {width}", "cut the step again")
    piece = check_whole("the longest sequence", width if longest is None else longest)
    ends = [*np.cumsum([0, *lengths]).tolist(), *range(used + piece, width, piece)]
    if used < width:
        ends.append(width)
    if slots is not None:
        if len(lengths) > slots:
            raise BadInput(f"{len(lengths)} sequences do not fit {slots} slots", "raise the slots")
        ends += [width] * (slots + divide_up(width, piece) + 1 - len(ends))
    return np.array(ends, dtype=np.int32)


def row_positions(offsets: NDArray[np.int32]) -> NDArray[np.int64]:
    """The position of every token of a packed row inside its own sequence."""
    starts = np.repeat(offsets[:-1].astype(np.int64), np.diff(offsets))
    return np.arange(starts.size) - starts
