"""Run the engine in the calling process: a candidate's loop, and single steps of any size.

A candidate is timed by the engine's own loop on synthetic data. Loader workers, model and optimizer
are the real ones; checkpoints, the profiled step and evaluations are left out. Running out of
memory is an outcome, not an error: it also counts as such when the engine could go on with smaller
micro-batches. For the largest batch, real steps of a number of rows run on the GPU, whose free
memory is measured.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from trainfit.core.errors import BadInput, CompileFailed, OutOfMemory, TrainfitWarning, in_one_line
from trainfit.core.plan_records import RuntimeSettings, TaskSpec
from trainfit.core.records import Event, TrainTask
from trainfit.engine.loop import epoch_steps, train
from trainfit.engine.loop_settings import LoopSettings
from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory
from trainfit.engine.observers import Observer
from trainfit.engine.optimizer import take_workspaces
from trainfit.engine.saved_state import protected
from trainfit.measuring.timing import GIB, MemoryTracker, median_interval, synchronize, time_work
from trainfit.runtime import applied, forget_compiled
from trainfit.tuning.growth import Measure, Measured
from trainfit.tuning.tuned_cache import Trial, TrialCandidate, folder_prefix

_FIRST = 2
"""Number of steps in which the compiler works."""
_DRAIN_SECONDS = 2.0
"""Time limit for using up the batches that workers fetched ahead."""


class Enough(Exception):
    """Raised to end a run when all steps are timed."""


class Clock(Observer):
    """Times steps without synchronizing the GPU, and ends the run after the last.

    An event is queued on the GPU after each step, and the times between events are read at the end.
    A synchronization after every step would slow the candidates that queue work ahead.
    """

    def __init__(self, steps: int, warm_up: int, most_seconds: float | None) -> None:
        """Time `steps` steps after the warm-up, or fewer when `most_seconds` have passed."""
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
        """Count sequences and tokens of each step before the clock runs."""
        lengths = task.lengths()
        for step in epoch_steps(task, settings, 0):
            self._sizes.append(len(step))
            self._tokens.append(sum(int(lengths[at]) for at in step))
        self._cuda = settings.device.startswith("cuda")
        self._graphs = settings.graphs or settings.cuda_graph
        # Steps that workers hold ready, at the most.
        self._ahead = settings.loader.num_workers * (settings.loader.prefetch_factor or 2)

    def on_start(self, step: int, _total_steps: int) -> None:
        """Start the clock: the model is built."""
        self._started = time.perf_counter()
        self._memory = MemoryTracker()
        if self._warm_up == 0:
            self._begin(step)

    def on_event(self, event: Event) -> None:
        """Raise OutOfMemory where the engine would continue with smaller micro-batches."""
        if event.kind == "oom":
            raise OutOfMemory(event.text, "")

    def on_step(self, step: int) -> None:
        """Mark the end of a step, and end the run after the last."""
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
        """Tell if the batches that workers fetched during the warm-up are used up.

        A slow loader would look fast as long as they last.
        """
        now = time.perf_counter()
        if self._warm_at is None:
            self._warm_at = now
        return step >= self._warm_up + self._ahead or now - self._warm_at > _DRAIN_SECONDS

    def _begin(self, step: int) -> None:
        synchronize()
        assert self._memory is not None
        if not self._graphs:  # a graph allocates only while it is recorded
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
        """Seconds of each timed step."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._cuda:
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]

    def sizes(self, count: int) -> tuple[list[int], list[int]]:
        """Sequences and tokens of each timed step."""
        places = [(self._timed_from + at) % len(self._sizes) for at in range(count)]
        return [self._sizes[at] for at in places], [self._tokens[at] for at in places]


_NEVER = 2**31
"""A number of steps that no trial reaches."""


class Setup(NamedTuple):
    """Task and settings of a candidate's run, as its factory returns them."""

    task: TrainTask
    settings: LoopSettings
    runtime: RuntimeSettings
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context manager around the whole run."""
    more: Mapping[str, Any] = MappingProxyType({})
    """Further arguments of the loop, such as make_optimizer."""


def run_trial(
    candidate: TrialCandidate, *, steps: int, warm_up: int, most_seconds: float | None = None
) -> Trial:
    """Train by the candidate for `steps` timed steps after a warm-up; return the record.

    With `most_seconds` the timed steps end early, after three at the least.
    """
    if steps < 1 or warm_up < 0:
        raise BadInput(f"steps is {steps}, warm_up {warm_up}", "give 1 or more, 0 or more")
    began = time.perf_counter()
    clock = Clock(steps, warm_up, most_seconds)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TrainfitWarning)
        failure = _outcome(candidate, clock)
    forget_compiled()  # torch limits its number
    give_back_memory()
    said = [str(w.message) for w in caught if issubclass(w.category, TrainfitWarning)]
    trial = Trial(
        settings=candidate.settings,
        status="ok",
        first_steps_seconds=clock.first_seconds,
        peak_memory_gib=clock.peak_gib,
        peak_reserved_gib=clock.peak_reserved_gib,
        seconds=time.perf_counter() - began,
        note="; ".join(dict.fromkeys(said)),
    )
    if failure is not None:
        status, note = failure
        return replace(trial, status=status, note="; ".join([note, *said]))
    if any(issubclass(w.category, CompileFailed) for w in caught):
        return replace(trial, status="failed")  # the eager model was timed
    return _with_rates(trial, clock)


def _outcome(candidate: TrialCandidate, clock: Clock) -> tuple[Any, str] | None:
    """Run a candidate; return None on success, else a status and the reason.

    The error is dropped here, and with it the frames that hold the model.
    """
    try:
        setup = build(candidate)
        clock.prepare(setup.task, setup.settings)
        # The clock ends the run.
        settings = replace(steps_alone(setup.settings), max_steps=_NEVER, profile_step=False)
        with (
            tempfile.TemporaryDirectory(prefix=folder_prefix(os.getpid())) as folder,
            applied(setup.runtime),
            setup.around(),
        ):
            train(setup.task, settings, Path(folder) / "run", observers=[clock], **setup.more)
    except Enough:
        return None
    except Exception as error:  # noqa: BLE001  any error of a candidate is an outcome
        if is_out_of_memory(error) or isinstance(error, OutOfMemory):
            return "oom", in_one_line(error)
        return "failed", in_one_line(error)
    return "failed", "it was asked to stop"


def steps_alone(settings: LoopSettings) -> LoopSettings:
    """Settings without evaluations, logs and checkpoints."""
    return replace(
        settings,
        eval_steps=_NEVER,
        logging_steps=_NEVER,
        checkpoint_steps=_NEVER,
        keep_checkpoints=0,
    )


def build(candidate: TrialCandidate) -> Setup:
    """Call the candidate's factory."""
    return Setup(*candidate.task.function()(candidate.plan, **candidate.task.arguments))


def _with_rates(trial: Trial, clock: Clock) -> Trial:
    seconds = clock.seconds()
    samples, tokens = clock.sizes(len(seconds))
    return replace(
        trial,
        step_seconds=tuple(seconds),
        step_samples=tuple(samples),
        samples_per_second=median_interval(_rates(samples, seconds)),
        tokens_per_second=median_interval(_rates(tokens, seconds)),
    )


def _rates(amounts: list[int], seconds: list[float]) -> list[float]:
    return [amount / max(took, 1e-9) for amount, took in zip(amounts, seconds, strict=True)]


# ── steps of a number of rows ─────────────────────────────────────────────────────────────────────

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
        from transformers.initialization import no_init_weights

        arguments = self._arguments(rows)
        with torch.device(self._device):
            if self._model is None:
                self._model = self._build(**arguments)[0].to(self._device)
                synchronize()
                self.built = time.perf_counter()
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
