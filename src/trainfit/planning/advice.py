"""What would fit, where the plan does not."""

from __future__ import annotations

from typing import Any

from trainfit.catalogue import gpus
from trainfit.planning.fitting import Candidate
from trainfit.planning.memory import CONTEXT_GIB, GIB, MARGIN, Target
from trainfit.planning.probing import take
from trainfit.planning.question import Question

_SHORTEST = 64


def what_would_fit(
    question: Question, arguments: dict[str, Any], best: Candidate, held: Target, thorough: bool
) -> tuple[str, ...]:
    """Lines of advice, those that change the least first; `best` is the smallest of the plan."""
    lines = []
    need = best.taken.peak_allocated
    pinned = [
        name
        for name in ("batch_size", "gradient_checkpointing", "precision")
        if name in question.pins and question.pins[name].origin != "default"
    ]
    if pinned:
        lines.append(f"leave {' and '.join(pinned)} to the plan")
    if thorough:
        lines += _other_methods(question, arguments, best, held)
        lines += _shorter(question, arguments, best, held)
    larger = _smallest_gpu(need)
    if larger is not None:
        lines.append(f"the smallest GPU of the catalogue that holds it: {larger}")
    return tuple(lines)


def _other_methods(
    question: Question, arguments: dict[str, Any], best: Candidate, held: Target
) -> list[str]:
    if question.causal or question.workload.method != "full":
        return []
    base = arguments | best.cutting.shape
    asked = {
        "LoRA (model.method=lora)": {"method": "lora", "checkpointing": "full"},
        "a frozen encoder (model.freeze_encoder=true)": {
            "method": "frozen",
            "checkpointing": "none",
        },
    }
    half = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[arguments["precision"]]
    shapes = [base | change | {"dtype": half} for change in asked.values()]
    found = take(question.factory, shapes, (held,), question.layers)
    return [
        f"{name}: {taken[0].peak_allocated / GIB:.1f} GiB"
        for name, taken in zip(asked, found, strict=True)
        if taken[0].peak_allocated <= held.capacity
    ]


def _shorter(
    question: Question, arguments: dict[str, Any], best: Candidate, held: Target
) -> list[str]:
    """The longest length, by halves, with which a single sequence fits."""
    shape = best.cutting.shape
    length = question.workload.max_length // 2
    tried: list[int] = []
    while length >= _SHORTEST and len(tried) < 2:
        tried.append(length)
        length //= 2
    if not tried:
        return []
    shapes = [
        arguments
        | shape
        | {"checkpointing": best.checkpointing, "rows": 1, "width": width}
        | ({"lengths": [width], "slots": 1} if shape["slots"] is not None else {})
        for width in tried
    ]
    found = take(question.factory, shapes, (held,), question.layers)
    for width, taken in zip(tried, found, strict=True):
        if taken[0].peak_allocated <= held.capacity:
            need = taken[0].peak_allocated / GIB
            return [f"data.max_length={width}: {need:.1f} GiB with one sequence at a time"]
    return []


def _smallest_gpu(need: float) -> str | None:
    able = [
        spec
        for spec in gpus()
        if (spec.memory_gib - CONTEXT_GIB) * (1 - MARGIN) * GIB >= need and spec.vendor == "nvidia"
    ]
    if not able:
        return None
    smallest = min(able, key=lambda spec: (spec.memory_gib, -spec.bandwidth_gbs))
    return f"{smallest.slug} ({smallest.memory_gb:g} GB)"
