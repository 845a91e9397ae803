"""Starting values for a machine: those of the plan of the default job, `trainfit plan nli`."""

from __future__ import annotations

from trainfit.conf import compose
from trainfit.core.plan_records import Reason, Recommendation
from trainfit.core.records import HardwareProfile
from trainfit.jobs import job_plan
from trainfit.planning import preset_for

TASK = "nli"
OVERRIDES: tuple[str, ...] = ()
"""Overrides of the default job: none."""


def subject() -> str:
    """Name the job and the model of the recommendation."""
    config = compose(TASK, OVERRIDES).config
    return f"{TASK} with {config.model.name}"


def recommend(profile: HardwareProfile) -> Recommendation:
    """Plan the default job on this machine and return its settings as starting values."""
    composed = compose(TASK, OVERRIDES)
    plan = job_plan.answer(composed, job_plan.question(composed), profile)
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
