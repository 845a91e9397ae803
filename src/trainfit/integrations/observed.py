"""What was asked of another trainer against what was seen: the items of a receipt."""

from __future__ import annotations

from typing import Any, Literal

import torch

from trainfit.integrations.meter import Meter
from trainfit.records import ReceiptItem, Scalar

Status = Literal["active", "not_active", "off", "not_applicable"]
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "off"}


def item(
    name: str, requested: Scalar, observed: Scalar, evidence: str, mend: str = ""
) -> ReceiptItem:
    """One setting; the mend is for one that was asked for and not seen."""
    off = (None, False, "off")
    status: Status = "not_active"
    if requested in off:
        status = "off" if observed in off else "active"
    elif requested == observed:
        status = "active"
    elif observed is None:
        status = "not_applicable"
    return ReceiptItem(
        name=name,
        requested=requested,
        observed=observed,
        status=status,
        evidence=evidence,
        mend=mend if status == "not_active" else "",
    )


def mixed_precision(requested: str, meter: Meter) -> ReceiptItem:
    """By the dtype of a product inside the model."""
    seen, autocast = meter.product_dtype, meter.autocast_dtype
    if seen is None:
        return item("mixed_precision", requested, None, "no product was looked at")
    evidence = f"the first product gave {_plain(seen)}, autocast {_plain(autocast) or 'off'}"
    mend = "set bf16 where it is native, else fp16 with loss scaling"
    return item("mixed_precision", requested, _NAMES.get(seen, "off"), evidence, mend)


def tf32(requested: bool | None) -> ReceiptItem:
    """By torch's own switch, where there is a GPU that could."""
    if not torch.cuda.is_available():
        return item("tf32", requested, None, "there is no CUDA device")
    precision = torch.get_float32_matmul_precision()
    evidence = f"torch's matrix products in fp32 are set to {precision}"
    return item("tf32", bool(requested), precision != "highest", evidence, "tf32=True")


def fused_optimizer(requested: bool, optimizer: Any) -> ReceiptItem:
    """By the optimizer's own groups."""
    groups = getattr(optimizer, "param_groups", None) or [{}]
    fused = bool(groups[0].get("fused"))
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    return item(
        "fused_optimizer", requested, fused, f"{kind} with fused={fused}", "optim=adamw_torch_fused"
    )


def checkpointing(requested: bool, model: Any) -> ReceiptItem:
    """By the model's own word."""
    on = bool(getattr(model, "is_gradient_checkpointing", False))
    mend = "model.gradient_checkpointing_enable()"
    return item("gradient_checkpointing", requested, on, f"the model says {on}", mend)


def compiled(requested: bool, graphs: int) -> ReceiptItem:
    """By the graphs that torch has compiled during the run."""
    return item("compile", requested, graphs > 0, f"{graphs} graphs compiled", "torch_compile=True")


def _plain(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")
