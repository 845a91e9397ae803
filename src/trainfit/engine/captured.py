"""Steps that no one waits for: numbers read as they arrive, and whole steps as CUDA graphs.

A small step waits for Python, which starts thousands of kernels one by one. A graph, captured once
for each shape, starts them all at once and runs the same kernels on the same memory. So whatever
changes from step to step is written into fixed memory before a replay: the batch, its weight, the
learning rates, the state of the random generator (by torch) and the loss scale (by the graph).

The first step of a shape runs eagerly, because kernels are chosen and compiled in it; the second
one is captured. A step that cannot be captured runs eagerly, with the same result.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.core.errors import reason
from trainfit.data.batches import Batch
from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory


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


Work = Callable[[Sequence[Batch], Tensor], StepNumbers]
"""Takes a whole step: micro-batches on the device, and the weight of the step."""
_MOST = 24
"""Shapes that are captured; steps of further ones run eagerly."""


@dataclass(slots=True)
class _Graph:
    """One captured step with its fixed inputs and outputs."""

    graph: Any
    batches: list[dict[str, Any]]
    weight: Tensor
    numbers: StepNumbers

    def replay(self, batches: Sequence[Batch], weight: float) -> StepNumbers:
        for fixed, batch in zip(self.batches, batches, strict=True):
            for name, value in batch.items():
                if isinstance(value, Tensor):
                    fixed[name].copy_(value, non_blocking=True)
        self.weight.fill_(weight)
        self.graph.replay()
        return self.numbers


@dataclass
class CapturedSteps:
    """The captured steps of a model and its optimizer, by the shapes of their micro-batches."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    obstacle: str | None = "steps are not captured here"
    """Reason why steps are not captured; None while they are."""
    renew: bool = False
    seconds: float = 0.0
    """Time that capturing has taken."""
    peak: int = 0
    """Most bytes in use in a step, measured while it was captured."""
    news: list[str] = field(default_factory=list)
    """Events that `take_news` has not returned yet."""
    _graphs: dict[Hashable, _Graph] = field(default_factory=dict)
    _seen: set[Hashable] = field(default_factory=set)
    _pool: Any = None

    def take(self, work: Work, batches: Sequence[Batch], weight: float) -> StepNumbers | None:
        """Replay a step, captured now if its shape is new; None: take it eagerly.

        The numbers are overwritten by the next step.
        """
        if self.obstacle is not None:
            return None
        key = shapes(batches)
        graph = None if self.renew else self._graphs.get(key)
        if graph is None:
            if not self.replays(batches):
                self._seen.add(key)
                return None
            graph = self._capture(key, work, batches)
        return None if graph is None else graph.replay(batches, weight)

    def replays(self, batches: Sequence[Batch]) -> bool:
        """Tell if a step of these shapes is replayed from now on; True where none is captured."""
        key, more = shapes(batches), len(self._graphs) < _MOST
        return self.obstacle is not None or key in self._graphs or (more and key in self._seen)

    def _capture(self, key: Hashable, work: Work, batches: Sequence[Batch]) -> _Graph | None:
        started = time.perf_counter()
        self._graphs.pop(key, None)
        generator = torch.cuda.default_generators[self._index]
        before = generator.clone_state()
        try:
            captured = self._captured(work, batches)
        except Exception as error:  # noqa: BLE001  whatever it was, eager steps go on
            memory = is_out_of_memory(error)
            self.stop("memory ran out while capturing" if memory else reason(error))
            # A capture that broke off leaves the generator in it.
            generator.graphsafe_set_state(before)
        else:
            self._graphs[key] = captured
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device))
            took = time.perf_counter() - started
            self.seconds += took
            if not self.renew:
                self.news.append(
                    f"steps of {len(batches)} micro-batch{'es' if len(batches) > 1 else ''} are "
                    f"replayed as one CUDA graph, captured in {took:.1f} s"
                )
            return captured
        give_back_memory()
        return None

    def _captured(self, work: Work, batches: Sequence[Batch]) -> _Graph:
        fixed = [
            {
                name: torch.empty_like(value, device=self.device)
                if isinstance(value, Tensor)
                else value
                for name, value in batch.items()
            }
            for batch in batches
        ]
        weight = torch.ones((), device=self.device)
        if not self._graphs:  # torch takes no graph into a pool whose last one was freed
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool, self.device):
            numbers = work(fixed, weight)
        return _Graph(graph, fixed, weight, numbers)

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def stop(self, why: str) -> None:
        """Free all graphs, and capture none from here on."""
        self.obstacle = why
        self.news.append(f"steps are not captured as CUDA graphs from here: {why}")
        self._graphs.clear()
        self._pool = None

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Capture the step in a block again: its profile then shows operators beside kernels."""
        self.renew = True
        try:
            yield
        finally:
            self.renew = False

    def take_news(self) -> list[str]:
        """Return the events since the last call."""
        news, self.news = self.news, []
        return news

    @property
    def held(self) -> bool:
        """True where graphs hold memory."""
        return bool(self._graphs)


@cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    return stream


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Capture what a block does on a GPU, which need not be the current one.

    torch's own stream for captures is of the GPU that was current at the first one: on another GPU
    nothing would be captured, and each replay would leave the results of that one time.

    No garbage is collected meanwhile: freeing an event or another graph would break the capture,
    and one that broke off would leave its own stream the current one. Thread-local, since batches
    and checkpoints may be copied in other threads.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with (
            torch.cuda.device(device),
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(
                graph,
                pool=pool,
                stream=_capture_stream(torch.cuda.current_device()),
                capture_error_mode="thread_local",
            ),
        ):
            yield
    finally:
        if collects:
            gc.enable()


def shapes(batches: Sequence[Batch]) -> Hashable:
    """Key of a step: names, shapes and dtypes of its tensors, and its other values."""
    return tuple(
        tuple(
            (name, value.shape, value.dtype) if isinstance(value, Tensor) else (name, value)
            for name, value in sorted(batch.items())
        )
        for batch in batches
    )
