"""What was really active, and what happened on the way."""

from __future__ import annotations

from trainfit.reports.figures import Block, Remark, Section, Table
from trainfit.reports.numbers import cell, shown
from trainfit.reports.run_data import Run

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
