"""Predicted time of a whole job, stage by stage, and what earlier runs on this machine teach it.

    RUN/plan.json    time.stages: seconds predicted before the first step
    RUN/times.json   those against the measured ones, once the job has ended

Each stage has a time by rule (the defaults below are of an H200 with slow host cores). A run that
ended leaves, for its machine, the factor between measured and predicted; steps and evaluations have
one for each shape of model and step. So the second run predicts from the first one's measurements.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainfit.conf import Composed
from trainfit.core import caches, codec
from trainfit.core.files import write_whole
from trainfit.core.plan_records import Plan, TimeEstimate
from trainfit.core.records import HardwareProfile, Record
from trainfit.measuring.machine_rates import device_name, place
from trainfit.planning.bounds import count_weights
from trainfit.planning.execution import CAPTURE_SECONDS, compile_cost
from trainfit.planning.question import Question
from trainfit.runs import timeline
from trainfit.runs.reader import RunFiles, read_run

FILE = "times.json"
_BEFORE = ("start", "data", "plan")
"""Stages that are over when a plan is written: their time is known."""
_BY_SHAPE = ("steps", "evaluation", "features", "compile", "capture")
"""Stages whose factor belongs to a shape of model and step, not to the machine."""
_PER_STEP = 0.001
"""Seconds of a step that trains a head alone."""
_FORWARD = {"full": 0.34, "frozen": 0.0}
"""Share of a training step's time that an evaluation, which is not compiled, takes for as many
tokens."""
_FORWARD_ADAPTED = 0.8
_PER_FOLD = ("steps", "features", "receipt", "evaluation", "checkpoint", "judge", "between folds")
"""Stages that a fold takes with it to another process."""
START = 3.5
"""Seconds that a process for folds takes to start, and that others must save besides."""
_OPERATIONS = {"full": 6, "frozen": 0.1}
"""Operations per weight and token of a training; with adapters 4. A frozen encoder runs once."""
CORE_RATE = 4e10
"""Operations per second of a CPU's core in the step of a small model."""
_LONG = 2 * 3600.0
"""Seconds from which on a job says that it will take hours."""
_KEPT = 256
"""Factors that are kept, the last learned."""
_MOST = 20.0
"""Largest factor that is learned; a larger one is an accident, not the machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLoad:
    """Work of a job outside its training steps."""

    evaluated: int = 0
    """Tokens of an evaluation."""
    judged: int = 0
    """Tokens that are scored after a training."""
    evaluations: float | None = None
    """Evaluations of a training; None: one for each epoch."""
    baselines: bool = False
    tracked: bool = False
    """A tracker sees one process, so that all folds train in it."""


def load_of(config: Any, question: Question, evaluated: float, judged: float = 0.0) -> JobLoad:
    """Return the work of a job outside its steps, by the tokens to evaluate and to score."""
    work, training = question.workload, config.training
    evaluations = None
    if training.eval_steps is not None:
        steps = math.ceil(work.sequences / work.effective_batch_size) * work.epochs
        evaluations = max(1.0, steps / training.eval_steps)
    if (most := most_evaluated(training)) is not None:
        evaluated = min(evaluated, most * work.max_length)
    return JobLoad(
        evaluated=round(evaluated),
        judged=round(judged),
        evaluations=evaluations,
        baselines=bool(getattr(config, "baselines", False)),
        tracked=config.tracking != "none",
    )


def most_evaluated(training: Any) -> int | None:
    """Most samples of an evaluation, whatever the memory of the machine; None: all."""
    rows = 32 if training.eval_batch_size == "auto" else training.eval_batch_size
    return None if training.eval_iters is None else training.eval_iters * rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned(Record):
    """Factors between measured and predicted times of a machine."""

    factors: dict[str, float] = field(default_factory=dict)


def with_job_time(plan: Plan, question: Question, profile: HardwareProfile, load: JobLoad) -> Plan:
    """Add the time of the whole job to a plan; unknown where nothing tells the time of a step."""
    if plan.ranks > 1:
        return plan
    known, shape = _learned(profile).factors, _shape(plan)
    told = None if plan.time is None else plan.time.step_seconds
    # Where no rule tells the time of a step, any will do to learn a factor from.
    step = _PER_STEP if told is None else told
    by_rule = _by_rule(plan, question, load, step, profile.cpu.cores)
    factors = {stage: known.get(_key(stage, shape), 1.0) for stage in by_rule}
    if told is None and _key("steps", shape) not in known:
        return replace(plan, time=replace(plan.time or TimeEstimate(), by_rule=by_rule))
    stages = {stage: seconds * factors[stage] for stage, seconds in by_rule.items()}
    if not load.tracked:
        stages = _beside(stages, plan, question.workload.trainings, profile.cpu.cores)
    time = plan.time or TimeEstimate()
    if (taught := step * factors["steps"]) != time.step_seconds:
        time = time.at(taught, plan.effective_batch_size, question.workload)
    whole = sum(stages.values())
    return replace(plan, time=replace(time, job_seconds=whole, stages=stages, by_rule=by_rule))


def deal_folds(folds: int, cores: int, most: int, seconds: float, start: float) -> list[int]:
    """Deal folds of `seconds` to processes; all to the first, this one, if others save too little.

    Each of the others, at most `most` with this one, has a start. Where the folds do not divide by
    the cores, further processes may take the odd ones, and all share the cores until they are done.
    """
    cores = min(cores, most, folds)
    each, odd = divmod(folds, cores)
    even = [each + (number < odd) for number in range(cores)]
    shared = [each] * cores + [min(each, odd - n) for n in range(0, odd, each)]

    def end(deal: Sequence[int]) -> float:
        work = sorted(seconds * n + (start if number else 0.0) for number, n in enumerate(deal))
        shares = [max(1.0, left / cores) for left in range(len(work), 0, -1)]
        steps = zip(pairwise([0.0, *work]), shares, strict=True)
        return sum((after - before) * share for (before, after), share in steps)

    best = min(even, shared if len(shared) <= most else even, key=end)
    return best if seconds * folds - end(best) > start else [folds]


def _beside(stages: dict[str, float], plan: Plan, folds: int, cores: int) -> dict[str, float]:
    """Leave out the folds that train on idle cores meanwhile."""
    places = cores // (plan.runtime.num_threads or cores)
    if plan.device != "cpu" or places < 2:
        return stages
    seconds = sum(stages.get(stage, 0.0) for stage in _PER_FOLD) / folds
    share = deal_folds(folds, places, 2 * places, seconds, START)[0] / folds
    return {stage: n * (share if stage in _PER_FOLD else 1.0) for stage, n in stages.items()}


def notes(composed: Composed, plan: Plan, question: Question) -> Iterator[str]:
    """Lines to read before the training begins."""
    named = hasattr(composed.config, "model")
    found = (length_note(plan, question, named_model=named), batch_note(composed, plan))
    return filter(None, found)


def length_note(plan: Plan, question: Question, *, named_model: bool) -> str | None:
    """Note that a job takes hours here, with a shorter way; None for a shorter job."""
    told = None if plan.time is None else plan.time.job_seconds
    seconds = _by_operations(plan, question) if told is None else told
    if seconds is None or seconds < _LONG:
        return None
    work = plan.workload
    steps = round(work.sequences * work.epochs / plan.effective_batch_size)
    fewer = max(1, int(steps * 3600 / seconds))
    hours = f"{seconds / 3600:,.0f} hours"
    smaller = ", or take a smaller model (model.name)" if named_model else ""
    return (
        f"this job takes about {hours} on this machine; for about an hour, set "
        f"training.max_steps={fewer} in place of {steps:,}{smaller}"
    )


def batch_note(composed: Composed, plan: Plan) -> str | None:
    """Say that the batch of a step grows with the ranks, where the configuration has it so."""
    training = composed.config.training
    if plan.ranks == 1 or training.effective_batch_size != "auto" or training.batch_size == "auto":
        return None
    alone = plan.effective_batch_size // plan.ranks
    return (
        f"training.batch_size is per rank: {plan.ranks} ranks make steps of "
        f"{plan.effective_batch_size} sequences, where one rank makes them of {alone}; "
        f"training.effective_batch_size={alone} keeps them whatever the number of ranks"
    )


def _by_operations(plan: Plan, question: Question) -> float | None:
    """Estimate a CPU's seconds by the operations of the steps: no rule tells the time of one."""
    if plan.device != "cpu" or question.sizes is None:
        return None
    work, threads = question.workload, plan.runtime.num_threads or 1
    tokens = sum(work.lengths) / max(len(work.lengths), 1) * work.sequences
    per_token = _OPERATIONS.get(work.method, 4) * count_weights(question.sizes)
    return tokens * per_token * work.epochs * work.trainings / (CORE_RATE * threads)


def _by_rule(
    plan: Plan, question: Question, load: JobLoad, step: float, cores: int
) -> dict[str, float]:
    """Seconds of each stage by rule, with steps of `step` seconds."""
    work = question.workload
    trainings, per_epoch = work.trainings, math.ceil(work.sequences / plan.effective_batch_size)
    steps = per_epoch * work.epochs
    evaluations = load.evaluations or max(1.0, work.epochs)
    tokens = plan.micro_batch_tokens * plan.gradient_accumulation_steps
    per_token = step / tokens * _FORWARD.get(work.method, _FORWARD_ADAPTED)
    size = 1.0 if question.sizes is None else 4 * count_weights(question.sizes) / 1e9
    frozen, trained = work.method == "frozen", size if work.method == "full" else 0.0
    waited = 5.5 * trained if trainings == 1 else 0.0  # the last one; folds keep only their export
    passed = timeline.elapsed()
    found = {
        "start": 6.0 if passed is None else passed,
        "data": 4.0 if passed is None else 0.0,
        "plan": 0.5,
        "build": 1.5 * (1 + size),
        "features": step * per_epoch * (1 + 1 / max(trainings, 4)) if frozen else 0.0,
        "capture": CAPTURE_SECONDS if plan.cuda_graph else 0.0,
        "compile": compile_cost(question, cores) if plan.compile else 0.0,
        "steps": steps * trainings * (_PER_STEP if frozen else step),
        "receipt": 0.5,
        "evaluation": per_token * trainings * (evaluations * load.evaluated + load.judged),
        "checkpoint": (0.01 + 0.2 * trained) * trainings * evaluations + waited,
        "judge": 0.03 * trainings,
        "export": 0.4 + 0.4 * size + trained,
        "between folds": 0.15 * trainings,
        "baselines": 1.0 if load.baselines and plan.device == "cpu" else 0.0,
        "end": 0.3,
        "report": 1.5,
        "other": 0.3,
    }
    return {stage: seconds for stage, seconds in found.items() if seconds > 0}


def _shape(plan: Plan) -> str:
    """Name a shape of model and step; steps of similar tokens share one."""
    arguments = {
        name: value
        for name, value in plan.task.arguments.items()
        if name not in ("lengths", "rows", "width", "slots", "micro_batches")
    }
    tokens = plan.micro_batch_tokens * plan.gradient_accumulation_steps
    how = (
        plan.device,
        plan.precision,
        plan.gradient_accumulation_steps,
        round(2 * math.log2(tokens)),
        plan.compile,
        plan.compile_mode if plan.compile else "",
        plan.cuda_graph,
        plan.workload.max_length,
    )
    said = codec.dumps([arguments, how], indent=None)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


# ── what a run teaches ────────────────────────────────────────────────────────────────────────


def learn(folder: Path) -> None:
    """Write predicted against measured times into a run's folder, and keep them for the machine.

    It may be called again when more of the time line is written.
    """
    run = read_run(folder)
    time = None if run.plan is None else run.plan.time
    several = sum(row["stage"] == "start" for row in run.timeline) > 1  # it was resumed
    if run.plan is None or run.hardware is None or time is None or not time.by_rule or several:
        return
    measured = timeline.seconds_by_stage(run.timeline)
    content = {
        "predicted_seconds": time.job_seconds,
        "measured_seconds": sum(measured.values()),
        "predicted": time.stages,
        "measured": measured,
    }
    with suppress(OSError):  # no run fails for it
        write_whole(folder / FILE, json.dumps(content, indent=2) + "\n", parents=False)
    done, shape = _shares_done(run, run.plan), _shape(run.plan)
    factors = {
        stage: measured[stage] / (seconds * done.get(stage, 1.0))
        for stage, seconds in time.by_rule.items()
        if stage not in _BEFORE and measured.get(stage)
    }
    found = {
        _key(stage, shape): factor
        for stage, factor in factors.items()
        if stage in _BY_SHAPE or 1 / _MOST < factor < _MOST
    }
    kept = {k: v for k, v in _learned(run.hardware).factors.items() if k not in found} | found
    caches.write(_place(run.hardware), Learned(factors=dict(list(kept.items())[-_KEPT:])))


def _shares_done(run: RunFiles, plan: Plan) -> dict[str, float]:
    """Shares of the stages of folds that this process had: others may have trained some of them.

    Of the steps, those that were taken count: training may have stopped early.
    """
    work, rows = plan.workload, (row for row in run.timeline if row["stage"] == "steps")
    here = {"" if row["fold"] is None else f"fold {row['fold']}" for row in rows}
    own = [part for part in run.parts if "" in here or part.name in here]
    planned = math.ceil(work.sequences / plan.effective_batch_size) * work.epochs * work.trainings
    taken = sum(int(part.result.get("steps") or 0) for part in own)
    shares = dict.fromkeys(_PER_FOLD, len(own) / len(run.parts) if own else 1.0)
    return shares | {"steps": taken / planned if taken and planned else 1.0}


def _key(stage: str, shape: str) -> str:
    return f"{stage} {shape}" if stage in _BY_SHAPE else stage


def _learned(profile: HardwareProfile) -> Learned:
    return caches.read(Learned, _place(profile)) or Learned()


def _place(profile: HardwareProfile) -> Path:
    return place("job-times", device_name(profile))
