"""The spellings that the documents use for one knob, and the one that trainfit keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainfit.core.errors import BadInput, brief

ALIASES: Mapping[str, str] = {
    "device.use_tf32": "device.tf32",
    "reproducibility.tf32": "device.tf32",
    "enable_tf32": "device.tf32",
    "training.use_bf16": "device.mixed_precision",
    "use_bf16": "device.mixed_precision",
    "fp16": "device.mixed_precision",
    "bf16": "device.mixed_precision",
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
    "gradient_checkpointing": "model.use_gradient_checkpointing",
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

_FLAGS: Mapping[str, Mapping[bool, str]] = {
    "fp16": {True: "fp16", False: "off"},
    "bf16": {True: "bf16", False: "off"},
    "use_bf16": {True: "bf16", False: "off"},
    "enable_amp": {True: "auto", False: "off"},
    "fused_adamw": {True: "adamw_fused", False: "adamw"},
}
"""Aliases that are true or false where their key has names, by the alias's last part."""
_NAMES: Mapping[str, Mapping[str, str]] = {
    "optimization.optimizer": {"adamw_torch_fused": "adamw_fused", "adamw_torch": "adamw"},
    "device.mixed_precision": {
        "true": "auto",
        "false": "off",
        "fp32": "off",
        "float32": "off",
        "no": "off",
        "none": "off",
        "bfloat16": "bf16",
        "float16": "fp16",
    },
}
"""Other names of a key's values, in lower case."""
_HALVES = ("bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One `key=value` as the user wrote it, with the canonical key."""

    written: str
    key: str
    value: Any
    word: str
    """The whole of it, as it was written."""


def canonical_key(written: str, keys: Iterable[str]) -> str | None:
    """The key of the schema that `written` means; a last part alone will do if only one fits."""
    valid = set(keys)
    folded = written.strip().lower()
    if folded in valid:
        return folded
    if ALIASES.get(folded) in valid:
        return ALIASES[folded]
    endings = [key for key in valid if "." not in folded and key.split(".")[-1] == folded]
    return endings[0] if len(endings) == 1 else None


def canonical_value(written: str, key: str, value: Any) -> Any:
    """The value in the spelling of the canonical key."""
    flag = _FLAGS.get(_last_part(written))
    if flag is not None:
        if not isinstance(value, bool):
            raise BadInput(f"{written} is {brief(str(value))}", "use true or false")
        return flag[value]
    if key not in _NAMES or not isinstance(value, str | bool | None):
        return value
    return _NAMES[key].get(str(value).lower().removeprefix("torch."), value)


def _last_part(written: str) -> str:
    return written.lower().split(".")[-1]


def settle(assignments: Iterable[Assignment]) -> tuple[dict[str, Assignment], list[BadInput]]:
    """One assignment per canonical key; two that contradict each other are a problem."""
    by_key: dict[str, dict[str, Assignment]] = {}
    for item in assignments:  # the same word twice: the last one wins, as in a shell
        by_key.setdefault(item.key, {})[item.written] = item
    chosen: dict[str, Assignment] = {}
    problems = []
    for key, items in by_key.items():
        first, *others = _weighed(list(items.values()))
        chosen[key] = others[-1] if others else first
        other = next((item for item in others if item.value != first.value), None)
        if other is not None:
            both = f"{first.word} and {other.word} set the same key {key}"
            problems.append(BadInput(both, f"give {key} once"))
    return chosen, problems


def _weighed(items: list[Assignment]) -> list[Assignment]:
    """The items that count: mixed precision is said by up to three switches together.

    enable_amp says whether and amp_dtype which; fp16 and bf16 that are false leave it to the other.
    """
    named = {_last_part(item.written): item for item in items}
    if {"enable_amp", "amp_dtype"} <= named.keys() and named["enable_amp"].value == "off":
        items = [item for item in items if _last_part(item.written) != "amp_dtype"]
    halves = [item.value for item in items if item.value in _HALVES]
    return [item for item in items if not any(_leaves_to(item, half) for half in halves)]


def _leaves_to(item: Assignment, half: str) -> bool:
    """Tell if the item is a switch that leaves the choice to another, which chose `half`."""
    name = _last_part(item.written)
    if name == "enable_amp":
        return bool(item.value == "auto")
    denied = name.removeprefix("use_")
    return item.value == "off" and denied in _HALVES and denied != half
