"""Tables of models under caps of memory, and of losses, from the records of more_model.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from result_files import RESULTS, table

_GIB = 2**30
_TITLES = {
    "7b lora": "Mistral-7B, LoRA",
    "7b qlora": "Mistral-7B, QLoRA",
    "gemma-4b dora": "Gemma-3-4B, DoRA",
    "gemma-4b qdora": "Gemma-3-4B, QDoRA",
    "gemma-1b full": "Gemma-3-1B, full",
    "deberta-large full": "DeBERTa-v3-large, full",
}
_USUAL = {"optimizer": "adamw_fused", "quantization": "none", "gradient_checkpointing": "none"}
_SHOWN = ("quantization", "optimizer", "offload_optimizer", "offload_activations")


def _records() -> list[dict[str, Any]]:
    paths = sorted(RESULTS.glob("*-more-model-*.json"))
    return [json.loads(path.read_text()) for path in paths]


def capped_models() -> str:
    """Predicted and measured peaks of the named cases, in GiB."""
    found = [one for record in _records() for one in record["results"]]
    rows = [_row(one) for one in found if one["name"] in _TITLES and one["status"] == "finished"]
    heads = ("model", "cap", "taken", "predicted", "measured", "error", "reserved", "samples/s")
    return table(heads, rows) if rows else ""


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    predicted = one["predicted"]["memory"]["peak_allocated_gib"]
    measured, reserved = one["peak_allocated"] / _GIB, one["peak_reserved"] / _GIB
    return (
        _TITLES[one["name"]],
        f"{one['cap_gib']} GiB",
        _savers(one["savers"]),
        f"{predicted:.2f}",
        f"{measured:.2f}",
        f"{predicted / measured - 1:+.1%}",
        f"{reserved:.2f}",
        f"{one['samples_per_second']:.0f}",
    )


def _savers(chosen: dict[str, Any]) -> str:
    """Settings that save memory, as words of a command."""
    words = [f"checkpointing {chosen['gradient_checkpointing']}"]
    for name in _SHOWN:
        if chosen[name] not in (False, _USUAL.get(name)):
            words.append(f"{name}={str(chosen[name]).lower()}")
    return ", ".join(words)


def random_plans() -> str:
    """Promises of random plans under random caps, kept and not kept."""
    rows = []
    for record in _records():
        if (found := record.get("summary")) is None:
            continue
        low, high = found["lowest and highest error of the peak"]
        rows.append(
            (
                f"{found['of these ran']} of {found['said to fit']}",
                f"{found['said to fit'] - found['of these ran']}",
                f"{found['of these ran all the same']} of {found['said not to fit']}",
                f"{low:+.2%} to {high:+.2%}",
            )
        )
    heads = (
        "said to fit, and ran",
        "ran out of memory",
        "said not to fit, and ran",
        "error of the peak",
    )
    return table(heads, rows) if rows else ""


def losses() -> str:
    """Mean of the last 30 losses of every seed, and whether the means lie within the seeds."""
    rows = []
    for record in _records():
        for way, found in record.get("loss_summary", {}).items():
            within = {True: "yes", False: "no", None: "–"}[found.get("end_within")]
            steps = f"{found['steps_within']} of {found['steps']}" if "steps" in found else "–"
            last = (f"{one:.4f}" for one in found["last_30"])
            rows.append((way, *last, within, steps))
    heads = ("way", *(f"seed {one}" for one in range(3)), "end within the seeds", "steps within")
    return table(heads, rows) if rows else ""


TABLES: dict[str, Callable[[], str]] = {
    "more-model": capped_models,
    "random-plans": random_plans,
    "small-state-losses": losses,
}
