"""The receipt: what a plan asked for against the evidence of a step.

RUN/evidence.json    what the profiled step showed, by the engine
RUN/receipt.json     requested against observed, by the job
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainfit.errors import BadInput, TrainfitWarning, reason
from trainfit.measuring import loading_verdicts as loading
from trainfit.measuring import verdicts
from trainfit.measuring.evidence import Evidence
from trainfit.records import Plan, Receipt, ReceiptItem, Scalar

EVIDENCE = "evidence.json"
RECEIPT = "receipt.json"
_GRAPH_MODES = ("reduce-overhead", "max-autotune")

VERDICTS: dict[str, verdicts.Verdict] = {
    "mixed_precision": verdicts.mixed_precision,
    "tf32": verdicts.tf32,
    "fused_optimizer": verdicts.fused_optimizer,
    "attention": verdicts.attention,
    "flash_attention": verdicts.flash_attention,
    "compile": verdicts.compiled,
    "cuda_graphs": verdicts.cuda_graphs,
    "liger": verdicts.liger,
    "gradient_checkpointing": verdicts.checkpointing,
    "packing": loading.packing,
    "effective_batch": loading.effective_batch,
    "gradient_accumulation": loading.accumulation,
    "gradient_clipping": loading.clipping,
    "set_to_none": loading.set_to_none,
    "workers": loading.workers,
    "pinned_memory": loading.pinned_memory,
    "cudnn_benchmark": loading.cudnn_benchmark,
    "channels_last": loading.channels_last,
    "expandable_segments": loading.expandable_segments,
    "deterministic": loading.deterministic,
}
"""In the order in which they are shown."""


def make_receipt(run: str, evidence: Evidence, wanted: Mapping[str, Scalar]) -> Receipt:
    """Judge everything; what is not in `wanted` is not known to have been asked for."""
    items = tuple(verdict(wanted.get(name), evidence) for name, verdict in VERDICTS.items())
    return Receipt(run=run, items=items)


def wanted_by(plan: Plan, *, max_grad_norm: float | None = None) -> dict[str, Scalar]:
    """What a plan asks for, by the names of the receipt."""
    runtime = plan.runtime
    # Where a plan leaves the kernel open, torch's choice is what was asked for.
    flash = runtime.attention == "flash" or plan.attention == "varlen"
    return {
        "mixed_precision": "off" if plan.precision == "fp32" else plan.precision,
        "tf32": runtime.tf32,
        "fused_optimizer": plan.optimizer == "adamw_fused",
        "attention": plan.attention,
        "flash_attention": flash or None,
        "compile": plan.compile,
        "cuda_graphs": plan.compile and plan.compile_mode in _GRAPH_MODES,
        "liger": plan.liger,
        "gradient_checkpointing": plan.gradient_checkpointing,
        "packing": plan.packed,
        "effective_batch": plan.effective_batch_size,
        "gradient_accumulation": plan.gradient_accumulation_steps,
        "gradient_clipping": max_grad_norm is not None,
        "set_to_none": True,
        "workers": plan.num_workers,
        "pinned_memory": plan.pin_memory,
        "cudnn_benchmark": runtime.cudnn_benchmark,
        "expandable_segments": runtime.expandable_segments,
        "deterministic": runtime.deterministic,
    }


def save_receipt(run: Path, plan: Plan, *, max_grad_norm: float | None = None) -> Receipt | None:
    """Write the receipt of a run that was looked at; None where no step was.

    Evidence that is damaged, as in a run that is gone on with, spoils no training.
    """
    path = run / EVIDENCE
    if not path.is_file():
        return None
    try:
        evidence = Evidence.load(path)
    except BadInput as error:
        warnings.warn(f"there is no receipt: {reason(error)}", TrainfitWarning, stacklevel=2)
        return None
    wanted = wanted_by(plan, max_grad_norm=max_grad_norm)
    receipt = make_receipt(str(run), evidence, wanted)
    receipt.save(run / RECEIPT, parents=False)
    return receipt


def read_receipt(run: Path) -> Receipt:
    """The receipt of a run; with folds, of all of them: what failed in one has failed."""
    folds = sorted(run.glob(f"fold-*/{RECEIPT}"), key=lambda path: (len(path.parts[-2]), path))
    if folds:
        named = [(path.parent.name, Receipt.load(path)) for path in folds]
        return Receipt(run=str(run), items=_joined(named))
    if (run / RECEIPT).is_file():
        return Receipt.load(run / RECEIPT)
    if (run / EVIDENCE).is_file():  # of a loop that had no plan
        return make_receipt(str(run), Evidence.load(run / EVIDENCE), {})
    raise BadInput(
        f"{run} has no receipt: no step of it was looked at",
        "train with training.profile_step=true for at least two steps",
    )


def _joined(named: Sequence[tuple[str, Receipt]]) -> tuple[ReceiptItem, ...]:
    """One item of each name: the first that failed, or else the first."""
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
