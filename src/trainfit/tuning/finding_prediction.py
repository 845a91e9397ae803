"""What a step of so many rows will take, from the planner's child: no GPU is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainfit.planning.memory import Request, Room, Target, ask, told
from trainfit.records import Gpu, TaskSpec
from trainfit.tuning.finding import Peak, Predict

_FACTORY = "trainfit.tuning.finding_workspaces:probe"  # imported by the child: it needs torch
_SHARES = tuple(share / 100 for share in range(88, 111, 2))
"""Of the room: the memory is tried at each of these to find the least that a step runs in."""


def predictor(
    factory: str, arguments: Callable[[int], dict[str, Any]], gpu: Gpu | None, room: float
) -> Predict:
    """Predict steps by their rows, as exactly as can be for those that take about `room` bytes."""
    sizes = [int(room * share) for share in _SHARES]
    sm_count = (gpu and gpu.sm_count) or 1
    capability = gpu.compute_capability if gpu else "0.0"
    targets = tuple(
        Target(sm_count=sm_count, compute_capability=capability, capacity=size) for size in sizes
    )

    def predict(rows: int) -> Peak:
        asked = {"factory": factory, "arguments": arguments(rows)}
        task = TaskSpec(factory=_FACTORY, arguments=asked)
        return peak_of(told(ask([Request(task=task, targets=targets)])[0]).rooms, sizes)

    return predict


def peak_of(rooms: Sequence[Room], sizes: Sequence[int]) -> Peak:
    """What a step takes, from how it did in memories of these `sizes`, the smallest first."""
    free = rooms[0]  # its peaks are those of unlimited memory, as all are
    failed = [size for size, room in zip(sizes, rooms, strict=True) if not room.fits]
    most = free.peak_reserved
    if not failed:
        needed = min(most, sizes[0])
    else:
        above = min([size for size in sizes if size > failed[-1]] or [most])
        # What is needed lies between two of the sizes: in the middle of them, as far as is known.
        needed = min(most, (above + max(failed[-1], free.peak_allocated)) // 2)
    return Peak(
        allocated=free.peak_allocated, reserved=most, needed=max(free.peak_allocated, needed)
    )
