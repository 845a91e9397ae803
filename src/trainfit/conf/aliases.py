"""The spellings that the documents use for one knob, and the one that trainfit keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainfit.errors import BadInput

ALIASES: Mapping[str, str] = {
    "device.use_tf32": "device.tf32",
    "reproducibility.tf32": "device.tf32",
    "enable_tf32": "device.tf32",
    "training.use_bf16": "device.mixed_precision",
    "use_bf16": "device.mixed_precision",
    "enable_amp": "device.mixed_precision",
    "amp_dtype": "device.mixed_precision",
    "model.use_torch_compile": "optimization.compile",
    "training.use_torch_compile": "optimization.compile",
    "use_torch_compile": "optimization.compile",
    "enable_compile": "optimization.compile",
    "training.optimizer_type": "optimization.optimizer",
    "training.fused_adamw": "optimization.optimizer",
    "fused_adamw": "optimization.optimizer",
    "optim": "optimization.optimizer",
    "optimization.max_grad_norm": "training.max_grad_norm",
    "target_effective_batch_size": "training.effective_batch_size",
    "data.num_workers": "training.num_workers",
    "data.pin_memory": "training.pin_memory",
    "data.persistent_workers": "training.persistent_workers",
    "data.prefetch_factor": "training.prefetch_factor",
    "dataloader_num_workers": "training.num_workers",
    "dataloader_pin_memory": "training.pin_memory",
    "dataloader_persistent_workers": "training.persistent_workers",
    "dataloader_prefetch_factor": "training.prefetch_factor",
    "reproducibility.deterministic": "device.deterministic",
    "block_size": "data.max_length",
    "batch_train": "training.batch_size",
    "batch_eval": "training.eval_batch_size",
    "grad_accum": "optimization.gradient_accumulation_steps",
}
"""Compared without regard to case: one document writes its knobs as BATCH_TRAIN."""

_MEANINGS: Mapping[str, Mapping[Any, Any]] = {
    "use_bf16": {True: "bf16", False: "off"},
    "fused_adamw": {True: "adamw_fused", False: "adamw"},
    "optim": {"adamw_torch_fused": "adamw_fused", "adamw_torch": "adamw"},
    "enable_amp": {True: "auto", False: "off"},
}
"""Where an alias also spells its values otherwise, by the alias's last part."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One `key=value` as the user wrote it, with the canonical key."""

    written: str
    key: str
    value: Any


def canonical_key(written: str, keys: Iterable[str]) -> str | None:
    """The key of the schema that `written` means; a last part alone will do if only one fits."""
    valid = set(keys)
    if written in valid:
        return written
    folded = written.lower()
    if ALIASES.get(folded) in valid:
        return ALIASES[folded]
    endings = [key for key in valid if "." not in folded and key.split(".")[-1] == folded]
    return endings[0] if len(endings) == 1 else None


def canonical_value(written: str, key: str, value: Any) -> Any:
    """The value in the spelling of the canonical key."""
    meanings = _MEANINGS.get(written.lower().split(".")[-1], {})
    try:
        value = meanings.get(value, value)
    except TypeError:  # a list or a mapping: left for the schema to refuse
        return value
    if key == "device.mixed_precision" and isinstance(value, bool):
        return "auto" if value else "off"
    return value


def settle(assignments: Iterable[Assignment]) -> tuple[dict[str, Assignment], list[BadInput]]:
    """One assignment per canonical key; two that contradict each other are a problem."""
    chosen: dict[str, Assignment] = {}
    problems = []
    for item in assignments:
        other = chosen.get(item.key)
        if other is None or item.written == other.written or item.value == other.value:
            chosen[item.key] = item  # the same key twice: the last one wins, as in a shell
        elif merged := _amp(other, item):
            chosen[item.key] = merged
        else:
            both = f"{other.written}={other.value} and {item.written}={item.value}"
            problems.append(
                BadInput(f"{both} set the same key {item.key}", f"give {item.key} once")
            )
    return chosen, problems


def _amp(first: Assignment, second: Assignment) -> Assignment | None:
    """enable_amp says whether and amp_dtype says which: together they are one setting."""
    by_name = {first.written: first, second.written: second}
    if set(by_name) != {"enable_amp", "amp_dtype"}:
        return None
    return by_name["enable_amp" if by_name["enable_amp"].value == "off" else "amp_dtype"]
