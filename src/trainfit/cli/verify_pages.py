"""Pages of a receipt: a table in the terminal, and the status report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.core import codec
from trainfit.core.records import Receipt
from trainfit.measuring.machine_rates import remembered_rates
from trainfit.measuring.observe import Observed
from trainfit.measuring.receipt import EVIDENCE, read_receipt
from trainfit.measuring.trace import Evidence
from trainfit.measuring.verdicts import VERDICTS
from trainfit.measuring.what_if import WhatIf, what_if
from trainfit.reports.model import cell

if TYPE_CHECKING:
    from rich.console import RenderableType

_STATUS = {
    "not_active": ("NOT ACTIVE", "bold red"),
    "active": ("active", "green"),
    "off": ("off", "dim"),
    "not_applicable": ("not applicable", "dim"),
}
_MUCH_PADDING = 0.1
_MUCH_WAITING = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """A receipt with its evidence and figures."""

    receipt: Receipt
    evidence: Evidence | None
    figures: dict[str, float] = field(default_factory=dict)
    """steps_per_second, samples_per_second, utilisation_percent, memory_gib, wait_share, mfu."""
    what_if: tuple[WhatIf, ...] = ()
    """Missing optimizations of a command, the largest estimated gain first."""


def of_run(folder: Path) -> Verified:
    """Read the receipt of a run; figures are medians of its log."""
    receipt = read_receipt(folder)
    found = [folder / EVIDENCE, *sorted(folder.glob(f"fold-*/{EVIDENCE}"))]
    paths = [path for path in found if path.is_file()]
    evidence = Evidence.load(paths[0]) if paths else None
    return Verified(receipt=receipt, evidence=evidence, figures=_figures(folder))


def of_command(command: str, seen: Observed) -> Verified:
    """Receipt of an observed command."""
    assert seen.receipt is not None
    rate, evidence = seen.steps_per_second, seen.evidence
    figures = {"steps_per_second": seen.steps_per_second, "memory_gib": seen.peak_memory_gib}
    return Verified(
        receipt=Receipt(run=command, items=seen.receipt.items),
        evidence=evidence,
        figures={name: value for name, value in figures.items() if value is not None},
        what_if=()
        if evidence is None
        else what_if(
            evidence,
            step_seconds=1 / rate if rate else None,
            framework=seen.framework,
            memory_share=seen.memory_share,
            padding_share=seen.padding_share,
            rates=remembered_rates(evidence.device_name),
        ),
    )


def _figures(folder: Path) -> dict[str, float]:
    import numpy as np

    from trainfit.runs.reader import read_run, settled

    part = read_run(folder).parts[0]
    first = next(iter(part.gpus.values()), {})
    figures: dict[str, float] = {}
    for name in ("samples_per_second", "wait_share", "mfu", "step_seconds", "memory_gib"):
        if (values := settled(part.train, name)).size:
            figures[name] = float(values.max() if name == "memory_gib" else np.median(values))
    if (values := settled(first, "utilisation_percent")).size:
        figures["utilisation_percent"] = float(np.median(values))
    if seconds := figures.pop("step_seconds", 0.0):
        figures["steps_per_second"] = 1.0 / seconds
    return figures


def data(verified: Verified) -> dict[str, Any]:
    """Data of a receipt for --json."""
    encoded: dict[str, Any] = codec.encode(verified.receipt)
    return encoded | {
        "figures": verified.figures,
        "evidence": codec.encode(verified.evidence),
        "what_if": codec.encode(list(verified.what_if)),
    }


def table(verified: Verified) -> RenderableType:
    """Table for a terminal, with failed items first."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("optimization", "status", "requested", "observed", "evidence"):
        grid.add_column(column, style=None if column != "evidence" else "dim")
    items = sorted(verified.receipt.items, key=lambda i: list(_STATUS).index(i.status))
    for item in items:
        word, style = _STATUS[item.status]
        said = item.evidence + (f"\n→ {item.mend}" if item.mend else "")
        shown = (cell(item.requested), cell(item.observed), said)
        grid.add_row(item.name, Text(word, style), *(Text(text) for text in shown))
    parts: list[RenderableType] = [f"Receipt of {verified.receipt.run}", grid]
    if verified.what_if:
        parts.append("\nWould make steps faster, by estimates from the profiled step:")
        parts += [Text(f"  {one.line()}") for one in verified.what_if]
    return Group(*parts, verified.receipt.verdict())


# ── Markdown ──────────────────────────────────────────────────────────────────────────────────

_MARKS = {
    "active": "✅ ACTIVE",
    "not_active": "❌ NOT ACTIVE",
    "off": "⚠️ OFF",
    "not_applicable": "➖ NOT APPLICABLE",
}


def markdown(verified: Verified) -> str:
    """Status report: active and inactive settings, metrics, recommendations by priority."""
    from jinja2 import Environment, StrictUndefined

    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(undefined=StrictUndefined, **options)  # type: ignore[arg-type]
    environment.filters["word"] = cell
    text = Path(__file__).with_name("status_report.md.j2").read_text(encoding="utf-8")
    receipt, figures = verified.receipt, verified.figures
    items = sorted(receipt.items, key=lambda item: list(_STATUS).index(item.status))
    return environment.from_string(text).render(
        today=date.today().isoformat(),
        receipt=receipt,
        evidence=verified.evidence,
        items={
            "✅ ENABLED OPTIMIZATIONS": [i for i in items if i.status == "active"],
            "⚠️ DISABLED/NOT ACTIVE OPTIMIZATIONS": [i for i in items if i.status != "active"],
        },
        marks=_MARKS,
        title=_title,
        metrics={title: form.format(figures[n]) for n, title, form in _METRICS if n in figures},
        improvements={
            "Estimated gain": [
                (one.name, one.line().partition(": ")[2]) for one in verified.what_if
            ],
            "High Priority": [(item.name, item.mend) for item in receipt.items if item.mend],
            "Medium Priority": list(_medium(verified)),
            "Low Priority (Optional)": list(_low(verified)),
        },
    )


def _title(name: str) -> str:
    return VERDICTS[name].title if name in VERDICTS else name


_METRICS = (
    ("steps_per_second", "Iterations/sec", "{:.2f} it/s"),
    ("samples_per_second", "Samples/sec", "{:.1f}"),
    ("utilisation_percent", "GPU Utilization", "{:.0f}%"),
    ("mfu", "MFU", "{:.1%}"),
    ("memory_gib", "Peak memory", "{:.2f} GiB"),
    ("wait_share", "Waiting for data", "{:.1%} of the time"),
)


def _medium(verified: Verified) -> Iterator[tuple[str, str]]:
    """Advice on what costs time, by the figures of this run."""
    evidence, off = verified.evidence, _off(verified.receipt)
    padding = evidence.batches.padding_share if evidence else None
    if "packing" in off and padding is not None and padding > _MUCH_PADDING:
        yield "packing", f"{padding:.0%} of what is computed is padding; pack sequences"
    waiting = verified.figures.get("wait_share")
    if waiting is None and evidence is not None:
        waiting = evidence.batches.waited_share
    if waiting is not None and waiting > _MUCH_WAITING:
        yield "workers", f"{waiting:.0%} of the time is spent waiting for data; add workers"
    fp32 = evidence.products.shares.get("fp32", 0.0) if evidence else 0.0
    if "mixed_precision" in off and evidence and evidence.device == "cuda" and fp32 > 0.5:
        yield "mixed_precision", "bf16 where it is native, else fp16 with loss scaling"
    if "tf32" in off and fp32 > 0.0:
        yield "tf32", f"{fp32:.0%} of the products are in fp32, which TF32 makes faster"
    for name in ("fused_optimizer", "pinned_memory"):
        if name in off:
            yield name, "cheap to turn on"


def _low(verified: Verified) -> Iterator[tuple[str, str]]:
    off = _off(verified.receipt)
    if "compile" in off:
        yield "compile", "worth a try for a long run, where it pays its minutes back"
    if "gradient_checkpointing" in off:
        yield "gradient_checkpointing", "only where memory is short: it takes about a third longer"
    if "set_to_none" in off:
        yield "set_to_none", "saves a pass over the gradients"


def _off(receipt: Receipt) -> set[str]:
    return {item.name for item in receipt.items if item.status == "off"}
