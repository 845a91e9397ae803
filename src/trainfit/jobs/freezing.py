"""`model.freeze_encoder=auto`: an encoder is frozen where memory holds it in no other way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from trainfit.conf import Composed, GptConfig
from trainfit.core.plan_records import Plan, Reason
from trainfit.planning.question import Question

Make = Callable[[Question, list[str]], Mapping[str, Plan]]
"""The plans of a question, by the name of the GPU."""
_SPENDING = ("batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
"""Settings that spend memory: a plan without them takes the least."""


def decide(composed: Composed, question: Question, make: Make, gpus: list[str]) -> dict[str, Plan]:
    """The plans, with the encoder frozen where its gradients and optimizer states do not fit."""
    plans = dict(make(question, gpus))
    if not _is_free(composed):
        return plans
    least = {gpu: plan for gpu, plan in plans.items() if not plan.fits}
    pins = {name: pin for name, pin in question.pins.items() if name not in _SPENDING}
    if least and pins != question.pins:
        made = make(replace(question, pins=pins), list(least))
        least = {gpu: plan for gpu, plan in made.items() if not plan.fits}
    frozen = make(_frozen(question), list(least)) if least else {}
    return {gpu: _choose(plan, least.get(gpu), frozen.get(gpu)) for gpu, plan in plans.items()}


def _is_free(composed: Composed) -> bool:
    """Tell if the plan may freeze: nobody set the method, and the weights are worth keeping."""
    config = composed.config
    if isinstance(config, GptConfig) or config.model.freeze_encoder != "auto":
        return False
    return composed.origins["model.method"] != "override" and config.model.weights != "random"


def _frozen(question: Question) -> Question:
    return replace(
        question,
        arguments=question.arguments | {"method": "frozen"},
        workload=replace(question.workload, method="frozen"),
    )


def _choose(plan: Plan, least: Plan | None, frozen: Plan | None) -> Plan:
    """The plan, or the frozen one where `least`, which spends the least memory, does not fit."""
    method = plan.workload.method
    if least is None or least.memory is None or frozen is None:
        fits = f"the gradients and optimizer states of {method} fit"
        why = fits if plan.fits else f"{method} fits with smaller settings"
        return _because(plan, False, why, "true: trains the head alone")
    need = f"{least.memory.peak_allocated_gib:.1f} GiB of {least.memory.capacity_gib:.1f}"
    if not frozen.fits:
        return _because(plan, False, f"{method} needs {need}, and frozen it does not fit either")
    why = f"{method} needs {need} at the least: only the head is trained"
    return _because(frozen, True, why, f"false: model.method={method} on a larger GPU")


def _because(plan: Plan, value: bool, why: str, *alternatives: str) -> Plan:
    reason = Reason(setting="freeze_encoder", value=value, why=why, alternatives=alternatives)
    return replace(plan, reasons=(*plan.reasons, reason))
