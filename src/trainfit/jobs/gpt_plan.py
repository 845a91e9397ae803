"""The plan of a pretraining job: the planner's, with what only a GPT has to decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainfit.conf import Composed, GptConfig
from trainfit.core.plan_records import Plan, Precision, Reason
from trainfit.planning.question import Question

CHUNK = 16384
"""Tokens whose logits exist at a time: enough for matrix products at full speed."""
FINE_CHUNK = 4096
"""Where memory is short."""


def decide(
    composed: Composed, question: Question, make: Callable[[Question], Plan], *, gpu: bool
) -> Plan:
    """The plan that `make` gives, with how the loss is computed and what blocks hand on."""
    config = composed.config
    assert isinstance(config, GptConfig)
    asked = config.model.loss_chunk
    if asked == "auto":
        plan = _choose_chunk(question, make, gpu)
    else:
        plan = _because(make(question), "loss_chunk", asked, _said(composed, "model.loss_chunk"))
    half = stream_is_half(config.model.half_stream, plan.precision)
    if config.model.half_stream != "auto":
        why = _said(composed, "model.half_stream")
    elif half:
        why = "bf16 has float32's range: half the traffic between blocks"
    elif plan.precision == "fp16":
        why = "fp16 would not hold every sum"
    else:
        why = "nothing is in half precision"
    return _because(plan, "half_stream", half, why)


def stream_is_half(asked: bool | str, precision: Precision) -> bool:
    """Whether blocks hand on what they computed in half precision; by itself in bf16 alone."""
    return precision == "bf16" if asked == "auto" else bool(asked)


def _choose_chunk(question: Question, make: Callable[[Question], Plan], gpu: bool) -> Plan:
    """A GPU has a kernel for loss and gradients together, on the logits of a chunk.

    A CPU computes all logits at once with the fewest operations. They are the largest tensor of a
    small GPT though: where a step does not fit, or must compute its blocks twice to fit, finer
    chunks are tried.
    """
    plan = make(_chunked(question, CHUNK)) if gpu else make(question)
    value = CHUNK if gpu else None
    if plan.fits and plan.gradient_checkpointing == "none":
        why = "loss and gradients in one pass over the logits of so many tokens"
        return _because(plan, "loss_chunk", value, why if gpu else "all logits fit at once")
    finer = make(_chunked(question, FINE_CHUNK))
    if not _better(finer, plan):
        return _because(plan, "loss_chunk", value, "finer chunks would not help")
    why = "less is computed twice" if plan.fits else "else the step does not fit"
    return _because(
        finer, "loss_chunk", FINE_CHUNK, f"only so many tokens' logits exist at a time; {why}"
    )


def _chunked(question: Question, chunk: int) -> Question:
    return replace(question, arguments=question.arguments | {"loss_chunk": chunk})


def _better(finer: Plan, plan: Plan) -> bool:
    if finer.fits != plan.fits:
        return finer.fits
    modes = ("none", "selective", "full")
    more, less = (modes.index(p.gradient_checkpointing) for p in (plan, finer))
    return less < more


def _said(composed: Composed, key: str) -> str:
    origin = composed.origins[key]
    return {"override": "you set it", "default": "the default"}.get(origin, origin)


def _because(plan: Plan, setting: str, value: int | bool | None, why: str) -> Plan:
    others = {
        "loss_chunk": f"{FINE_CHUNK}: less memory" if value != FINE_CHUNK else "null: all at once",
        "half_stream": "false: float32 between blocks" if value else "true: half precision",
    }
    reason = Reason(setting=setting, value=value, why=why, alternatives=(others[setting],))
    return replace(plan, reasons=(*plan.reasons, reason))
