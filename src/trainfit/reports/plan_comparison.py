"""Plans for many GPUs beside each other, as a table and as data: `trainfit plan --gpu all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from trainfit.records import Plan, TimeEstimate

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
    """The plans for many GPUs: those that fit first, and of these the fastest first."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("GPU", overflow="fold")  # the one that may take two lines
    for heading, justify in _COLUMNS:
        table.add_column(heading, justify=justify, no_wrap=True)
    for slug, plan in ranked(rows):
        table.add_row(*_compared(slug, plan), style="" if plan.fits else "dim")
    return table


def comparison_data(rows: Iterable[tuple[str, Plan]]) -> list[dict[str, Any]]:
    """What `comparison` shows, as plain data for a program, in the same order."""
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
    """Those that fit first, then the fastest first; of unknown speed last, by name."""

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
        f"{plan.batch_size} × {plan.gradient_accumulation_steps}",
        _CHECKPOINTING[plan.gradient_checkpointing],
        peak,
        *([_UNKNOWN] * 3 if time is None else _speed(time)),
    ]


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
