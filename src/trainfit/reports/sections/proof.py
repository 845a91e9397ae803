"""What was really active, what each optimization gave, and what happened on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainfit.reports.figures import Block, Interval, Intervals, Remark, Section, Table
from trainfit.reports.numbers import MISSING, cell, shown
from trainfit.reports.run_data import Run, number

_STATUS = {
    "active": "active",
    "not_active": "NOT ACTIVE",
    "off": "off",
    "not_applicable": "not applicable",
}
_MOST_EVENTS = 200


def receipt_section(run: Run) -> Section | None:
    """Requested against observed, where the run has a receipt; what failed stands first."""
    if run.receipt is None:
        return None
    order = list(_STATUS)
    items = sorted(run.receipt.items, key=lambda item: (item.status != "not_active",))
    rows = tuple(
        (
            item.name,
            _STATUS[item.status],
            cell(item.requested),
            cell(item.observed),
            item.evidence,
            item.mend,
        )
        for item in items
    )
    counts = {status: sum(i.status == status for i in items) for status in order}
    said = ", ".join(f"{n} {_STATUS[s].lower()}" for s, n in counts.items() if n)
    columns = ("optimization", "status", "requested", "observed", "evidence", "mend")
    failed = tuple(at for at, item in enumerate(items) if item.status == "not_active")
    return Section(
        id="receipt",
        title="Receipt",
        blocks=(
            Remark(text=f"{said}.", tone="warning" if failed else "plain"),
            Table(columns=columns, rows=rows, strong=failed),
        ),
    )


def ladder_section(run: Run) -> Section | None:
    """What each optimization gave, where the run has a ladder.json.

    Its `steps` are in order, each with `name`, `samples_per_second` as value, low and high,
    `peak_memory_gib`, and a `note` where it was not measured.
    """
    steps: list[Mapping[str, Any]] = list(run.ladder.get("steps") or ())
    if not steps:
        return None
    rows = tuple(_step(step, color=at) for at, step in enumerate(steps))
    first = next((row.value for row in rows if row.value), None)
    speed = Intervals(
        id="ladder",
        title="Samples per second, one optimization after another",
        rows=tuple(rows),
        bars=True,
    )
    table = Table(
        columns=("optimization", "samples/s", "speed-up", "peak memory", "note"),
        rows=tuple(
            (
                row.label,
                shown(row.value, "number"),
                f"{row.value / first:.2f}×" if row.value and first else MISSING,
                shown(number(step.get("peak_memory_gib")), "gib"),
                str(step.get("note") or ""),
            )
            for row, step in zip(rows, steps, strict=True)
        ),
    )
    return Section(id="ladder", title="Ladder", blocks=(speed, table))


def _step(step: Mapping[str, Any], color: int) -> Interval:
    rate = step.get("samples_per_second")
    values = (
        [number(rate.get(name)) for name in ("value", "low", "high")]
        if isinstance(rate, Mapping)
        else [number(rate), math.nan, math.nan]
    )
    value, low, high = (v if math.isfinite(v) else None for v in values)
    return Interval(label=str(step.get("name")), value=value, low=low, high=high, color=color % 8)


def events_section(run: Run) -> Section:
    """Everything that happened, in order."""
    rows = [
        (part.name, event.step, shown(event.seconds, "duration"), event.kind, event.text)
        for part in run.parts
        for event in part.events
    ]
    if not rows:
        return Section(
            id="events",
            title="Events",
            blocks=(Remark(text="Nothing out of the ordinary happened."),),
        )
    table = Table(
        columns=("", "step", "after", "event", "what"),
        rows=tuple(rows[:_MOST_EVENTS]),
        strong=tuple(at for at, row in enumerate(rows) if row[3] in ("oom", "failed")),
    )
    left = len(rows) - _MOST_EVENTS
    more: tuple[Block, ...] = (Remark(text=f"{left:,} more in train.log."),) if left > 0 else ()
    return Section(id="events", title="Events", blocks=(table, *more))
