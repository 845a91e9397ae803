"""Run real steps of a given number of rows on the GPU, and measure its free memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from transformers.initialization import no_init_weights

from trainfit.core.plan_records import TaskSpec
from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory
from trainfit.engine.optimizer import take_workspaces
from trainfit.engine.saved_state import protected
from trainfit.measuring.timing import synchronize, time_work
from trainfit.runtime.compile import forget_compiled
from trainfit.tuning.growth import GIB, Measure, Measured

Step = Callable[[], object]
MakeStep = Callable[[int], Step]
"""Builds the step for a number of rows, on the GPU."""
_TIMED = 3
_FOR_KERNELS = 128 << 20
"""Bytes left for kernels that the driver loads when they are first used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeDevice:
    """The GPU, and the memory that was in use before the first step."""

    index: int
    own: int
    """Bytes of this process's tensors that are not part of the steps."""
    most: float | None = None
    """Limit in bytes that the caller set."""

    def room(self) -> float:
        """Bytes that steps may take now: free memory and what the allocator already holds.

        A memory fraction that was set for this process is a limit as well.
        """
        free, total = torch.cuda.mem_get_info(self.index)
        allowed = torch.cuda.get_per_process_memory_fraction(self.index) * total
        there = free + torch.cuda.memory_reserved(self.index) - _FOR_KERNELS
        room = min(there, allowed) - self.own
        return max(0.0, room if self.most is None else min(room, self.most))


@contextmanager
def device_for_probes(memory_gib: float | None = None) -> Iterator[ProbeDevice]:
    """Yield the current GPU; afterwards free the steps' memory and restore the random state."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device()
    give_back_memory()
    own = torch.cuda.memory_allocated(index)
    most = None if memory_gib is None else memory_gib * GIB
    try:
        with protected(torch.device("cuda", index)):
            yield ProbeDevice(index=index, own=own, most=most)
    finally:
        give_back_memory()


class Steps:
    """Steps of a factory by number of rows; the model is built once, with the first."""

    def __init__(
        self, factory: str, arguments: Callable[[int], dict[str, Any]], device: str = "cuda"
    ) -> None:
        """The factory gets `arguments(rows)`, and `device` where it has such a parameter."""
        self._device = device
        self._build = TaskSpec(factory=factory, arguments={}).function()
        asked = inspect.signature(self._build).parameters.values()
        told = any(p.name == "device" or p.kind is p.VAR_KEYWORD for p in asked)
        more = {"device": device} if told else {}
        self._arguments: Callable[[int], dict[str, Any]] = lambda rows: arguments(rows) | more
        self._model: Any = None
        self.built: float | None = None
        """Time at which the model was built, by perf_counter."""

    def __call__(self, rows: int) -> Step:
        """Build the step for `rows` rows on the device."""
        arguments = self._arguments(rows)
        with torch.device(self._device):
            if self._model is None:
                self._model = self._build(**arguments)[0].to(self._device)
                synchronize()
                self.built = perf_counter()
        self._model.zero_grad(set_to_none=True)  # where memory ran out, gradients are left
        # Only the step's builder is needed here: on meta, its model takes no memory and no time.
        with torch.device("meta"), no_init_weights():
            make_step = self._build(**arguments)[1]
        if arguments.get("compile"):
            forget_compiled()  # else the second shape would be compiled for all shapes
        with torch.device(self._device):
            take_workspaces()  # the prediction includes them
            step: Step = make_step(self._model)
        return step


def measure_on(device: ProbeDevice, make: MakeStep, micro_batches: Callable[[int], int]) -> Measure:
    """Make a function that runs steps of a number of rows and measures them."""

    def measure(rows: int) -> Measured | None:
        give_back_memory()
        try:
            return _measure(device, make(rows), rows, micro_batches(rows))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            error.__traceback__ = None  # it holds the step's tensors
        return None

    return measure


def _measure(device: ProbeDevice, step: Step, rows: int, micro_batches: int) -> Measured:
    held = torch.cuda.memory_allocated(device.index) - device.own
    first = time_work(step, warm_up=0, repeats=1)
    rest = time_work(step, warm_up=0, repeats=_TIMED)
    allocated, reserved = (
        max(getattr(first, name) or 0.0, getattr(rest, name) or 0.0) * GIB - device.own
        for name in ("peak_allocated_gib", "peak_reserved_gib")
    )
    return Measured(
        rows=rows,
        held=held,
        allocated=allocated,
        reserved=reserved,
        seconds=rest.median.value / micro_batches,
    )
