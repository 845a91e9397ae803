"""Steps of trainfit's own jobs, as the planner asks about them: packed, padded, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ENCODER, GPT = "trainfit.jobs.probes:encoder_step", "trainfit.jobs.probes:gpt_step"
# Lengths of the kind that ReDSM5 has, over and over.
LENGTHS = [512, 341, 220, 512, 187, 96, 430, 265, 512, 158, 310, 74, 512, 399, 133, 240]
HALF = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def packed(tokens: int) -> dict[str, Any]:
    """A row of so many tokens, filled."""
    lengths: list[int] = []
    while sum(lengths) + LENGTHS[len(lengths) % len(LENGTHS)] <= tokens:
        lengths.append(LENGTHS[len(lengths) % len(LENGTHS)])
    return {
        "rows": 1,
        "width": tokens,
        "slots": len(lengths),
        "lengths": lengths,
        "attention": "varlen",
        "attention_dropout": 0.0,
    }


def padded(rows: int, width: int) -> dict[str, Any]:
    return {"rows": rows, "width": width, "slots": None, "lengths": None}


def encoder(name: str, shape: dict[str, Any], **more: Any) -> dict[str, Any]:
    given = {
        "name": name,
        "weights": "random",
        "classes": 2,
        "method": "full",
        "precision": "bf16",
        "checkpointing": "none",
        "micro_batches": 1,
    }
    case = given | shape | more
    if case["method"] != "full":
        case["dtype"] = HALF[case["precision"]]
    return {"factory": ENCODER, "arguments": case}


def gpt(name: str, rows: int, width: int, **more: Any) -> dict[str, Any]:
    given = {
        "name": name,
        "precision": "bf16",
        "checkpointing": "none",
        "micro_batches": 1,
        **padded(rows, width),
    }
    return {"factory": GPT, "arguments": given | more}


BERT, MODERN, GEMMA, DEBERTA = "bert-base", "modernbert-base", "gemma-3-1b-it", "deberta-v3-base"
EAGER: dict[str, dict[str, Any]] = {
    "bert packed 16384": encoder(BERT, packed(16384)),
    "bert packed 4096 x2": encoder(BERT, packed(4096), micro_batches=2),
    "bert packed 16384 full": encoder(BERT, packed(16384), checkpointing="full"),
    "bert padded 32x512": encoder(BERT, padded(32, 512)),
    "bert padded 32x512 fp16": encoder(BERT, padded(32, 512), precision="fp16"),
    "modernbert packed 16384": encoder(MODERN, packed(16384)),
    "modernbert packed 8192 selective": encoder(MODERN, packed(8192), checkpointing="selective"),
    "gemma packed 8192": encoder(GEMMA, packed(8192)),
    "gemma packed 4096 x2 full": encoder(
        GEMMA, packed(4096), micro_batches=2, checkpointing="full"
    ),
    "gemma packed 8192 dora": encoder(GEMMA, packed(8192), method="dora"),
    "gemma packed 8192 lora": encoder(GEMMA, packed(8192), method="lora"),
    "gemma packed 16384 frozen": encoder(GEMMA, packed(16384), method="frozen"),
    "deberta padded 16x512": encoder(DEBERTA, padded(16, 512)),
    "gpt-small 16x1024": gpt("gpt-small", 16, 1024),
    "gpt-small 16x1024 full": gpt("gpt-small", 16, 1024, checkpointing="full"),
    "gpt-medium 8x1024 x2": gpt("gpt-medium", 8, 1024, micro_batches=2),
}
COMPILED = {
    f"{name} compiled": case
    for name, case in EAGER.items()
    if name
    in (
        "bert packed 16384",
        "bert padded 32x512",
        "bert padded 32x512 fp16",
        "modernbert packed 16384",
        "gemma packed 8192",
        "gemma packed 8192 lora",
        "deberta padded 16x512",
        "gpt-small 16x1024",
        "gpt-medium 8x1024 x2",
    )
}


def family(arguments: dict[str, Any]) -> str:
    """The model, which is what is left out when a fit is judged."""
    return str(arguments["name"])


def build(
    case: dict[str, Any], device: str
) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], Callable[[], object]]]:
    """The model on `device` and what makes its step."""
    from trainfit.jobs import probes as encoder_probe
    from trainfit.jobs import probes as gpt_probe

    make = encoder_probe.encoder_step if case["factory"] == ENCODER else gpt_probe.gpt_step
    with torch.device(device):
        model, make_step = make(**case["arguments"], device=device)

    def placed(built: torch.nn.Module) -> Callable[[], object]:
        with torch.device(device):
            return make_step(built)

    return model.to(device), placed
