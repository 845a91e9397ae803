"""One candidate, tried: the engine's own loop on made-up data, each step timed.

Everything is the real thing, from the loader's workers to the optimizer; only checkpoints, the
profiled step and evaluations are left out. It runs in the process that calls it. Memory that runs
out is an outcome and not an error: a trial that had to cut its steps finer is one that ran out.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainfit.core.errors import (
    BadInput,
    CompileFailed,
    OutOfMemory,
    TrainfitError,
    TrainfitWarning,
)
from trainfit.core.plan_records import RuntimeSettings
from trainfit.core.records import Event, TrainTask
from trainfit.engine.loop import epoch_steps, train
from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory
from trainfit.engine.observers import Observer
from trainfit.engine.settings import LoaderSettings, LoopSettings
from trainfit.measuring.timing import GIB, MemoryTracker, median_interval, synchronize
from trainfit.runtime import applied, forget_compiled
from trainfit.tuning.tuned_cache import Trial, TrialCandidate, folder_prefix

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
        for step in epoch_steps(task, settings, 0):
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


_NEVER = 2**31
"""A number of steps that no trial reaches."""


class Setup(NamedTuple):
    """What a factory makes of a candidate: all that the engine needs."""

    task: TrainTask
    settings: LoopSettings
    runtime: RuntimeSettings
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around the whole run, for what neither of the others can say."""


def run_trial(
    candidate: TrialCandidate, *, steps: int, warm_up: int, most_seconds: float | None = None
) -> Trial:
    """Train so many steps by the candidate, after a warm-up, and tell how fast that was.

    With `most_seconds` the timed steps end early, after three at the least.
    """
    if steps < 1 or warm_up < 0:
        raise BadInput(f"steps is {steps}, warm_up {warm_up}", "give 1 or more, 0 or more")
    began = time.perf_counter()
    clock = Clock(steps, warm_up, most_seconds)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TrainfitWarning)
        failure = _outcome(candidate, clock)
    _clean_up()
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
        return replace(trial, status="failed")  # what was timed is the eager model
    return _with_rates(trial, clock)


def _outcome(candidate: TrialCandidate, clock: Clock) -> tuple[Any, str] | None:
    """Run it; None where all went well, else a status and why.

    The error is dropped here: with it go the frames that hold the model.
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
            train(setup.task, settings, Path(folder) / "run", observers=[clock])
    except Enough:
        return None
    except Exception as error:  # noqa: BLE001  any error of a candidate is an outcome
        if is_out_of_memory(error) or isinstance(error, OutOfMemory):
            return "oom", _in_one_line(error)
        return "failed", _in_one_line(error)
    return "failed", "it was asked to stop"


def steps_alone(settings: LoopSettings) -> LoopSettings:
    """The same without evaluations, logs and checkpoints: none is due before a trial is over."""
    return replace(
        settings,
        eval_steps=_NEVER,
        logging_steps=_NEVER,
        checkpoint_steps=_NEVER,
        keep_checkpoints=0,
    )


def build(candidate: TrialCandidate) -> Setup:
    """What the candidate's factory makes of it."""
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


def _clean_up() -> None:
    """Leave nothing to the next trial: no compiled code, whose number torch limits; no memory."""
    forget_compiled()
    give_back_memory()


def _in_one_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, TrainfitError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
