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

from trainfit.engine.loop import train
from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory
from trainfit.engine.settings import LoopSettings
from trainfit.errors import BadInput, OutOfMemory, TrainfitError, TrainfitWarning
from trainfit.measuring.timing import median_interval
from trainfit.records import RuntimeSettings, TrainTask
from trainfit.runtime import applied, forget_compiled
from trainfit.tuning.clock import Clock, Enough
from trainfit.tuning.records import Candidate, Trial, folder_prefix

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
    candidate: Candidate, *, steps: int, warm_up: int, most_seconds: float | None = None
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
    if any("torch.compile failed" in text for text in said):
        return replace(trial, status="failed")  # what was timed is the eager model
    return _with_rates(trial, clock)


def _outcome(candidate: Candidate, clock: Clock) -> tuple[Any, str] | None:
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


def build(candidate: Candidate) -> Setup:
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
