"""How long the device stood still because its data was not there.

The loop may wait for data while a GPU still works on earlier steps, which costs nothing. So there
the time is taken on the GPU: between the end of a step's work and the beginning of the next one's.
"""

from __future__ import annotations

import torch

_Gap = tuple[torch.cuda.Event, torch.cuda.Event, float]


class Waits:
    """Adds up the waits of a window of steps."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._last: torch.cuda.Event | None = None
        self._gaps: list[_Gap] = []

    def begin(self, waited: float) -> None:
        """A step begins, for whose data the loop has waited so long."""
        if not self._on_gpu:
            self._seconds += waited
        elif self._last is not None:
            self._gaps.append((self._last, _mark(), waited))

    def end(self) -> None:
        """The work of the step is under way."""
        if self._on_gpu:
            self._last = _mark()

    def take(self) -> float:
        """The seconds since the last call; everything must have been computed."""
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
