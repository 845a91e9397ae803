"""What a program that is not trainfit's visibly asked for: its trainer's arguments, its loader.

This is the one side of a receipt; the evidence knows nothing of it. What is not visible is left
out, and nothing is held against the program for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from trainfit.measuring.evidence import Evidence
from trainfit.records import Scalar

_LIGHTNING = {"bf16": "bf16", "16": "fp16", "32": "off"}


def visible_wishes(optimizer: Any, loaders: Sequence[Any], seen: Evidence) -> dict[str, Scalar]:
    """By the names of the receipt. To be called from the optimizer's step: it looks who called."""
    wanted: dict[str, Scalar] = {}
    fused = getattr(optimizer, "defaults", {}).get("fused")
    if fused is not None:
        wanted["fused_optimizer"] = bool(fused)
    if loaders:
        wanted["workers"] = int(getattr(loaders[-1], "_num_workers", 0))
        wanted["pinned_memory"] = bool(getattr(loaders[-1], "_pin_memory", False))
    if seen.compiler.attempts:  # somebody called torch.compile
        wanted["compile"] = True
    for caller in _callers():
        if (found := _of_transformers(caller) or _of_lightning(caller)) is not None:
            return wanted | found
    return wanted


def _callers() -> Iterator[Any]:
    """The objects whose methods are being run, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None:
            yield owner
        if frame.f_back is None:
            return
        frame = frame.f_back


def _is_a(value: Any, name: str, packages: tuple[str, ...]) -> bool:
    kinds = type(value).__mro__
    return any(k.__name__ == name and k.__module__.startswith(packages) for k in kinds)


def _of_transformers(caller: Any) -> dict[str, Scalar] | None:
    if not _is_a(caller, "Trainer", ("transformers.",)):
        return None
    asked = caller.args
    return {
        "mixed_precision": "bf16" if asked.bf16 else "fp16" if asked.fp16 else "off",
        "tf32": asked.tf32,
        "fused_optimizer": "fused" in str(asked.optim).lower(),
        "gradient_checkpointing": bool(asked.gradient_checkpointing),
        "compile": bool(asked.torch_compile),
        "gradient_accumulation": asked.gradient_accumulation_steps,
        "gradient_clipping": bool(asked.max_grad_norm),
        "workers": asked.dataloader_num_workers,
        "pinned_memory": bool(asked.dataloader_pin_memory),
    }


def _of_lightning(caller: Any) -> dict[str, Scalar] | None:
    packages = ("lightning.", "pytorch_lightning.")
    if not _is_a(caller, "Trainer", packages):
        return None
    found: dict[str, Scalar] = {
        "gradient_accumulation": caller.accumulate_grad_batches,
        "gradient_clipping": bool(caller.gradient_clip_val),
    }
    precision = _LIGHTNING.get(str(caller.precision).partition("-")[0])
    return found if precision is None else found | {"mixed_precision": precision}
