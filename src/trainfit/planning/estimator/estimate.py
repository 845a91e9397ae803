"""GPU memory of a training step, estimated without the GPU.

The step runs twice on fake tensors (the optimizer's state exists only in the second run), and its
log of allocations is replayed through a model of the allocator. This changes torch for the whole
process, so a child process does it.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainfit.core import caches, codec
from trainfit.core.errors import BadInput, RunFailed, TrainfitWarning
from trainfit.core.files import cache_folder
from trainfit.core.libraries import search_path, unhide, warn_of_newer
from trainfit.core.plan_records import MemoryEstimate, TaskSpec
from trainfit.hardware.catalogue import GpuSpec, find
from trainfit.hardware.host import allowed_by_affinity, load
from trainfit.planning.estimator.step_time import Done, recorded

Child = subprocess.Popen[str]
GIB = 1024**3
CONTEXT_GIB = 0.7
"""Memory of the CUDA context, before a program allocates anything."""
MARGIN = 0.03
"""Share left free beyond the estimate, more than its error on any recorded step."""
OWN_MARGIN = 0.15
"""Margin for models with attention of their own: a DeBERTa-v3 planned within 12% of the cap ran
out of memory, since the allocator held more fragments than estimated."""
PROBES = "trainfit.jobs.probes:"
"""Where the steps of the models are that trainfit knows."""
SPARE: list[Child] = []
"""Processes that answer requests too, now that their first work is done."""
TASK = "task:"
"""Begin of a line that hands a child over to a task, in place of its first request."""
_SECONDS = 600
_IDLE_CORES = 1.5
"""Cores without load from which on a second child saves time: it imports for three seconds."""
_MAIN = "import gc; gc.disable(); from trainfit.planning.estimator.child import main; main()"
"""Program of a child: it imports in three quarters of the time without looking for garbage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Properties of a GPU that decide the memory of a step."""

    sm_count: int
    compute_capability: str
    capacity: int
    """Bytes that may be reserved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Request to the child: the same step on one or more GPUs."""

    task: TaskSpec
    targets: tuple[Target, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Memory of the step on one of the GPUs, in bytes."""

    workspace: int
    activations: int
    """Bytes at the peak that belong to none of the other parts."""
    peak_allocated: int
    peak_reserved: int
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The child's estimate in bytes, or the reason that there is none."""

    weights: int = 0
    """Bytes of the weights, without adapters."""
    adapters: int = 0
    parameters: int = 0
    """Number of weights, without adapters."""
    gradients: int = 0
    """Gradients of all trained weights, at the end of the backward pass."""
    optimizer: int = 0
    inputs: int = 0
    rooms: tuple[Room, ...] = ()
    """Memory on each target, in the order of the request."""
    done: tuple[Done, ...] = ()
    """The operations of a step, for its time."""
    unknown: dict[str, int] | None = None
    """Number of unknown tensor values that the step read, by operation."""
    masks: int = 0
    """Masks of unknown values, taken as all True."""
    family: str = ""
    """Architecture of the model, as transformers or trainfit name it."""
    compiled: dict[str, int] | None = None
    """Calls of torch.compile, by how they were followed: traced, eager, graphs."""
    error: str | None = None
    refused: tuple[str, str] | None = None
    """Fault in the input of the step, and the fix."""


class NoEstimate(RunFailed):
    """A step cannot run on fake tensors."""


def estimate(
    task: TaskSpec | str | Callable[..., Any],
    gpu: GpuSpec | str,
    capacity_gib: float | None = None,
    **arguments: Any,
) -> MemoryEstimate:
    """Estimate the memory of a step on a GPU of the catalogue, which need not be here.

    `task` is a function of a module, or its name as module:function. It takes `arguments`, plain
    JSON values, and returns a model, built on torch's default device, and a function that makes the
    step from it: `build(**arguments) -> (model, make_step)`. `make_step(model)` returns a callable
    that does one whole optimizer step on CPU tensors, as the real one does on the GPU's.
    """
    if not isinstance(task, str | TaskSpec):
        task = _import_path(task)
    if isinstance(task, str):
        try:
            json.dumps(arguments)
        except (TypeError, ValueError) as error:
            fix = "give texts and numbers, and make the rest inside of the function"
            raise BadInput(f"an argument of {task} cannot be passed on ({error})", fix) from None
        task = TaskSpec(factory=task, arguments=arguments)
    elif arguments:
        names = ", ".join(arguments)
        raise BadInput(f"{names} beside a TaskSpec would be ignored", "put them into its arguments")
    return estimate_all([task], find(gpu) if isinstance(gpu, str) else gpu, capacity_gib)[0]


def _import_path(task: Any) -> str:
    """Return the import path of a function, for the process that calls it."""
    if isinstance(task, type):
        what = f"{task.__name__} is a class"
        raise BadInput(what, "give a function; for a trainfit.Job use trainfit.plan(job, gpu=...)")
    if not callable(task) or not hasattr(task, "__qualname__"):
        raise BadInput(f"the step is {task!r}", "give a function, or its name as module:function")
    if task.__module__ == "__main__" or "<locals>" in task.__qualname__:
        fix = "put the function into a file of its own, and import it"
        raise BadInput(f"{task.__qualname__} is defined in the script that runs", fix)
    return f"{task.__module__}:{task.__qualname__}"


def estimate_all(
    tasks: Sequence[TaskSpec], gpu: GpuSpec, capacity_gib: float | None = None
) -> list[MemoryEstimate]:
    """Estimate the memory of several tasks in one child process."""
    capacity = gpu.memory_gib if capacity_gib is None else capacity_gib
    if not capacity > 0:
        fix = "give the memory that may be used, in GiB"
        raise BadInput(f"capacity_gib is {capacity_gib}", fix)
    targets = (target(gpu, capacity),)
    answers = ask([Request(task=task, targets=targets) for task in tasks])
    return [_estimate(told(answer), gpu, capacity) for answer in answers]


def target(gpu: GpuSpec, capacity_gib: float) -> Target:
    """Describe a GPU to the child."""
    return Target(
        sm_count=gpu.sm_count,
        compute_capability=gpu.compute_capability,
        capacity=int(capacity_gib * GIB),
    )


def ask(requests: Sequence[Request], child: int = 0) -> list[Answer]:
    """Send requests to a child and return its answers in the same order.

    A child takes seconds to start, so it is kept for later requests. `child` numbers the children
    that answer at the same time.
    """
    warn_of_newer()
    return _child(child).ask(requests)


def start(children: int) -> None:
    """Start children ahead of their first request; more than one where cores are idle."""
    for number in range(children):
        if number == 0 or cores_are_idle():
            _child(number).start()


def cores_are_idle() -> bool:
    """Tell if at least two cores have nothing to do: a child imports for three seconds."""
    return allowed_by_affinity() - load() >= _IDLE_CORES


def is_started(child: int) -> bool:
    """Tell if a child runs."""
    return _child(child).runs


def take_spare() -> Child | None:
    """Take a process that waits for its first request, where one runs."""
    while SPARE:
        if (process := SPARE.pop()).poll() is None:
            return process
    return None


def was_handed_over(line: str) -> bool:
    """Do the task of a line, in a child whose torch is as it was; False for another line."""
    if not line.startswith(TASK):
        return False
    unhide()
    task = TaskSpec.from_json(line.removeprefix(TASK))
    task.function()(**task.arguments)
    return True


def _child(number: int) -> _EstimatorChild:
    return _child_with(number, child_environment()["PYTHONPATH"])


@cache
def _child_with(_number: int, _path: str) -> _EstimatorChild:
    return _EstimatorChild()


def child_environment() -> dict[str, str]:
    """Variables of a child, which finds everything that this process can import, and no GPU."""
    return {**os.environ, "PYTHONPATH": search_path(), "CUDA_VISIBLE_DEVICES": ""}


class _EstimatorChild:
    """Child process, started with the first request and again after it died."""

    def __init__(self) -> None:
        self._environment = child_environment()
        self._process: Child | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            self._started()

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask(self, requests: Sequence[Request]) -> list[Answer]:
        with self._lock:
            return [self._ask(codec.dumps(request, indent=None)) for request in requests]

    def _ask(self, line: str) -> Answer:
        process = self._started()
        try:
            answer = exchange(process, line, _SECONDS)
        except BaseException:
            self._process = None
            raise
        if not answer:
            self._process = None
            fix = "estimate a smaller batch, and report it"
            raise RunFailed(f"the estimator died (exit code {process.wait()})", fix)
        return codec.loads(Answer, answer, "the estimator")

    def _started(self) -> Child:
        if self._process is None or not self.runs:
            self._process = take_spare() or start_child("-c", _MAIN, env=self._environment)
            atexit.register(end, self._process)
        return self._process


def start_child(*words: str, env: Mapping[str, str], session: bool = False) -> Child:
    """Start Python with these words, and a pipe for lines each way."""
    return subprocess.Popen(
        [sys.executable, "-P", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("TRAINFIT_TRACEBACK") else subprocess.DEVNULL,
        text=True,
        env=env,
        start_new_session=session,
    )


def exchange(
    process: Child,
    line: str | None,
    seconds: float,
    kill: Callable[[], None] | None = None,
) -> str:
    """Send a line to a child and read its answer; empty where it died or took too long.

    With None, what it says by itself is read. `kill` ends it with its own children.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    kill = kill or process.kill
    watchdog = threading.Timer(seconds, kill)
    watchdog.start()
    try:
        if line is not None:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return ""
    except BaseException:  # interrupted: a late answer must not serve the next request
        kill()
        raise
    finally:
        watchdog.cancel()


def end(process: Child) -> None:
    """End a child, whatever it does."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    process.wait()


def told(answer: Answer) -> Answer:
    """Return the answer, raise for a step that could not run, and warn of guesses."""
    if answer.refused is not None:
        raise BadInput(*answer.refused)
    if answer.error is not None:
        raise NoEstimate(f"cannot estimate: {answer.error}", "measure a real step instead")
    if answer.unknown:
        asked = ", ".join(f"{name} ({count})" for name, count in answer.unknown.items())
        _warn(f"the step asked for values that are not known, and zero was taken: {asked}")
    if answer.masks:
        _warn(
            f"{answer.masks} masks of values that are not known were taken as True everywhere, and "
            "lengths as the longest; make them of known values, as torch.arange(n) < k, for others"
        )
    for kind, said in _COMPILED.items():
        if (answer.compiled or {}).get(kind):
            _warn(said)
    return answer


_COMPILED = {
    "eager": "the step calls torch.compile on something that cannot be traced here: "
    "that part is estimated as eager, which usually takes more memory",
    "graphs": "the step asks torch.compile for CUDA graphs, whose pool of memory is not counted",
}


def _warn(text: str) -> None:
    warnings.warn(text, TrainfitWarning, stacklevel=5)


def _estimate(answer: Answer, gpu: GpuSpec, capacity: float) -> MemoryEstimate:
    compiled = answer.compiled or {}
    room = answer.rooms[0]
    return MemoryEstimate(
        weights_gib=answer.weights / GIB,
        parameters=answer.parameters,
        adapters_gib=answer.adapters / GIB,
        gradients_gib=answer.gradients / GIB,
        optimizer_gib=answer.optimizer / GIB,
        activations_gib=room.activations / GIB,
        workspace_gib=room.workspace / GIB,
        peak_allocated_gib=room.peak_allocated / GIB,
        peak_reserved_gib=room.peak_reserved / GIB,
        capacity_gib=capacity,
        fits=room.fits,
        error_percent=None
        if "eager" in compiled
        else recorded_error(gpu.compute_capability, "traced" in compiled, answer.family),
    )


def recorded_error(compute_capability: str, compiled: bool, family: str) -> float | None:
    """Largest error of peak allocated memory recorded for a family of models, in percent.

    None where nothing was recorded of it on such a GPU.
    """
    row = recorded("memory", compute_capability, family)
    kind = "compiled" if compiled else "eager"
    return None if row is None else float(row[f"{kind}_percent"])


def place(folder: str, *parts: str) -> Path:
    """Path of a cached answer; the versions of libraries and our sources are part of its name."""
    known = [f"{name} {version}" for name, version in caches.libraries().items()]
    digest = hashlib.sha256("\n".join([*parts, *known, caches.sources()]).encode()).hexdigest()
    return cache_folder() / folder / f"{digest[:40]}.json"
