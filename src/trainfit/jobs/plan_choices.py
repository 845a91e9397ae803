"""Choices that are made around the planner: freeze the encoder, and how a GPT computes its loss.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from trainfit.conf import Composed, GptConfig
from trainfit.core.plan_records import Plan, Precision, Reason
from trainfit.planning.question import Question
from trainfit.planning.savers import count_savers

MakePlans = Callable[[Question, list[str]], Mapping[str, Plan]]
"""Function that plans a question for several GPUs; returns the plans by the GPUs' names."""
_SPENDING = ("batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
"""Settings whose pinned values may cost memory; without these pins a plan takes the least."""
CHUNK = 16384
"""Tokens whose logits exist at a time: enough for matrix products at full speed."""
FINE_CHUNK = 4096
"""Tokens whose logits exist at a time where memory is short."""
_CHECKPOINTING = ("none", "selective", "full")


# ── model.freeze_encoder=auto ─────────────────────────────────────────────────────────────────


def choose_freezing(
    composed: Composed, question: Question, make: MakePlans, gpus: list[str]
) -> dict[str, Plan]:
    """Freeze the encoder where its gradients and optimizer states do not fit otherwise."""
    plans = dict(make(question, gpus))
    if not _may_freeze(composed):
        return plans
    least = {gpu: plan for gpu, plan in plans.items() if not plan.fits}
    pins = {name: pin for name, pin in question.pins.items() if name not in _SPENDING}
    if least and pins != question.pins:
        made = make(replace(question, pins=pins), list(least))
        least = {gpu: plan for gpu, plan in made.items() if not plan.fits}
    frozen = make(_frozen(question), list(least)) if least else {}
    return {gpu: _choose(plan, least.get(gpu), frozen.get(gpu)) for gpu, plan in plans.items()}


def _may_freeze(composed: Composed) -> bool:
    """True where the method is left at its default and the weights are pretrained."""
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
    """Return the plan, or the frozen one where even `least`, of the least memory, does not fit."""
    method = plan.workload.method
    if least is None or least.memory is None or frozen is None:
        fits = f"the gradients and optimizer states of {method} fit"
        why = fits if plan.fits else f"{method} fits with smaller settings"
        return _because(plan, "freeze_encoder", False, why, "true: trains the head alone")
    need = f"{least.memory.peak_allocated_gib:.1f} GiB of {least.memory.capacity_gib:.1f}"
    if not frozen.fits:
        why = f"{method} needs {need}, and frozen it does not fit either"
        return _because(plan, "freeze_encoder", False, why)
    why = f"{method} needs {need} at the least: only the head is trained"
    other = f"false: model.method={method} on a larger GPU"
    return _because(frozen, "freeze_encoder", True, why, other)


# ── the loss and the residual stream of a GPT ─────────────────────────────────────────────────


def choose_gpt(
    composed: Composed, question: Question, make: Callable[[Question], Plan], *, gpu: bool
) -> Plan:
    """Add the chunk of the loss and the dtype between blocks to the plan that `make` gives."""
    config = composed.config
    assert isinstance(config, GptConfig)
    asked = config.model.loss_chunk
    if asked == "auto":
        plan = _choose_chunk(question, make, gpu)
    else:
        plan = _with_chunk(make(question), asked, _origin(composed, "model.loss_chunk"))
    half = stream_is_half(config.model.half_stream, plan.precision)
    if config.model.half_stream != "auto":
        why = _origin(composed, "model.half_stream")
    elif half:
        why = "bf16 has float32's range: half the traffic between blocks"
    elif plan.precision == "fp16":
        why = "fp16 would not hold every sum"
    else:
        why = "nothing is in half precision"
    other = "false: float32 between blocks" if half else "true: half precision"
    return _because(plan, "half_stream", half, why, other)


def stream_is_half(asked: bool | str, precision: Precision) -> bool:
    """True where blocks pass their results on in half precision; auto does so in bf16 only."""
    return precision == "bf16" if asked == "auto" else bool(asked)


def _choose_chunk(question: Question, make: Callable[[Question], Plan], gpu: bool) -> Plan:
    """Choose how many tokens' logits exist at a time.

    A GPU has a kernel for loss and gradients together, on the logits of a chunk. A CPU computes all
    logits at once with the fewest operations. They are the largest tensor of a small GPT though:
    finer chunks are tried where a step does not fit, or fits only with gradient checkpointing.
    """
    plan = make(_chunked(question, CHUNK)) if gpu else make(question)
    value = CHUNK if gpu else None
    if not any(_cost(plan)):
        why = "loss and gradients in one pass over the logits of so many tokens"
        return _with_chunk(plan, value, why if gpu else "all logits fit at once")
    finer = make(_chunked(question, FINE_CHUNK))
    if _cost(finer) >= _cost(plan):
        return _with_chunk(plan, value, "finer chunks would not help")
    why = "it costs less than other savings" if plan.fits else "else the step does not fit"
    return _with_chunk(finer, FINE_CHUNK, f"only so many tokens' logits exist at a time; {why}")


def _chunked(question: Question, chunk: int) -> Question:
    return replace(question, arguments=question.arguments | {"loss_chunk": chunk})


def _cost(plan: Plan) -> tuple[bool, int, int]:
    """Price of a plan by what it gives up for memory, for comparing two."""
    recomputed = _CHECKPOINTING.index(plan.gradient_checkpointing)
    return not plan.fits, count_savers(plan), recomputed


def _origin(composed: Composed, key: str) -> str:
    origin = composed.origins[key]
    return {"override": "you set it", "default": "the default"}.get(origin, origin)


def _with_chunk(plan: Plan, value: int | None, why: str) -> Plan:
    other = f"{FINE_CHUNK}: less memory" if value != FINE_CHUNK else "null: all at once"
    return _because(plan, "loss_chunk", value, why, other)


def _because(plan: Plan, setting: str, value: int | bool | None, why: str, *others: str) -> Plan:
    reason = Reason(setting=setting, value=value, why=why, alternatives=others)
    return replace(plan, reasons=(*plan.reasons, reason))
