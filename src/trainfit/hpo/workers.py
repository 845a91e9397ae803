"""Workers of a study: run trials, one after another, in this process or in several on this machine.

A trial that does not fit is rejected before it starts; one that runs out of memory all the same
ends as pruned, and its memory is freed. Beside other trials on its GPU either goes back to the
queue instead. The study goes on. Workers in processes of their own run the same command line, on a
GPU each or sharing one, and write to a log file; their progress is read from the study.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna

from trainfit.conf import Composed
from trainfit.core.errors import BadInput, OutOfMemory, RunFailed, TrainfitError, redact
from trainfit.core.libraries import safe_flags
from trainfit.core.plan_records import Plan
from trainfit.core.records import Gpu
from trainfit.engine.distributed import StopRequest, stop_on_signals
from trainfit.engine.loop import Shared
from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory
from trainfit.engine.observers import Observer
from trainfit.engine.recovery import CannotGoOn
from trainfit.hardware.host import allowed_by_affinity
from trainfit.hpo.objective import GpuShare, Objective, Reporter, is_greater_better, mean
from trainfit.hpo.studies import STORAGE, OpenStudy, StudySettings
from trainfit.hpo.trial_queue import FOLDS, PUT_BACK, Claim, Outcome, TrialQueue, beating
from trainfit.jobs.models.sources import kept_in_memory
from trainfit.runtime import forget_if_full

Watch = Callable[[int, int], Sequence[Observer]]
"""Observers of a fold, given the numbers of trial and fold."""


def run_trial(
    open_study: OpenStudy, objective: Objective, claim: Claim, watch: Watch | None = None
) -> Outcome:
    """Train the folds of a trial and return its outcome; only bugs and full disks raise."""
    facts: dict[str, Any] = {}
    try:
        return _run(open_study, objective, claim, watch or (lambda _t, _f: ()), facts)
    except optuna.TrialPruned as pruned:
        return Outcome(kind="pruned", reason=f"pruned {pruned}", facts=facts)
    except optuna.exceptions.UpdateFinishedTrialError:
        return Outcome(kind="lost")
    except Exception as error:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            reason = f"out of memory: {_first_line(error)}"
            if objective.room.beside:
                return Outcome(kind="crowded", reason=reason, facts=facts)
        elif isinstance(error, CannotGoOn):
            reason = f"diverged: {_first_line(error)}"
        elif isinstance(error, BadInput) and claim.params != open_study.configured:
            reason = f"rejected: {error}"
        else:
            raise
        return Outcome(kind="pruned", reason=reason, facts=facts)
    finally:
        # The error is gone here, and with it the frames that hold the model.
        give_back_memory()


def _run(
    open_study: OpenStudy, objective: Objective, claim: Claim, watch: Watch, facts: dict[str, Any]
) -> Outcome:
    setting, trial = open_study.setting, claim.trial
    composed = setting.compose(claim.params)
    plan = _plan(objective, composed)
    if isinstance(plan, str):
        return Outcome(kind="pruned", reason=f"rejected: {plan}")
    facts["plan"] = _in_short(plan)
    if plan.compile:
        forget_if_full()
    metric, start = setting.hpo.metric, time.perf_counter()
    reporter = Reporter(
        trial,
        metric,
        greater=is_greater_better(metric, open_study.setting.task),
        by_fold=setting.hpo.pruner == "wilcoxon",
        folds=open_study.folds,
        steps=open_study.steps,
    )
    shared = Shared()
    values: list[float] = list(trial.user_attrs.get(FOLDS, []))
    for fold in range(len(values), open_study.folds):
        reporter.begin(values)
        folder = setting.folder / "trials" / f"{trial.number:04d}" / f"fold-{fold + 1}"
        observers = (reporter, *watch(trial.number, fold))
        result = objective.train(composed, plan, fold, folder, observers, shared)
        facts["seconds"] = time.perf_counter() - start
        facts["peak_memory_gib"] = result.peak_memory_gib
        if result.status == "stopped":
            return Outcome(kind="stopped", facts=facts)
        value = result.metrics.get(metric, math.nan)
        if not math.isfinite(value):
            return Outcome(kind="pruned", reason=f"{metric} is not finite", facts=facts)
        reporter.ended(value)
        values.append(value)
        trial.set_user_attr(FOLDS, values)
    return Outcome(kind="complete", value=mean(values), facts=facts)


def _plan(objective: Objective, composed: Composed) -> Plan | str:
    """Plan of the trial, or the reason why it cannot run."""
    try:
        plan = objective.plan(composed)
    except BadInput as error:
        return str(error)
    if plan.fits:
        return plan
    need = f"needs {plan.memory.peak_reserved_gib:.1f} GiB" if plan.memory else "does not fit"
    if objective.room.beside:
        raise OutOfMemory(f"the plan {need} beside other trials", "run it alone")
    return "; ".join([f"the plan {need}", *plan.advice[:1]])


def _in_short(plan: Plan) -> dict[str, Any]:
    names = ("effective_batch_size", "batch_size", "gradient_accumulation_steps", "compile")
    return {name: getattr(plan, name) for name in names}


def _first_line(error: BaseException) -> str:
    said = error.what if isinstance(error, TrainfitError) else str(error).strip()
    return (said.splitlines() or [type(error).__name__])[0]


COMMAND = (sys.executable, *safe_flags(), "-m", "trainfit")
_POLL = 0.5
_STOPPED = 130
_PATIENCE = 60.0
"""Seconds that workers get to finish their step when they are asked to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """GPU, or cores, of a worker."""

    number: int
    share: float
    """Share of its GPU's memory."""
    others: float | None = None
    """GiB of it that other programs take; None: as the worker finds it, alone on the GPU."""
    variables: Mapping[str, str]


def others_on(gpus: Sequence[Gpu]) -> list[float]:
    """GiB of each GPU that other programs take, before any worker starts."""
    return [gpu.state.memory_used_by_others_gib or 0.0 for gpu in gpus]


def seats(
    count: int, gpus: int, environment: Mapping[str, str], others: Sequence[float] = ()
) -> list[Seat]:
    """Seats for the workers: GPUs in turn, or an equal share of the cores.

    Workers that share a GPU count its memory without each other: by the `others` of each GPU.
    """
    if not gpus:
        threads = str(max(1, allowed_by_affinity() // count))
        own = {} if "OMP_NUM_THREADS" in environment else {"OMP_NUM_THREADS": threads}
        return [Seat(number=n, share=1.0, variables=own) for n in range(1, count + 1)]
    named = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = [name for name in named.split(",") if name] or [str(n) for n in range(gpus)]
    on_each = [sum(k % gpus == n for k in range(count)) for n in range(gpus)]
    return [
        Seat(
            number=k + 1,
            share=1 / on_each[k % gpus],
            others=others[k % gpus] if others and on_each[k % gpus] > 1 else None,
            variables={"CUDA_VISIBLE_DEVICES": names[k % gpus]},
        )
        for k in range(count)
    ]


def check_gpu_room(
    open_study: OpenStudy, objective: Callable[[], Objective], taken: Sequence[Seat]
) -> None:
    """Raise BadInput where the plan of the configured values does not fit a worker's share."""
    share = min(seat.share for seat in taken)
    if share == 1.0:
        return
    objective().room = GpuShare(share=share)
    plan = objective().plan(open_study.setting.composed)
    if not plan.fits:
        need = f"{plan.memory.peak_reserved_gib:.1f} GiB" if plan.memory else "more"
        raise BadInput(
            f"--workers {len(taken)}: a worker would have {share:.0%} of its GPU and needs {need}",
            "start fewer workers, or make the job smaller",
        )


def run_fleet(
    setting: StudySettings, taken: Sequence[Seat], look: Callable[[], None]
) -> Literal["done", "stopped"]:
    """Start the workers and wait for them; `look` is called while waiting.

    The database URL is passed in the environment, since any user of the machine can read command
    lines. Other workers take over the trial of a worker that dies.
    """
    logs = setting.folder / "workers"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack, stop_on_signals() as request:
        workers = []
        for seat in taken:
            log = stack.enter_context(
                (logs / f"worker-{seat.number}.log").open("a", encoding="utf-8")
            )
            workers.append(start_worker(setting, seat, log.fileno()))
            stack.callback(_end, workers[-1])
        while request.name is None and any(worker.poll() is None for worker in workers):
            look()
            time.sleep(_POLL)
        if request.name is not None:
            stop_workers(workers)
    look()
    return _verdict([worker.returncode for worker in workers], request.name is not None, logs)


def start_worker(
    setting: StudySettings, seat: Seat, log: int, *more: str
) -> subprocess.Popen[bytes]:
    """Start a worker of this process, with `more` options."""
    others = [] if seat.others is None else ["--others", str(seat.others)]
    options = ["--worker", str(os.getpid()), "--share", str(seat.share), *others, *more]
    return subprocess.Popen(
        [*COMMAND, "hpo", setting.task, *setting.words, *options],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, STORAGE: setting.storage, **seat.variables},
    )


def stop_workers(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Have the workers put their trials back after their step, and wait for them to end."""
    for worker in workers:
        worker.terminate()
    until = time.monotonic() + _PATIENCE
    while any(worker.poll() is None for worker in workers) and time.monotonic() < until:
        time.sleep(0.1)
    for worker in workers:
        _end(worker)


def _end(worker: subprocess.Popen[bytes]) -> None:
    if worker.poll() is None:
        worker.kill()
    worker.wait()


def _verdict(codes: Sequence[int | None], asked: bool, logs: Path) -> Literal["done", "stopped"]:
    if asked or _STOPPED in codes:
        return "stopped"
    if 0 in codes:
        return "done"
    said = [_last_line(path) for path in sorted(logs.glob("*.log"))]
    reason = next((text for text in said if text), f"exit codes {list(codes)}")
    raise RunFailed(
        f"all workers ended early ({reason})", f"see {logs}; the same command continues from here"
    )


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


_TRIAL_POLL = 1.0
"""Seconds between two checks for a trial that a dead worker left."""

Run = Callable[[Claim], Outcome]
Tell = Callable[[int, dict[str, Any], Outcome], None]
"""Called with number, parameters and outcome of each trial that ended."""


def work(
    queue: TrialQueue, run: Run, *, parent: int | None = None, tell: Tell | None = None
) -> Literal["done", "stopped"]:
    """Run trials until none is left, or until the process `parent` is gone.

    A pretrained model is read once for all of them.
    """
    with stop_on_signals() as request, kept_in_memory():
        while request.name is None:
            claim = queue.claim()
            if claim == "done":
                return "done"
            if claim == "wait":
                _wait(request, parent)
            elif _work_on(queue, claim, run, request, parent, tell) in PUT_BACK:
                return "stopped"
    return "stopped"


def _wait(request: StopRequest, parent: int | None) -> None:
    if parent is not None and os.getppid() != parent:
        request.name = "SIGTERM"
    else:
        time.sleep(_TRIAL_POLL)


def _is_asked(request: StopRequest) -> bool:
    """Tell if a signal has arrived; a function, since the type checker cannot know."""
    return request.name is not None


def _work_on(
    queue: TrialQueue,
    claim: Claim,
    run: Run,
    request: StopRequest,
    parent: int | None,
    tell: Tell | None,
) -> str:
    try:
        if _is_asked(request):  # while the trial was being claimed
            raise KeyboardInterrupt
        with beating(lambda: queue.beat(claim.trial), queue.hpo.heartbeat, parent):
            outcome = run(claim)
    except (KeyboardInterrupt, Exception) as error:
        # A Ctrl-C reaches helper processes too, which die of it.
        if isinstance(error, KeyboardInterrupt) or _is_asked(request):
            queue.tell(claim.trial, Outcome(kind="stopped"))
            return "stopped"
        reason = f"{type(error).__name__}: {(redact(str(error)).splitlines() or [''])[0]}"
        queue.tell(claim.trial, Outcome(kind="failed", reason=reason))
        raise
    if not queue.tell(claim.trial, outcome):
        outcome = Outcome(kind="lost", reason="another worker has it")
    if tell is not None:
        tell(claim.trial.number, claim.params, outcome)
    return outcome.kind
