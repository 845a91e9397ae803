"""Receipts: the settings that a plan asks for against the evidence of a step.

RUN/evidence.json    evidence of the profiled step, written by the engine
RUN/receipt.json     requested against observed, written by the job
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trainfit.core.errors import BadInput, TrainfitWarning, reason
from trainfit.core.plan_records import Plan
from trainfit.core.records import Receipt, ReceiptItem, Scalar
from trainfit.core.settings import SETTINGS
from trainfit.measuring import verdicts
from trainfit.measuring.trace import Evidence
from trainfit.measuring.verdicts import OFF, ON_GPU, Judgement

EVIDENCE = "evidence.json"
RECEIPT = "receipt.json"
PLAN = "plan.json"
_GRAPH_MODES = ("reduce-overhead", "max-autotune")


class ReceiptRule(NamedTuple):
    """An item of the receipt."""

    title: str
    judge: Callable[[Scalar, Evidence], Judgement | str]
    elsewhere: str = ""
    """Reason why it does not apply without a GPU."""


VERDICTS = {
    "mixed_precision": ReceiptRule("Mixed Precision", verdicts.mixed_precision),
    "tf32": ReceiptRule("TensorFloat-32 (TF32)", verdicts.tf32, "it is a mode of NVIDIA GPUs"),
    "quantization": ReceiptRule("Quantized Weights", verdicts.quantization),
    "fused_optimizer": ReceiptRule("Fused Optimizer", verdicts.fused_optimizer),
    "optimizer": ReceiptRule("Optimizer", verdicts.optimizer),
    "offload_optimizer": ReceiptRule(
        "Moments on the Host", verdicts.offload, "there is no GPU to free"
    ),
    "attention": ReceiptRule("Attention Path", verdicts.attention),
    "attention_dropout": ReceiptRule("Attention Dropout", verdicts.attention_dropout),
    "flash_attention": ReceiptRule(
        "Flash Attention", verdicts.flash_attention, "its kernel is for GPUs"
    ),
    "compile": ReceiptRule("torch.compile", verdicts.compiled),
    "cuda_graphs": ReceiptRule("CUDA Graphs", verdicts.cuda_graphs, "they belong to GPUs"),
    "liger": ReceiptRule("Liger Kernels", verdicts.liger, "its kernels are for GPUs"),
    "sharding": ReceiptRule("Sharded Weights (FSDP2)", verdicts.sharding),
    "gradient_checkpointing": ReceiptRule("Gradient Checkpointing", verdicts.checkpointing),
    "offload_activations": ReceiptRule(
        "Activations on the Host", verdicts.offloading, "there is no GPU to take them from"
    ),
    "packing": ReceiptRule("Sequence Packing", verdicts.packing),
    "effective_batch": ReceiptRule("Effective Batch Size", verdicts.effective_batch),
    "gradient_accumulation": ReceiptRule("Gradient Accumulation", verdicts.accumulation),
    "gradient_clipping": ReceiptRule("Gradient Clipping", verdicts.clipping),
    "set_to_none": ReceiptRule("zero_grad(set_to_none=True)", verdicts.set_to_none),
    "workers": ReceiptRule("Loader Workers", verdicts.workers),
    "pinned_memory": ReceiptRule(
        "Pinned Memory", verdicts.pinned_memory, "nothing is copied to a GPU"
    ),
    "cudnn_benchmark": ReceiptRule(
        "cuDNN Benchmark Mode", verdicts.cudnn_benchmark, "cuDNN is for GPUs"
    ),
    "channels_last": ReceiptRule("Channels Last Memory Format", verdicts.channels_last),
    "expandable_segments": ReceiptRule("Expandable Segments", verdicts.expandable_segments),
    "deterministic": ReceiptRule("Deterministic Algorithms", verdicts.deterministic),
}
"""Verdicts in the order in which they are shown."""


def judge(name: str, requested: Scalar, seen: Evidence) -> ReceiptItem:
    """Make the receipt's item: not active where something was requested and is not so."""
    verdict = VERDICTS[name]
    elsewhere = verdict.elsewhere if seen.device != "cuda" else ""
    found = elsewhere or verdict.judge(requested, seen)
    if isinstance(found, str):
        return ReceiptItem(
            name=name, requested=requested, observed=None, status="not_applicable", evidence=found
        )
    right = requested == found.observed if found.right is None else found.right
    failed = requested not in OFF and not right
    on = found.observed not in OFF if found.on is None else found.on
    return ReceiptItem(
        name=name,
        requested=requested,
        observed=found.observed,
        status="not_active" if failed else "active" if on else "off",
        evidence=found.evidence,
        mend=found.fix if failed else "",
    )


def make_receipt(run: str, evidence: Evidence, wanted: Mapping[str, Scalar]) -> Receipt:
    """Judge every setting; for those not in `wanted` the request is unknown."""
    return Receipt(run=run, items=tuple(judge(n, wanted.get(n), evidence) for n in VERDICTS))


def wanted_by(plan: Plan, *, clips: bool | None = None) -> dict[str, Scalar]:
    """Settings that a plan asks for, by the names of the receipt; clipping is not in a plan."""
    # Where a plan leaves the kernel open, torch's choice is right.
    flash = plan.runtime.attention == "flash" or plan.attention == "varlen"
    requested = {row.receipt: row.of(plan) for row in SETTINGS if row.receipt}
    if plan.data_on_gpu:  # the loader's settings are for data on the host
        requested |= {"workers": ON_GPU, "pinned_memory": None}
    return requested | {
        "mixed_precision": "off" if plan.precision == "fp32" else plan.precision,
        "fused_optimizer": plan.optimizer.startswith("adamw_"),
        "flash_attention": flash or None,
        "cuda_graphs": plan.cuda_graph or (plan.compile and plan.compile_mode in _GRAPH_MODES),
        "gradient_clipping": clips,
        "set_to_none": True,
    }


def save_receipt(
    run: Path, plan: Plan, *, max_grad_norm: float | None = None, own_optimizer: bool = False
) -> Receipt | None:
    """Write the receipt of a run; None where no step was profiled.

    Damaged evidence, as of a resumed run, is only warned of.
    """
    path = run / EVIDENCE
    if not path.is_file():
        return None
    try:
        evidence = Evidence.load(path)
    except BadInput as error:
        warnings.warn(f"there is no receipt: {reason(error)}", TrainfitWarning, stacklevel=2)
        return None
    wanted = wanted_by(plan, clips=max_grad_norm is not None)
    if own_optimizer:  # the plan's was not used
        wanted |= {"fused_optimizer": None, "optimizer": None}
    receipt = make_receipt(str(run), evidence, wanted)
    receipt.save(run / RECEIPT, parents=False)
    return receipt


def read_receipt(run: Path) -> Receipt:
    """Read the receipt of a run; with folds, an item failed if it failed in one of them."""
    folds = sorted(run.glob("fold-*"), key=lambda path: (len(path.name), path.name))
    named = [(fold.name, found) for fold in folds if (found := _receipt(fold)) is not None]
    if named:
        return Receipt(run=str(run), items=_joined(named))
    if (found := _receipt(run)) is not None:
        return found
    fix = "train with training.profile_step=true for at least two steps"
    raise BadInput(f"{run} has no receipt: no step of it was profiled", fix)


def _receipt(folder: Path) -> Receipt | None:
    """Load the receipt of a folder, or judge its evidence by the plan of the run."""
    if (folder / RECEIPT).is_file():
        return Receipt.load(folder / RECEIPT)
    if not (folder / EVIDENCE).is_file():
        return None
    plan = (folder.parent if folder.name.startswith("fold-") else folder) / PLAN
    wanted = wanted_by(Plan.load(plan)) if plan.is_file() else {}
    return make_receipt(str(folder), Evidence.load(folder / EVIDENCE), wanted)


def _joined(named: Sequence[tuple[str, Receipt]]) -> tuple[ReceiptItem, ...]:
    """Take one item of each name: the first that failed, or else the first."""
    chosen: dict[str, tuple[str, ReceiptItem]] = {}
    for fold, receipt in named:
        for item in receipt.items:
            _, before = chosen.get(item.name, (fold, None))
            if before is None or (item.status == "not_active" and before.status != "not_active"):
                chosen[item.name] = fold, item
    first = named[0][0]
    return tuple(
        item if fold == first else replace(item, evidence=f"{fold}: {item.evidence}")
        for fold, item in chosen.values()
    )


_LIGHTNING_PACKAGES = ("lightning.", "pytorch_lightning.")
_LIGHTNING = {"bf16": "bf16", "16": "fp16", "32": "off"}


def visible_requests(optimizer: Any, loaders: Sequence[Any], seen: Evidence) -> dict[str, Scalar]:
    """Settings that a program visibly asks for, by the names of the receipt.

    Must be called from within the optimizer's step, since it looks for a trainer among the callers.
    """
    wanted: dict[str, Scalar] = {}
    fused = getattr(optimizer, "defaults", {}).get("fused")
    if fused is not None:
        wanted["fused_optimizer"] = bool(fused)
    if loaders:
        wanted["workers"] = int(getattr(loaders[-1], "_num_workers", 0))
        wanted["pinned_memory"] = bool(getattr(loaders[-1], "_pin_memory", False))
    if seen.compiler.attempts:  # torch.compile was called
        wanted["compile"] = True
    for caller in _callers():
        if (found := _of_transformers(caller) or _of_lightning(caller)) is not None:
            return wanted | found
    return wanted


def visible_framework() -> str:
    """Name the framework among the callers: transformers, lightning, accelerate, or torch alone."""
    found = "torch"
    for caller in _callers():
        if _is_a(caller, "Trainer", ("transformers.",)):
            return "transformers"
        if _is_a(caller, "Trainer", _LIGHTNING_PACKAGES):
            return "lightning"
        if _is_a(caller, "AcceleratedOptimizer", ("accelerate.",)):  # Trainer has one too
            found = "accelerate"
    return found


def _callers() -> Iterator[Any]:
    """Objects whose methods are running, the innermost first."""
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
    found = {r.receipt: getattr(asked, r.hf, None) for r in SETTINGS if r.receipt and r.hf}
    return found | {
        "mixed_precision": "bf16" if asked.bf16 else "fp16" if asked.fp16 else "off",
        "fused_optimizer": "fused" in str(asked.optim).lower(),
        "optimizer": None,  # transformers has names of its own
        "gradient_accumulation": asked.gradient_accumulation_steps,
        "gradient_clipping": bool(asked.max_grad_norm),
    }


def _of_lightning(caller: Any) -> dict[str, Scalar] | None:
    if not _is_a(caller, "Trainer", _LIGHTNING_PACKAGES):
        return None
    found: dict[str, Scalar] = {
        "gradient_accumulation": caller.accumulate_grad_batches,
        "gradient_clipping": bool(caller.gradient_clip_val),
    }
    precision = _LIGHTNING.get(str(caller.precision).partition("-")[0])
    return found if precision is None else found | {"mixed_precision": precision}
