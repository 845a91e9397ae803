"""Loss and norm of past steps, read from the device without making it wait.

To ask a GPU for a number stops the queue of work until it has caught up. So the numbers are copied
behind the step's own work, and read when they have arrived.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from trainfit.engine.step import StepNumbers


class Reading(NamedTuple):
    """The numbers of a step."""

    step: int
    loss: float
    grad_norm: float


class Readings:
    """Steps whose numbers are under way, in their order."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, step: int, numbers: StepNumbers) -> None:
        """Send for the numbers of a step."""
        pair = torch.stack([numbers.loss.double(), numbers.grad_norm.double()])
        if pair.device.type != "cuda":
            self._under_way.append((step, pair, None))
            return
        copy = torch.empty(2, dtype=torch.float64, pin_memory=True)
        copy.copy_(pair, non_blocking=True)
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrival.record()
        self._under_way.append((step, copy, arrival))

    def arrived(self, *, wait: bool = False) -> list[Reading]:
        """What has come in since the last call; with `wait`, all of it."""
        readings = []
        while self._under_way:
            step, pair, arrival = self._under_way[0]
            if arrival is not None and not arrival.query():  # type: ignore[no-untyped-call]
                if not wait:
                    break
                arrival.synchronize()
            self._under_way.popleft()
            readings.append(Reading(step, *pair.tolist()))
        return readings
