"""Real steps of so many rows on the GPU, and what the GPU has room for."""

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
from trainfit.tuning.finder.growth import GIB, Measure, Measured

Step = Callable[[], object]
MakeStep = Callable[[int], Step]
"""Makes the step of so many rows, on the GPU."""
_TIMED = 3
_FOR_KERNELS = 128 << 20
"""Left to the driver, which loads kernels when they are first used: larger shapes use others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeDevice:
    """The GPU as it was before the first step."""

    index: int
    own: int
    """Bytes of tensors that this process holds and that are no part of the steps."""
    most: float | None = None
    """Bytes that the caller allows."""

    def room(self) -> float:
        """Bytes that steps may take now: what is free, and what the allocator already holds.

        What other processes and CUDA itself use is not free. A cap that was set for this process
        counts as well.
        """
        free, total = torch.cuda.mem_get_info(self.index)
        allowed = torch.cuda.get_per_process_memory_fraction(self.index) * total
        there = free + torch.cuda.memory_reserved(self.index) - _FOR_KERNELS
        room = min(there, allowed) - self.own
        return max(0.0, room if self.most is None else min(room, self.most))


@contextmanager
def device_for_probes(memory_gib: float | None = None) -> Iterator[ProbeDevice]:
    """The current GPU, with all that steps took given back and no random number used up."""
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
    """The steps of a factory, by their rows; the model is built with the first and stays."""

    def __init__(
        self, factory: str, arguments: Callable[[int], dict[str, Any]], device: str = "cuda"
    ) -> None:
        """The factory takes `arguments(rows)`, and is told the device where it asks for it."""
        self._device = device
        self._build = TaskSpec(factory=factory, arguments={}).function()
        asked = inspect.signature(self._build).parameters.values()
        told = any(p.name == "device" or p.kind is p.VAR_KEYWORD for p in asked)
        more = {"device": device} if told else {}
        self._arguments: Callable[[int], dict[str, Any]] = lambda rows: arguments(rows) | more
        self._model: Any = None
        self.built: float | None = None
        """When the model was there, by perf_counter."""

    def __call__(self, rows: int) -> Step:
        """The step of so many rows, on the device."""
        arguments = self._arguments(rows)
        with torch.device(self._device):
            if self._model is None:
                self._model = self._build(**arguments)[0].to(self._device)
                synchronize()
                self.built = perf_counter()
        self._model.zero_grad(set_to_none=True)  # where memory ran out, gradients are left
        # Only what makes the step is wanted of this one: its model takes no memory and no time.
        with torch.device("meta"), no_init_weights():
            make_step = self._build(**arguments)[1]
        if arguments.get("compile"):
            forget_compiled()  # else the second shape would be compiled for all shapes
        with torch.device(self._device):
            take_workspaces()  # as the prediction has it
            step: Step = make_step(self._model)
        return step


def measure_on(device: ProbeDevice, make: MakeStep, micro_batches: Callable[[int], int]) -> Measure:
    """Run steps of so many rows and say what they took."""

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
