"""Precision and threads of a job on a CPU: those that ran a step of its model faster.

Native bfloat16 is not faster for every model: casting costs more than a small model's products
save. So a step is timed once in a child process, and the times are cached by machine and shape of
the model, so that every command gives the same answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from trainfit.core import caches
from trainfit.core.errors import RunFailed, TrainfitError
from trainfit.core.files import keeps_cache
from trainfit.core.plan_records import Precision, TaskSpec
from trainfit.core.records import HardwareProfile, Record
from trainfit.hardware.detection import AHEAD
from trainfit.hardware.host import probe_host
from trainfit.planning.estimator import estimate
from trainfit.planning.estimator.depths import folder_content
from trainfit.planning.question import Choice, Question, lacks

CLEAR = 1.05
"""Least factor in speed for a choice to win; a smaller one is within the noise."""
_MAIN = "import gc; gc.disable(); from trainfit.measuring.step_times import main; main()"
"""Program of the child: it imports in three quarters of the time without looking for garbage."""
_FOLDER = "steps"
"""Folder of cached times."""
_SECONDS = 300
_NOT_KEPT = "bf16 was not timed, since the cache cannot be written: set TRAINFIT_CACHE"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequest(Record):
    """A step to time in each precision."""

    factory: str
    """module:function of the probe."""
    arguments: dict[str, Any]
    layers: int
    rows: int
    width: int
    half_weights: bool
    """True if frozen weights are kept in the precision of the products."""
    threads: tuple[int, ...]
    """Numbers of threads to try: the usual one first, then fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime(Record):
    """Best time of a step."""

    precision: Precision
    threads: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes(Record):
    """Best times of a step, or the error."""

    times: tuple[StepTime, ...] = ()
    error: str | None = None


class CpuChoice(NamedTuple):
    """Chosen precision and threads."""

    precision: Choice
    threads: Choice


def choose(question: Question, profile: HardwareProfile, ranks: int) -> CpuChoice:
    """Choose for a job by cached times, or by times taken now.

    Nothing is timed where the precision is pinned or the CPU has no native bfloat16.
    """
    usual, free = _usual_threads(question, profile, ranks)
    pin = question.pinned("precision")
    if not profile.cpu.native_bf16 or (pin is not None and lacks(pin, profile.cpu, None) is None):
        return CpuChoice(Choice(value="fp32", why="this CPU has no native bf16"), usual)
    request = _request(question, usual.value, ranks, fewer=free)
    asked = request.to_json(indent=None)
    place = estimate.place(
        _FOLDER, profile.cpu.to_json(), folder_content(question.arguments), asked
    )
    found = _timed(place, asked)
    if found.error is not None:
        return CpuChoice(Choice(value="fp32", why=found.error), usual)
    return decide(found, usual)


def decide(found: StepTimes, usual: Choice) -> CpuChoice:
    """Choose the fastest; fewer threads, and then bfloat16, must be clearly faster to win.

    On a busy machine only one thread was timed, and the number of threads is not decided.
    """
    busy = all(time.threads != usual.value for time in found.times)
    count = 1 if busy else usual.value
    fp32, bf16 = _fastest(found, "fp32", count), _fastest(found, "bf16", count)
    best, other = (bf16, fp32) if fp32.seconds > CLEAR * bf16.seconds else (fp32, bf16)
    ratio, here = other.seconds / best.seconds, f"{_ms(best)} against {_ms(other)} ms"
    if ratio > CLEAR:
        why = f"{best.precision} {ratio:.2g} times as fast as {other.precision} here: {here}"
    else:
        why = f"bf16 is not clearly faster for this model here: {here}"
    if busy:
        why = f"{why}, on one thread of a busy machine"
    threads = usual
    if best.threads != usual.value and not busy:
        slower = _at(found, best.precision, usual.value)
        gain = f"{slower.seconds / best.seconds:.2g} times as fast as {usual.value} threads here"
        threads = Choice(value=best.threads, why=f"{gain}: {_ms(best)} against {_ms(slower)} ms")
    lost = f"{other.precision}: {_ms(other)} ms"
    return CpuChoice(Choice(value=best.precision, why=why, alternatives=(lost,)), threads)


def _fastest(found: StepTimes, precision: Precision, usual: int) -> StepTime:
    plain = _at(found, precision, usual)
    best = min((t for t in found.times if t.precision == precision), key=lambda t: t.seconds)
    return best if plain.seconds > CLEAR * best.seconds else plain


def _at(found: StepTimes, precision: Precision, threads: int) -> StepTime:
    return next(t for t in found.times if (t.precision, t.threads) == (precision, threads))


def _ms(time: StepTime) -> str:
    milliseconds = time.seconds * 1000
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def _usual_threads(question: Question, profile: HardwareProfile, ranks: int) -> tuple[Choice, bool]:
    """Return the threads without timing, and True if fewer may be chosen."""
    pin = question.pinned("num_threads")
    if pin is not None:
        return Choice(value=pin, why="you set it"), False
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdecimal() and int(said) > 0:
        return Choice(value=int(said), why="OMP_NUM_THREADS says so"), False
    cores = max(1, profile.cpu.cores // ranks)
    why = "the usable cores" if ranks == 1 else f"the usable cores, shared by {ranks} ranks"
    return Choice(value=cores, why=why), True


def _request(question: Question, threads: int, ranks: int, *, fewer: bool) -> StepRequest:
    """Build the request for a step of the job's mean length, rounded to share cached times."""
    load = question.workload
    share = math.ceil(load.effective_batch_size / ranks)
    width = 2 ** math.ceil(math.log2(fmean(load.lengths)))
    optimizer = question.pinned("optimizer") or "adamw_fused"
    halves = [threads >> shift for shift in (1, 2, 3) if threads >> shift]
    return StepRequest(
        factory=question.factory,
        arguments=question.arguments | question.quick | {"optimizer": optimizer},
        layers=question.layers,
        rows=min(share, question.pinned("batch_size") or share),
        width=min(load.max_length, width),
        half_weights=load.method != "full",
        threads=(threads, *(halves if fewer else ())),
    )


@lru_cache(maxsize=64)
def _timed(place: Path, asked: str) -> StepTimes:
    """Read the cached times, or take and cache them; the first to write them decides."""
    found = caches.read(StepTimes, place)
    if found is not None:
        return found
    if not keeps_cache():
        return StepTimes(error=_NOT_KEPT)
    try:
        times = time_steps(asked)
    except TrainfitError as error:
        return StepTimes(error=f"no step could be timed: {error.what}")
    if not place.exists():
        caches.write(place, times)
    return caches.read(StepTimes, place) or StepTimes(error=_NOT_KEPT)


_SERVING: list[estimate.Child] = []
"""Children that have timed a step, and serve the estimator."""
_MODELS = ("transformers.modeling_utils", "trainfit.jobs.probes")


def start_ahead(*, models: bool = True, folds: bool = False) -> None:
    """Start the child now, if no step was ever timed on this machine, or `folds` may need it.

    It imports torch, and what `models` of transformers need, while this process does other things.
    """
    host, known = probe_host(Path()), estimate.place(_FOLDER).parent
    idle = host.cpu.cores > 1 and not host.nvidia_devices and not AHEAD and keeps_cache()
    spare = folds and estimate.cores_are_idle()
    if idle and (spare or (host.cpu.native_bf16 and not any(known.glob("*.json")))):
        AHEAD.append(_child(*(_MODELS if models else ())))


@contextmanager
def dismissed() -> Iterator[None]:
    """End the children that time steps, also if they serve the estimator, at a block's end."""
    try:
        yield
    finally:
        dismiss()


def dismiss() -> None:
    """End the children that time steps, unless they were handed over."""
    for children in (AHEAD, _SERVING):
        while children:
            estimate.end(children.pop())


def hand_over(task: TaskSpec) -> estimate.Child | None:
    """Have a child that waits do a task; None where there is none. Its input stays open."""
    process = AHEAD.pop() if AHEAD else estimate.take_spare()
    if process is not None:
        _SERVING[:] = [child for child in _SERVING if child is not process]
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has just died
            print(estimate.TASK, task.to_json(indent=None), file=process.stdin, flush=True)
    return process


def _child(*imported: str) -> estimate.Child:
    """Start a child that imports these modules before it reads its request."""
    return estimate.start_child("-c", _MAIN, *imported, env=estimate.child_environment())


def time_steps(asked: str) -> StepTimes:
    """Time the request in a child process, which then serves the estimator: it has all imported."""
    child = AHEAD.pop() if AHEAD else _child()
    answer = estimate.exchange(child, asked, _SECONDS)
    if not answer:
        fix = "set device.mixed_precision"
        raise RunFailed(f"exit code {child.wait()}, or over {_SECONDS} s", fix)
    _SERVING.append(child)
    estimate.SPARE.append(child)
    found = StepTimes.from_json(answer)
    if found.error is not None:
        raise RunFailed(found.error, "set device.mixed_precision")
    return found
