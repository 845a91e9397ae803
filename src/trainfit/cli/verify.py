"""`trainfit verify`: settings that were really active; `trainfit run`: a script made faster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainfit.core import codec
from trainfit.core.errors import BadInput, redact, redact_words
from trainfit.core.files import write_output
from trainfit.core.records import Receipt
from trainfit.runs import run_folder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainfit.measuring.observe import Observed
    from trainfit.measuring.trace import Evidence
    from trainfit.measuring.what_if import WhatIf


class WithCommand(click.Command):
    """Keeps the words after -- apart: they are a command, not options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, words = args, None
        if "--" in args:
            at = args.index("--")
            own, words = args[:at], args[at + 1 :]
        rest = super().parse_args(ctx, own)
        ctx.params["words"] = words
        return rest


@click.command(cls=WithCommand)
@click.argument("run", required=False)
@click.option("--strict", is_flag=True, help="Exit with 1 where something requested is not active.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for a program.")
@click.option("--markdown", is_flag=True, help="Print the status report as Markdown.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write there instead of printing.",
)
def command(
    run: str | None,
    strict: bool,
    as_json: bool,
    markdown: bool,
    output: Path | None,
    words: list[str] | None,
) -> int:
    """Show which settings were really active, by evidence of a step.

    RUN is the folder of a run, or its name under runs/. Or give a training command of your own:
    trainfit verify -- python train.py …; it runs as it is, and its exit code is kept. With --json
    or --markdown its own output goes to the standard error.
    """
    if as_json and markdown:
        raise BadInput("--json and --markdown were both given", "give one of them")
    if (run is None) == (words is None):
        raise BadInput("verify takes a run or a command", "give RUN, or -- and a command")
    code, verified = 0, None
    if words is not None:
        code, verified = _observe(words, quiet=(as_json or markdown) and output is None)
    else:
        verified = of_run(run_folder.find(str(run)))
    if verified is None:
        return code or 1
    text: Any = None
    if as_json:
        text = codec.for_programs(receipt_data(verified)) + "\n"
    elif markdown:
        text = status_report(verified)
    _show(verified, text, output)
    failed = any(item.status == "not_active" for item in verified.receipt.items)
    return code or int(strict and failed)


def _show(verified: Verified, text: str | None, output: Path | None) -> None:
    from trainfit.reports import terminal

    if output is not None:
        write_output(output, text if text is not None else status_report(verified))
        click.echo(output)
    elif text is not None:
        click.echo(text, nl=False)
    else:
        terminal.console().print(receipt_table(verified))


def _observe(words: list[str], *, quiet: bool) -> tuple[int, Verified | None]:
    from trainfit.measuring.observe import run_observed

    if not words:
        raise BadInput("there is no command after --", "give one, as in: python train.py")
    code, seen = run_observed(words, sys.stderr if quiet else None)
    if seen is None or seen.receipt is None:
        why = seen.obstacle if seen else "no Python of the command made an optimizer step of torch"
        print(f"trainfit: nothing to verify: {redact(why)}", file=sys.stderr)
        return code, None
    return code, of_command(" ".join(redact_words(words)), seen)


@click.command(cls=WithCommand)
@click.option("--only", multiple=True, metavar="NAME", help="Make this change alone; may repeat.")
@click.option("--without", multiple=True, metavar="NAME", help="Leave this change out; may repeat.")
@click.option("--dry-run", is_flag=True, help="End where the training would begin.")
@click.argument("stray", nargs=-1, metavar="")
def run(
    only: tuple[str, ...],
    without: tuple[str, ...],
    dry_run: bool,
    stray: tuple[str, ...],
    words: list[str] | None,
) -> int:
    """Run a training script of your own faster, with the same losses.

    trainfit run -- python train.py …: trainers of transformers, sentence-transformers, Lightning
    and Accelerate compute nothing on padding (unpadded), replay passes as CUDA graphs (graphs) of
    compiled blocks (compile) and take AdamW's fused kernel (fused). TF32 (tf32) rounds differently
    and must be named with --only. The exit code is the script's.
    """
    from trainfit.integrations.script_hooks import chosen, run_sped_up

    if stray:
        raise BadInput(f"{stray[0]!r} is not after --", "give -- before the command")
    if not words:
        raise BadInput("there is no command to run", "give -- and one, as in: -- python train.py")
    names = chosen(only or None, without)
    code, found = run_sped_up(words, names, dry_run=dry_run)
    said = "trainfit: nothing changed: no training of a known trainer was seen"
    print(said if found is None else found.line(), file=sys.stderr)
    return code


# ── pages of a receipt: a table in the terminal, and the status report as Markdown ───────────────

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
    from trainfit.measuring.receipt import EVIDENCE, read_receipt
    from trainfit.measuring.trace import Evidence

    receipt = read_receipt(folder)
    found = [folder / EVIDENCE, *sorted(folder.glob(f"fold-*/{EVIDENCE}"))]
    paths = [path for path in found if path.is_file()]
    evidence = Evidence.load(paths[0]) if paths else None
    return Verified(receipt=receipt, evidence=evidence, figures=_figures(folder))


def of_command(command: str, seen: Observed) -> Verified:
    from trainfit.measuring.machine_rates import remembered_rates
    from trainfit.measuring.what_if import what_if

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


def receipt_data(verified: Verified) -> dict[str, Any]:
    """Data of a receipt for --json."""
    encoded: dict[str, Any] = codec.encode(verified.receipt)
    return encoded | {
        "figures": verified.figures,
        "evidence": codec.encode(verified.evidence),
        "what_if": codec.encode(list(verified.what_if)),
    }


def receipt_table(verified: Verified) -> RenderableType:
    """Table for a terminal, with failed items first."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from trainfit.reports.model import cell

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


def status_report(verified: Verified) -> str:
    """Status report: active and inactive settings, metrics, recommendations by priority."""
    from jinja2 import Environment, StrictUndefined

    from trainfit.measuring.receipt import VERDICTS
    from trainfit.reports.model import cell

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
        title=lambda name: VERDICTS[name].title if name in VERDICTS else name,
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


_METRICS = (
    ("steps_per_second", "Iterations/sec", "{:.2f} it/s"),
    ("samples_per_second", "Samples/sec", "{:.1f}"),
    ("utilisation_percent", "GPU Utilization", "{:.0f}%"),
    ("mfu", "MFU", "{:.1%}"),
    ("memory_gib", "Peak memory", "{:.2f} GiB"),
    ("wait_share", "Waiting for data", "{:.1%} of the time"),
)


def _medium(verified: Verified) -> Iterator[tuple[str, str]]:
    """Advice on slow parts of the step, by the figures of this run."""
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
