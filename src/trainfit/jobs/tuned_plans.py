"""A job, tuned: its question, its trials, starting values for a machine, the largest micro-batch.

Nothing here imports torch: trials run in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainfit.conf import Composed, NliConfig, compose
from trainfit.core import codec
from trainfit.core.errors import BadInput
from trainfit.core.libraries import has
from trainfit.core.plan_records import Plan, Reason, Recommendation, TaskSpec
from trainfit.core.records import HardwareProfile, Scalar
from trainfit.jobs import job_plan
from trainfit.jobs.job_times import JobLoad, with_job_time
from trainfit.jobs.registry import check_job, is_own, name_of
from trainfit.planning import preset_for
from trainfit.planning.question import Question
from trainfit.tuning import tuner
from trainfit.tuning.finder import MARGIN, BatchSizeFound, BatchSizeJob, find
from trainfit.tuning.tuned_cache import Trial, TuneResult
from trainfit.tuning.tuner import MINUTES as MINUTES
from trainfit.tuning.tuner import RATE

if TYPE_CHECKING:
    from trainfit.jobs.run import Prepared

FACTORIES = {
    **dict.fromkeys(("nli", "textclass", "pairs", "tokens"), "trainfit.jobs.probes:encoder_trial"),
    "gpt": "trainfit.jobs.probes:gpt_trial",
}
OWN_TRIAL = "trainfit.jobs.own_steps:own_trial"
_MOST_LENGTHS = 1 << 14
"""Sequences of a trial: they are drawn evenly from those of the data where there are more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobQuestion:
    """The question of a job to the planner and the tuner, and the machine it is about."""

    composed: Composed
    question: Question
    profile: HardwareProfile
    ranks: int = 1
    load: JobLoad = field(default_factory=JobLoad)

    def ask(self, pins: Mapping[str, Scalar]) -> Plan:
        """The planner's answer with these settings decided."""
        question = tuner.pinned(self.question, pins)
        here = not self.profile.simulated
        return job_plan.answer(self.composed, question, self.profile, ranks=self.ranks, here=here)


def tune(
    job: JobQuestion,
    *,
    minutes: float = MINUTES,
    tell: Callable[[Trial], None] = lambda _trial: None,
) -> TuneResult:
    """Measure for `minutes`, planning included, and keep the result for `train`."""

    def ask(pins: Mapping[str, Scalar]) -> Plan:
        plan = job.ask(pins)
        if plan.workload.method == "frozen":
            raise BadInput(
                "a frozen encoder runs once, and its head trains in no time",
                "there is nothing to tune; or set model.freeze_encoder=false",
            )
        return plan

    return tuner.tune(
        job.question,
        job.profile,
        trial_task(job),
        ask=ask,
        ranks=job.ranks,
        minutes=minutes,
        tell=tell,
    )


def make_plan(
    prepared: Prepared, profile: HardwareProfile, ranks: int = 1, machines: int = 1
) -> Plan:
    """Return the plan of a job, with the tuned settings where it was tuned before."""
    job = prepared.tuned_job(profile, ranks)
    plan = job_plan.answer(
        job.composed, job.question, profile, ranks=ranks, machines=machines, here=True
    )
    if not plan.fits:
        advice = plan.advice[0] if plan.advice else "take a smaller model"
        raise BadInput("the job does not fit this machine", advice)
    plan = job_plan.with_tuned(job, plan)
    return with_job_time(plan, job.question, profile, job.load)


def trial_task(job: JobQuestion) -> TaskSpec:
    """How a child builds the job's run: by its configuration and lengths, never its texts."""
    lengths = sorted(job.question.workload.lengths)
    arguments: dict[str, Any] = {
        "task": job.composed.task,
        "config": codec.encode(job.composed.config),
        "lengths": lengths[:: max(1, len(lengths) // _MOST_LENGTHS)],
        "device": job.profile.device,
    }
    return TaskSpec(factory=FACTORIES.get(job.composed.task, OWN_TRIAL), arguments=arguments)


def tuned_rate(plan: Plan) -> float | None:
    """Samples per second that `tune` measured for this plan; None for a plan never tuned."""
    return next((item.value for item in plan.measurements if item.name == RATE), None)


# ── starting values for a machine ─────────────────────────────────────────────────────────────

TASK = "nli"
OVERRIDES: tuple[str, ...] = ()
"""Overrides of the job that `check` plans: none, so the defaults."""


def subject() -> str:
    """Name the job and the model of the recommendation."""
    config = compose(TASK, OVERRIDES).config
    return f"{TASK} with {config.model.name}"


def _example() -> Composed:
    """Configuration of the job of the recommendation; without peft its encoder is frozen."""
    composed = compose(TASK, OVERRIDES)
    config = composed.config
    if has("peft") or not isinstance(config, NliConfig):
        return composed
    model = replace(config.model, freeze_encoder=True)
    return replace(composed, config=replace(config, model=model))


def recommend(profile: HardwareProfile) -> Recommendation:
    """Plan the default job on this machine, as `train` does; its settings are starting values."""
    composed = _example()
    asked, here = job_plan.question(composed), not profile.simulated
    plan = job_plan.answer(composed, asked, profile, here=here)
    preset, why = preset_for(profile.gpu)
    row = Reason(setting="preset", value=preset, why=f"{why}; hardware={preset} pins its values")
    return Recommendation(
        task=TASK,
        model=composed.config.model.name,
        method=plan.workload.method,
        max_length=plan.workload.max_length,
        fits=plan.fits,
        preset=preset,
        precision=plan.precision,
        tf32=bool(plan.runtime.tf32),
        batch_size=plan.batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        gradient_checkpointing=plan.gradient_checkpointing != "none",
        freeze_encoder=plan.workload.method == "frozen",
        compile=plan.compile,
        num_workers=plan.num_workers,
        num_threads=plan.runtime.num_threads,
        reasons=(row, *plan.reasons),
        advice=plan.advice,
    )


# ── the largest micro-batch ───────────────────────────────────────────────────────────────────────


_SHAPE = ("rows", "width", "slots", "lengths", "micro_batches")


def find_batch_size(
    task: str | type | TaskSpec | Callable[[int], Callable[[], object]],
    *overrides: str,
    margin: float = MARGIN,
    at_least: int = 1,
    at_most: int | None = None,
    effective_batch_size: int | None = None,
    memory_gib: float | None = None,
    max_length: int | None = None,
    lengths: Sequence[int] | None = None,
) -> BatchSizeFound:
    """Find the largest micro-batch that fits the GPU as it is now, the advised one, and the knee.

    `task` is nli, textclass, pairs, gpt or the class of a job of yours, with `overrides` as on the
    command line; or a step of your own: a TaskSpec (or module:function) whose function takes `rows`
    beside its arguments and returns a model and what makes its step, as for `trainfit.estimate`; or
    a function of `rows` that returns a step, which cannot be predicted and takes longer. For those,
    `max_length` is the number of tokens in a row.

    The advised size is `margin` of the largest, in the range from `at_least` to `at_most` rows.
    `memory_gib` bounds the memory. `lengths` are the tokens of the training sequences.
    """
    limits: dict[str, Any] = {
        "margin": margin,
        "at_least": at_least,
        "at_most": at_most,
        "memory_gib": memory_gib,
    }
    if isinstance(task, type) or (isinstance(task, str) and ":" not in task):
        task = name_of(task)
        if is_own(task) and (lengths is not None or max_length is not None):
            raise BadInput("lengths beside a job of yours", "its data has an attribute lengths")
        if max_length is not None:
            raise BadInput(
                "max_length is for a step of your own", f"say data.max_length={max_length}"
            )
        if effective_batch_size is not None:
            overrides = (*overrides, f"training.effective_batch_size={effective_batch_size}")
        return _for_task(task, overrides, lengths, limits)
    if overrides:
        raise BadInput(f"{' '.join(overrides)} beside a step of your own", "leave the words out")
    limits |= {"effective_batch_size": effective_batch_size, "width": max_length}
    if callable(task):
        return find(BatchSizeJob(make=task, **limits))
    spec = TaskSpec(factory=task, arguments={}) if isinstance(task, str) else task
    spec.check()
    given = spec.arguments
    return find(
        BatchSizeJob(factory=spec.factory, arguments=lambda rows: given | {"rows": rows}, **limits)
    )


def _for_task(
    task: str, overrides: Sequence[str], lengths: Sequence[int] | None, limits: dict[str, Any]
) -> BatchSizeFound:
    BatchSizeJob(factory="", **limits)  # a bad range is told before anything is planned
    check_job(task)
    composed = compose(task, list(overrides))
    profile = job_plan.machine(composed)
    own = is_own(task)
    asked = job_plan.asked_question(composed) if own else job_plan.question(composed, lengths)
    plan = job_plan.answer(composed, asked, profile, memory_gib=limits["memory_gib"])
    return find(job_of(plan, **limits), profile)


def job_of(plan: Plan, **limits: Any) -> BatchSizeJob:
    """Make the finder's job of a plan: its step, with its settings, at any number of rows."""
    width, effective = plan.workload.max_length, plan.effective_batch_size
    settled = {name: v for name, v in plan.task.arguments.items() if name not in _SHAPE}

    def micro_batches(rows: int) -> int:
        # From the second micro-batch on, gradients occupy memory beside the activations.
        return 1 if rows * plan.ranks >= effective else 2

    def arguments(rows: int) -> dict[str, Any]:
        return settled | _shape(rows, width, plan.packed) | {"micro_batches": micro_batches(rows)}

    return BatchSizeJob(
        factory=plan.task.check().factory,
        arguments=arguments,
        micro_batches=micro_batches,
        width=width,
        packed=plan.packed,
        effective_batch_size=effective,
        runtime=plan.runtime,
        **limits,
    )


def _shape(rows: int, width: int, packed: bool) -> dict[str, Any]:
    """Arguments for `rows` sequences of the full length, the most memory they can take."""
    if packed:
        return {"rows": 1, "width": rows * width, "slots": rows, "lengths": [width] * rows}
    return {"rows": rows, "width": width, "slots": None, "lengths": None}
