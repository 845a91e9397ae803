"""The plan of a pretraining job: the planner's, and whether the loss goes chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainfit.conf import Composed, GptConfig
from trainfit.planning.question import Question
from trainfit.records import Plan, Reason

CHUNK = 8192
"""Tokens whose logits exist at a time: enough for matrix products at full speed."""


def choose_chunk(composed: Composed, question: Question, make: Callable[[Question], Plan]) -> Plan:
    """The plan that `make` gives, with a chunked loss where that is needed and nobody said.

    All logits at once are computed with the fewest kernels. They are the largest tensor of a small
    GPT though: where a step does not fit, or must compute its blocks twice to fit, chunks are
    tried.
    """
    config = composed.config
    assert isinstance(config, GptConfig)
    plan = make(question)
    asked = config.model.loss_chunk
    if asked != "auto":
        origin = composed.origins["model.loss_chunk"]
        said = {"override": "you set it", "default": "the default"}.get(origin, origin)
        return _because(plan, asked, said)
    if plan.fits and plan.gradient_checkpointing == "none":
        return _because(plan, None, "all logits of a micro-batch fit at once")
    chunked = make(replace(question, arguments=question.arguments | {"loss_chunk": CHUNK}))
    if not _better(chunked, plan):
        return _because(plan, None, "chunks would not help")
    why = "less is computed twice" if plan.fits else "else the step does not fit"
    return _because(chunked, CHUNK, f"only so many tokens' logits exist at a time; {why}")


def _better(chunked: Plan, plain: Plan) -> bool:
    if chunked.fits != plain.fits:
        return chunked.fits
    modes = ("none", "selective", "full")
    more, less = (modes.index(p.gradient_checkpointing) for p in (plain, chunked))
    return less < more


def _because(plan: Plan, value: int | None, why: str) -> Plan:
    others = () if value else (f"{CHUNK}: less memory",)
    reason = Reason(setting="loss_chunk", value=value, why=why, alternatives=others)
    return replace(plan, reasons=(*plan.reasons, reason))
