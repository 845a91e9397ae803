"""The clock of a trial: the time of every step, without making the GPU wait for it."""

from __future__ import annotations

import time
from typing import Any

import torch

from trainfit.engine.observers import Observer
from trainfit.engine.settings import LoaderSettings, LoopSettings
from trainfit.errors import OutOfMemory
from trainfit.measuring.memory import GIB, MemoryTracker
from trainfit.measuring.timing import synchronize
from trainfit.records import Event, TrainTask

_FIRST = 2
"""Steps in which the compiler works."""
_DRAIN_SECONDS = 2.0
"""What using up the batches that were fetched ahead may take at most."""


class Enough(Exception):
    """Every step that was asked for is timed."""


class Clock(Observer):
    """Times steps without making the GPU wait for the clock, and ends the run after the last.

    An event is left in the GPU's queue after each step, and what lies between two of them is read
    when all are done. A wait after every step would cost each candidate its head start.
    """

    def __init__(self, steps: int, warm_up: int, most_seconds: float | None) -> None:
        """Time so many steps after the warm-up, or as many as there is time for."""
        self._steps, self._warm_up, self._most_seconds = steps, warm_up, most_seconds
        self._marks: list[Any] = []
        self._started = 0.0
        self._warm_at: float | None = None
        self._ahead = 0
        self._sizes: list[int] = []
        self._tokens: list[int] = []
        self._timed_from = 0
        self._memory: MemoryTracker | None = None
        self.first_seconds: float | None = None
        self.peak_gib: float | None = None
        self.peak_reserved_gib: float | None = None

    def prepare(self, task: TrainTask, settings: LoopSettings) -> None:
        """Know the sizes of the steps beforehand: nothing is counted while the clock runs."""
        lengths = task.lengths()
        for step in task.steps(0):
            self._sizes.append(len(step))
            self._tokens.append(sum(int(lengths[at]) for at in step))
        self._cuda = settings.device.startswith("cuda")
        self._graphs = settings.graphs
        self._ahead = _fetched_ahead(settings.loader)

    def on_start(self, step: int, _total_steps: int) -> None:
        """The clock runs from here; the model is built."""
        self._started = time.perf_counter()
        self._memory = MemoryTracker()
        if self._warm_up == 0:
            self._begin(step)

    def on_event(self, event: Event) -> None:
        """A trial that must cut its steps to go on has run out of memory."""
        if event.kind == "oom":
            raise OutOfMemory(event.text, "")

    def on_step(self, step: int) -> None:
        """Mark the end of a step."""
        if step == _FIRST:
            synchronize()
            self.first_seconds = time.perf_counter() - self._started
        if self._marks:
            self._mark()
            if self._is_over():
                self._end()
                raise Enough
        elif step >= self._warm_up and self._is_drained(step):
            self._begin(step)

    def _is_drained(self, step: int) -> bool:
        """Whether the batches that workers fetched during the warm-up are used up.

        Else even the slowest loader would look fast for as long as they last.
        """
        now = time.perf_counter()
        if self._warm_at is None:
            self._warm_at = now
        return step >= self._warm_up + self._ahead or now - self._warm_at > _DRAIN_SECONDS

    def _begin(self, step: int) -> None:
        synchronize()
        assert self._memory is not None
        if not self._graphs:  # what a graph takes is counted while it is recorded, and never again
            self._memory.reset()
        self._timed_from = step
        self._timed_at = time.perf_counter()
        self._mark()

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        if self._memory is not None and not self._cuda:
            self._memory.update()

    def _is_over(self) -> bool:
        done = len(self._marks) - 1
        if done >= self._steps:
            return True
        if self._most_seconds is None or done < 3:
            return False
        return time.perf_counter() - self._timed_at >= self._most_seconds

    def _end(self) -> None:
        synchronize()
        assert self._memory is not None
        self.peak_gib = self._memory.update().peak / GIB
        if self._cuda:
            self.peak_reserved_gib = torch.cuda.max_memory_reserved() / GIB

    def seconds(self) -> list[float]:
        """Of each timed step."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._cuda:
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]

    def sizes(self, count: int) -> tuple[list[int], list[int]]:
        """Sequences and tokens of each timed step."""
        places = [(self._timed_from + at) % len(self._sizes) for at in range(count)]
        return [self._sizes[at] for at in places], [self._tokens[at] for at in places]


def _fetched_ahead(loader: LoaderSettings) -> int:
    """Steps that workers have ready at most."""
    return loader.num_workers * (loader.prefetch_factor or 2)
