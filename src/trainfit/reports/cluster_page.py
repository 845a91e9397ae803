"""Table of the ways to train on several GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainfit.planning.communication import ClusterRow

_NOTE = (
    "Sent per rank and step, by formula; times at the full rate of the links, hidden behind what "
    "is computed meanwhile: not measured on several GPUs. Largest: with this model's activations."
)


def cluster_page(rows: Sequence[ClusterRow], gpus: str, link: str) -> RenderableType:
    """Return the table with a title and what it leaves out."""
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
