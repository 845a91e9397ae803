"""Numbers of a step, read without a wait: loss, gradient norm, and the time it waited for data."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor


class StepNumbers(NamedTuple):
    """Loss and gradient norm of a step, still on the device."""

    loss: Tensor
    """Loss per unit of weight."""
    grad_norm: Tensor
    """Norm before clipping. The step was skipped where this or the loss is not finite."""


class Reading(NamedTuple):
    """Loss and gradient norm of a step as Python numbers."""

    step: int
    loss: float
    grad_norm: float


class Readings:
    """Losses and norms on their way from the device, in order; reading them makes no step wait."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, step: int, numbers: StepNumbers) -> None:
        """Copy the numbers of a step to the host, after the work that is queued."""
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
        """Return the readings that arrived since the last call; with `wait`, all of them."""
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


_Gap = tuple[torch.cuda.Event, torch.cuda.Event, float]


class Waits:
    """Adds up the time that a window of steps waited for data."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._last: torch.cuda.Event | None = None
        self._gaps: list[_Gap] = []

    def begin(self, waited: float) -> None:
        """Note the start of a step whose data took `waited` seconds to arrive."""
        if not self._on_gpu:
            self._seconds += waited
        elif self._last is not None:
            self._gaps.append((self._last, _mark(), waited))

    def end(self) -> None:
        """Note that the step's work is queued on the device."""
        if self._on_gpu:
            self._last = _mark()

    def take(self) -> float:
        """Return the seconds waited since the last call; the device must be idle."""
        for end, begin, waited in self._gaps:
            idle = end.elapsed_time(begin) / 1e3
            self._seconds += min(waited, idle)
        seconds, self._seconds = self._seconds, 0.0
        self._last, self._gaps = None, []
        return seconds


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
