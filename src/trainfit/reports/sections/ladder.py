"""What each optimization gave, where the run has a ladder.json of `trainfit tune --ladder`.

The file may be another program's: `steps` with `name` and `samples_per_second` is all it needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainfit.reports.figures import Block, Interval, Intervals, Remark, Section, Table
from trainfit.reports.numbers import MISSING, shown
from trainfit.reports.run_data import Run, number

_KEPT, _ASIDE = 0, 7
"""Colours: of what the next steps build on, and of what they do not."""


def ladder_section(run: Run) -> Section | None:
    """Speed and memory, one optimization after another, then the best without each."""
    steps = _listed(run.ladder, "steps")
    if not steps:
        return None
    rows = tuple(_speed(step) for step in steps)
    title = "Samples per second, one optimization after another"
    blocks: list[Block] = [Intervals(id="ladder", title=title, rows=rows, bars=True)]
    blocks.append(_table(steps, "over the last"))
    without = _listed(run.ladder, "without")
    if without:
        blocks.append(_table(without, "of the best", "The best without one of them"))
    unfit = [
        (str(x.get("name")), str(x.get("reason"))) for x in _listed(run.ladder, "not_applicable")
    ]
    if unfit:
        blocks.append(
            Table(title="Not applicable", columns=("optimization", "why"), rows=tuple(unfit))
        )
    drift = run.ladder.get("drift")
    if isinstance(drift, Mapping):
        text = f"The baseline at the end was {_times(drift)} as fast as at first."
        blocks.append(Remark(text=text))
    return Section(id="ladder", title="Ladder", blocks=tuple(blocks))


def _listed(ladder: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = ladder.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _table(steps: Sequence[Mapping[str, Any]], against: str, title: str = "") -> Table:
    first = next((value for step in steps if (value := _speed(step).value)), None)
    gains = any(step.get("gain") for step in steps)
    rows = []
    for step in steps:
        speed = _speed(step)
        ratio = speed.value / first if speed.value and first else None
        rows.append(
            (
                speed.label,
                shown(speed.value, "number"),
                _times(step.get("speedup") or ratio),
                *((_times(step.get("gain")),) if gains else ()),
                shown(number(step.get("peak_memory_gib")), "gib"),
                str(step.get("note") or step.get("what") or ""),
            )
        )
    more = (against,) if gains else ()
    columns = ("optimization", "samples/s", "speed-up", *more, "peak memory", "note")
    return Table(title=title, columns=columns, rows=tuple(rows))


def _speed(step: Mapping[str, Any]) -> Interval:
    value, low, high = _interval(step.get("samples_per_second"))
    color = _KEPT if step.get("kept", True) else _ASIDE
    return Interval(label=str(step.get("name")), value=value, low=low, high=high, color=color)


def _interval(found: Any) -> tuple[float | None, float | None, float | None]:
    """Value, low and high, as far as they are there."""
    if not isinstance(found, Mapping):
        found = {"value": found}
    value, low, high = (number(found.get(name)) for name in ("value", "low", "high"))
    return tuple(v if math.isfinite(v) else None for v in (value, low, high))  # type: ignore[return-value]


def _times(found: Any) -> str:
    value, low, high = _interval(found)
    if value is None:
        return MISSING
    return f"{value:.2f}×" + ("" if low is None or low == high else f" ({low:.2f}–{high:.2f})")
