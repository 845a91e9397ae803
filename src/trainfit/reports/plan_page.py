"""A plan in a terminal: verdict, settings with reasons, memory, time; and ways to use many GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainfit.core.plan_records import MemoryEstimate, Plan, Reason, TimeEstimate, shown
from trainfit.core.settings import SETTINGS
from trainfit.planning.sharding import ClusterRow
from trainfit.reports import terminal
from trainfit.reports.model import Form
from trainfit.reports.model import shown as in_units

UNRECORDED = "not recorded on this architecture"
FIELDS = tuple(row.field for row in SETTINGS if row.field and "." not in row.field)
"""Settings that are a plan's own fields; each is shown, with its reason if it has one."""
_BAR = 24
_THOUSANDS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
_MOST_PARTS = 8
"""Micro-batches whose sequences are all written out."""


def plan_page(plan: Plan) -> RenderableType:
    """The page of `trainfit plan`; its first line says whether the run fits."""
    parts: list[RenderableType] = [_verdict(plan), *(Text(line, "dim") for line in about(plan))]
    parts += [Text(f"Assumed: {line}", "dim") for line in plan.assumptions]
    parts += ["", _settings(plan), *_unexplained(plan)]
    if plan.memory is not None:
        parts += ["", _memory(plan.memory)]
    if plan.time is not None:
        parts += ["", _time(plan.time, plan.workload.max_length > 1)]
    if plan.measurements:
        parts += ["", terminal.measured_table("Measured", plan.measurements)]
    if plan.advice:
        parts.append("")
    parts += [Text.assemble(("Advice: ", "bold yellow"), line) for line in plan.advice]
    return Group(*parts)


def _verdict(plan: Plan) -> Text:
    text = Text(plan.verdict())
    text.stylize("bold", 0, text.plain.rfind(": "))
    text.stylize("green" if plan.fits else "red", 0, text.plain.lower().index("fit") + 4)
    return text


def about(plan: Plan) -> list[str]:
    """Model, data and step of a plan, a line each."""
    load, own = plan.workload, plan.task.factory.endswith(":own_step")
    named = plan.task.arguments.get("name", "")
    weights = _parameters(plan)
    words = [f"{'Job' if own else 'Model'} {named}" if named else "", weights]
    stored = "" if plan.quantization == "none" else f" on {plan.quantization} weights"
    words += ["" if own else f"method {load.method}{stored}"]
    what = f"sequences of up to {load.max_length:,} tokens" if load.max_length > 1 else "samples"
    folds = "" if load.trainings == 1 else f" in each of {load.trainings} trainings"
    shown = f"{load.epochs:.3g}" if load.epochs < 100 else f"{load.epochs:,.0f}"
    epochs = f"{shown} {'epoch' if load.epochs == 1 else 'epochs'}{folds}"
    source = "" if plan.data is None else f" ({plan.data})"
    return [
        ", ".join(word for word in words if word),
        f"Data: {load.sequences:,} {what}{source}, {epochs}",
        f"Effective batch: {effective_batch(plan)}",
    ]


def _parameters(plan: Plan) -> str:
    """Count the parameters; without an estimate, say nothing."""
    if plan.memory is None or not (count := plan.memory.parameters):
        return ""
    about = "at most " if plan.memory.bound else ""
    size, unit = next((row for row in _THOUSANDS if count >= 0.9995 * row[0]), (1, ""))
    return f"{about}{count / size:.3g}{unit} parameters"


def effective_batch(plan: Plan) -> str:
    """The effective batch with its cut: as a product only where all parts are alike."""
    total, ranks = plan.effective_batch_size, plan.ranks
    parts = sorted(plan.step_parts, reverse=True)
    share = "" if ranks == 1 else f" over {ranks} ranks"
    if not parts or ranks * sum(parts) != total:
        count = plan.gradient_accumulation_steps
        return f"{total}{share}" + (f" in {count} micro-batches" if count > 1 else "")
    each = f", at most {plan.micro_batch_tokens:,} tokens each"
    over = "" if ranks == 1 else f"{ranks} ranks × "
    if len(parts) == 1:
        return f"{total}{share} at once" if ranks == 1 else f"{total} = {over}{parts[0]}"
    if len(set(parts)) == 1:
        cut = f"{len(parts)} × {parts[0]}"
    else:
        shown = [*map(str, parts)] if len(parts) <= _MOST_PARTS else [*map(str, parts[:3]), "…"]
        cut = " + ".join([*shown, *([str(parts[-1])] if len(parts) > _MOST_PARTS else [])])
        cut = cut if ranks == 1 else f"({cut})"
    return f"{total} = {over}{cut}" + (each if plan.workload.max_length > 1 else "")


def _settings(plan: Plan) -> Table:
    table = terminal.table("Settings")
    table.add_column("setting", no_wrap=True)
    table.add_column("value")
    table.add_column("why")
    for reason in plan.reasons:
        table.add_row(Text(reason.setting), Text(shown(reason.value), "bold"), _why(reason))
    return table


def _why(reason: Reason) -> Text:
    text = Text(reason.why)
    if reason.alternatives:
        text.append(f"\nnot: {'; '.join(reason.alternatives)}", "dim")
    return text


def _unexplained(plan: Plan) -> list[Text]:
    """Settings without a reason, so that every setting is on the page."""
    explained = {reason.setting.split(".")[-1] for reason in plan.reasons}
    rest = [name for name in FIELDS if name not in explained]
    text = ", ".join(f"{name} {shown(getattr(plan, name))}" for name in rest)
    return [Text(f"also: {text}", "dim")] if rest else []


def _memory(memory: MemoryEstimate) -> Table:
    parts = [
        ("weights", memory.weights_gib),
        *([("adapters", memory.adapters_gib)] if memory.adapters_gib else []),
        ("gradients", memory.gradients_gib),
        ("optimizer", memory.optimizer_gib),
        ("activations", memory.activations_gib),
        ("workspace", memory.workspace_gib),
    ]
    allocated, reserved = memory.peak_allocated_gib, memory.peak_reserved_gib
    together = "less than the sum: gradients come as activations go"
    title = "Memory in GiB, at most" if memory.bound else "Memory in GiB"
    table = terminal.table(title, ("part",), ("GiB",))
    table.add_column(f"of {memory.capacity_gib:.2f}")
    for name, size in parts:
        table.add_row(name, f"{size:.2f}", _bar(size, memory.capacity_gib, "cyan"))
    apart = sum(size for _, size in parts) - allocated
    table.add_row(
        Text("allocated at the peak", "bold"),
        Text(f"{allocated:.2f}", "bold"),
        Text(together if apart >= 0.005 else "", "dim"),
    )
    table.add_row(
        "reserve", f"{reserved - allocated:.2f}", _bar(reserved - allocated, memory.capacity_gib)
    )
    table.add_row(
        Text("reserved at the peak", "bold"),
        Text(f"{reserved:.2f}", "bold"),
        _bar(reserved, memory.capacity_gib, "green" if memory.fits else "red"),
    )
    left = memory.capacity_gib - reserved
    over = "given back in the run" if memory.fits else "missing"
    error = Text(
        "or more: an upper bound, nothing was simulated"
        if memory.bound
        else f"error {_error(memory) or UNRECORDED}",
        "dim",
    )
    table.add_row("headroom" if left >= 0 else over, f"{abs(left):.2f}", error)
    return table


def _bar(size: float, capacity: float, style: str = "cyan") -> ProgressBar:
    return ProgressBar(
        total=capacity,
        completed=min(max(size, 0.0), capacity),
        width=_BAR,
        complete_style=style,
        finished_style=style,
    )


def _time(time: TimeEstimate, sized: bool) -> RenderableType:
    rows: list[tuple[str, float | None, Form]] = [
        ("tokens/s", time.tokens_per_second, "count"),
        ("samples/s", time.samples_per_second, "number"),
        ("MFU", time.mfu, "percent"),
        ("step", time.step_seconds, "duration"),
        ("epoch", time.epoch_seconds, "duration"),
        ("total", time.total_seconds, "duration"),
    ]
    if time.job_seconds is not None:
        rows.append(("whole job", time.job_seconds, "duration"))
    rows = rows if sized else rows[1:]
    if all(value is None for _, value, _ in rows):
        return Text(f"Time: {UNRECORDED}")
    table = terminal.table("Time", ("", ""), show_header=False)
    for name, value, form in rows:
        table.add_row(name, UNRECORDED if value is None else in_units(value, form))
    if time.energy_kwh is not None:
        table.add_row("energy", f"{time.energy_kwh:,.2f} kWh")
    if time.cost is not None:
        table.add_row("cost", f"{time.cost:,.2f}")
    table.add_row("error", _error(time) or UNRECORDED)
    return table


def _error(estimate: MemoryEstimate | TimeEstimate) -> str:
    return "" if estimate.error_percent is None else f"± {estimate.error_percent:.1f}%"


_UNKNOWN = "–"
_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("fits", "left"),
    ("type", "left"),
    ("batch", "right"),
    ("ckpt", "left"),
    ("peak of GiB", "right"),
    ("samples/s", "right"),
    ("total", "right"),
    ("±", "right"),
)
_CHECKPOINTING = {"none": _UNKNOWN, "selective": "part", "full": "full"}
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (0.001, "ms"))


def comparison(rows: Iterable[tuple[str, Plan]]) -> Table:
    """Table of the plans for many GPUs, ranked."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("GPU", overflow="fold")  # the one that may take two lines
    for heading, justify in _COLUMNS:
        table.add_column(heading, justify=justify, no_wrap=True)
    for slug, plan in ranked(rows):
        table.add_row(*_compared(slug, plan), style="" if plan.fits else "dim")
    return table


def comparison_data(rows: Iterable[tuple[str, Plan]]) -> list[dict[str, Any]]:
    """The rows of `comparison` as data for a program, in the same order."""
    return [
        {
            "gpu": slug,
            "memory_gib": plan.memory.capacity_gib if plan.memory else None,
            "fits": plan.fits,
            "precision": plan.precision,
            "batch_size": plan.batch_size,
            "gradient_accumulation_steps": plan.gradient_accumulation_steps,
            "gradient_checkpointing": plan.gradient_checkpointing,
            "peak_reserved_gib": plan.memory.peak_reserved_gib if plan.memory else None,
            "memory_error_percent": plan.memory.error_percent if plan.memory else None,
            "samples_per_second": plan.time.samples_per_second if plan.time else None,
            "total_seconds": plan.time.total_seconds if plan.time else None,
            "time_error_percent": plan.time.error_percent if plan.time else None,
        }
        for slug, plan in ranked(rows)
    ]


def ranked(rows: Iterable[tuple[str, Plan]]) -> list[tuple[str, Plan]]:
    """Sort plans: fitting before others, then the fastest first, unknown speed last by name."""

    def order(row: tuple[str, Plan]) -> tuple[bool, float, str]:
        speed = row[1].time.samples_per_second if row[1].time else None
        return not row[1].fits, -(speed or 0.0), row[0]

    return sorted(rows, key=order)


def _compared(slug: str, plan: Plan) -> list[str | Text]:
    memory, time = plan.memory, plan.time
    peak = _UNKNOWN
    if memory is not None:
        peak = f"{memory.peak_reserved_gib:.1f} of {memory.capacity_gib:.1f}"
    return [
        Text(slug),
        "yes" if plan.fits else "no",
        plan.precision,
        _batch(plan),
        _CHECKPOINTING[plan.gradient_checkpointing],
        peak,
        *([_UNKNOWN] * 3 if time is None else _speed(time)),
    ]


def _batch(plan: Plan) -> str:
    """A product where it is exact, else the whole and its parts."""
    size, count = plan.batch_size, plan.gradient_accumulation_steps
    exact = size * count * plan.ranks == plan.effective_batch_size
    return f"{size} × {count}" if exact else f"{plan.effective_batch_size} in {count}"


def _speed(time: TimeEstimate) -> list[str]:
    samples, total, error = time.samples_per_second, time.total_seconds, time.error_percent
    return [
        _UNKNOWN if samples is None else f"{samples:,.1f}",
        _UNKNOWN if total is None else _short(total),
        _UNKNOWN if error is None else f"{error:.0f}%",
    ]


def _short(seconds: float) -> str:
    """A time in one unit, for a narrow column."""
    size, unit = next((row for row in _UNITS if seconds >= row[0]), _UNITS[-1])
    return f"{seconds / size:,.1f} {unit}"


_NOTE = (
    "Sent per rank and step, by formula; times at the full rate of the links, hidden behind what "
    "is computed meanwhile: not measured on several GPUs. Largest: with this model's activations."
)


def cluster_page(rows: Sequence[ClusterRow], gpus: str, link: str) -> RenderableType:
    """Return the table with a title and a line on omitted rows."""
    table = Table(box=None, pad_edge=False)
    network = any(row.network_gbits for row in rows)
    names = ("sharding", "peak GiB", "fits", "largest", "sent GiB", "takes", "step", "efficiency")
    for name in (*names, *(["between machines"] if network else [])):
        table.add_column(name, justify="left" if name == "sharding" else "right")
    for row in rows:
        cells = [
            row.sharding,
            _number(row.memory_gib, "{:.1f}"),
            "yes" if row.fits else "no",
            _number(row.largest_billions, "{:.3g}B"),
            _number(row.sent_gib, "{:.3g}"),
            _number(row.link_seconds, "{:.4f} s"),
            _number(row.step_seconds, "{:.4f} s"),
            _number(row.efficiency, "{:.0%}"),
        ]
        if row.network_gbits:
            cells.append(f"{row.network_gbits} Gbit/s")
        table.add_row(*cells)
    return Group("", Text(f"{gpus}, {link}", "bold"), table, Text(_NOTE, "dim"))


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else form.format(value)
