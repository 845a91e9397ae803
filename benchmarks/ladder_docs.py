"""Recorded ladders as chapters of docs/ladder.md: a table and a picture for each.

python benchmarks/tune.py --stage ladder --output benchmarks/results/DATE-NAME-h200.json
trainfit tune nli --ladder --output benchmarks/results/DATE-NAME-ladder-h200.json …
python benchmarks/docs_tables.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainfit.cli.pages import closing_lines, rate, times
from trainfit.core import codec
from trainfit.measuring.timing import ratio_interval
from trainfit.reports.model import shown
from trainfit.tuning.rungs import Ladder, LadderStep
from trainfit.tuning.tuned_cache import Interval

ROOT = Path(__file__).parent.parent


def recorded(results: Path = ROOT / "benchmarks" / "results") -> dict[str, Ladder]:
    """Ladders of all records, by the name of their picture."""
    found: dict[str, Ladder] = {}
    for path in sorted(results.glob("*-h200.json")):
        if path.stem.endswith("-ladder-h200"):
            found[f"{path.stem}.svg"] = _measured(Ladder.load(path))
            continue
        for name, work in json.loads(path.read_text()).get("workloads", {}).items():
            parts = {
                part: _measured(codec.decode(Ladder, work[part], str(path)))
                for part in ("ladder", "rows", "removals")
                if part in work
            }
            if "ladder" in parts:
                found[f"{path.stem}-{name}-ladder.svg"] = replace(_joined(**parts), title=name)
    return found


def _joined(ladder: Ladder, rows: Ladder | None = None, removals: Ladder | None = None) -> Ladder:
    """Ladder with the rows that were measured again, and the removals measured separately."""
    if rows is not None:
        ladder = replace(ladder, steps=tuple(_again(ladder, rows)))
    if removals is not None:
        later = {step.name for step in removals.without}
        earlier = [step for step in ladder.without if step.name not in later]
        lost = [replace(step, speedup=_share(step, ladder.best)) for step in removals.without]
        ladder = replace(ladder, without=(*lost, *earlier))
    lost = sorted(ladder.without, key=lambda step: step.gain.value if step.gain else 0.0)
    return replace(ladder, without=tuple(lost))


def _again(ladder: Ladder, rows: Ladder) -> Iterator[LadderStep]:
    """Steps of the ladder, those that were measured again taken from `rows`."""
    later = {step.name: step for step in rows.steps if step.gain is not None}
    known = {step.name for step in ladder.steps}
    last: LadderStep | None = None
    for step in (*ladder.steps, *(later[name] for name in later if name not in known)):
        again = later.get(step.name)
        if again is not None:
            note = "; ".join(filter(None, (again.note, "measured later")))
            speedup = _over(again, ladder.steps[0])
            step = replace(again, speedup=speedup, note=note)
        elif last is not None and last.name in later and last.kept:
            step = replace(step, gain=_over(step, last))
        yield step
        last = step


def _share(step: LadderStep, best: LadderStep) -> Interval | None:
    """Speed-up of the best times this step's share of it: no baseline was measured beside it."""
    if step.gain is None or best.speedup is None:
        return None
    low, value, high = (
        best.speedup.value * each for each in (step.gain.low, step.gain.value, step.gain.high)
    )
    return Interval(value=value, low=low, high=high)


def _over(step: LadderStep, other: LadderStep) -> Interval:
    rates = ([[1 / each for each in found] for found in one.step_seconds] for one in (step, other))
    return ratio_interval(*rates)


def _measured(ladder: Ladder) -> Ladder:
    """Ladder without the rows that there was no time for."""
    steps, without = (
        tuple(step for step in part if step.status != "skipped")
        for part in (ladder.steps, ladder.without)
    )
    return replace(ladder, steps=steps, without=without)


def chapters(ladders: dict[str, Ladder]) -> str:
    """One chapter for each ladder."""
    return "\n".join(_chapter(picture, ladder) for picture, ladder in ladders.items())


def _chapter(picture: str, ladder: Ladder) -> str:
    lines = [
        f"### {ladder.title}, {ladder.device}",
        "",
        f"![{ladder.title}: speed-up and memory of each step]({picture})",
        "",
        *_table(ladder.steps, "over the last"),
        "",
        *(_table(ladder.without, "of the best", "the best without") or [_NOT_REMOVED]),
        "",
        f"torch {ladder.torch}, {ladder.taken}. {' '.join(closing_lines(ladder))}",
        "",
    ]
    return "\n".join(lines)


_NOT_REMOVED = "There was no time to remove them from the best again."


def _table(steps: tuple[LadderStep, ...], against: str, first: str = "optimization") -> list[str]:
    if not steps:
        return []
    heads = (first, "samples/s", "speed-up", against, "peak memory", "")
    rows = [
        (
            step.name,
            rate(step),
            times(step.speedup),
            times(step.gain),
            shown(step.peak_memory_gib, "gib"),
            step.note,
        )
        for step in steps
    ]
    return ["| " + " | ".join(row).rstrip() + " |" for row in (heads, ("---",) * 6, *rows)]
