"""Tables of the speed of heads and of own scripts, from records; empty where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from result_files import RESULTS, table

_MODELS = {"bert-base": "BERT-base", "modernbert-base": "ModernBERT-base"}
_TRAINER = {
    "padded": "padded to the longest",
    "grouped": "grouped by length",
    "compiled": "grouped by length, compiled",
}


def records() -> list[dict[str, Any]]:
    """Every record of heads.py, oldest first."""
    paths = sorted(RESULTS.glob("*-heads-*.json"))
    return [one for path in paths for one in json.loads(path.read_text())["records"]]


def head_speeds(found: Iterable[Mapping[str, Any]] | None = None) -> str:
    """Samples per second by head and model; the calls for one are taken together."""
    rates: dict[tuple[str, str], dict[str, list[float]]] = {}
    for one in records() if found is None else found:
        if one["tiny"]:
            continue
        own = rates.setdefault((one["title"], one["model"]), {})
        for run in one["runs"]:
            if "error" not in run:
                own.setdefault(run["setting"], []).append(run["samples_per_second"])
    rows = [_row(*job, own) for job, own in rates.items()]
    jobs = ("short job", "faster", "long job", "faster")
    heads = ("head", "model", "Trainer's best", *jobs)
    return table(heads, rows) if rows else ""


def _row(title: str, model: str, own: Mapping[str, Sequence[float]]) -> Sequence[str]:
    theirs = [(max(own[name]), words) for name, words in _TRAINER.items() if name in own]
    best, words = max(theirs, default=(0.0, ""))
    ours = []
    for rates in (own.get("trainfit", []), own.get("trainfit-long", [])):
        ours += [f"**{_range(rates)}**" if rates else "–"]
        ours += [f"{min(rates) / best:.1f}×" if rates and theirs else "–"]
    return title, _MODELS.get(model, model), f"{best:,.0f} ({words})" if theirs else "–", *ours


def _range(rates: Sequence[float]) -> str:
    ends = dict.fromkeys(f"{end:,.0f}" for end in (min(rates), max(rates))) if rates else ("–",)
    return " to ".join(ends)


_SCRIPTS = {
    "bert": "Trainer, BERT-base",
    "modernbert": "Trainer, ModernBERT-base",
    "deberta": "Trainer, DeBERTa-v3-base",
    "bert-512": "Trainer, BERT-base, texts of 120 tokens padded to 512",
    "cross-encoder": "CrossEncoder under Accelerate, BERT-base",
}


_ARMS = {
    "plain": "alone",
    "unpadded": "without padding",
    "graphs": "graphs too",
    "compiled": "compiled too",
}


def script_speeds() -> str:
    """Samples per second of plain scripts and of the same with changes, in alternating runs.

    Of each script the newest record counts: earlier ones are of earlier changes.
    """
    paths = sorted(RESULTS.glob("*-own-script-*.json"))
    found = [one for path in paths for one in json.loads(path.read_text())["records"]]
    rows = []
    for case, title in _SCRIPTS.items():
        rates = [_rates(one["rows"], case) for one in found]
        last = [one for one in rates if "graphs" in one][-1:]
        own = {arm: [rate for one in last for rate in one.get(arm, [])] for arm in _ARMS}
        if own["plain"] and own["unpadded"] and own["graphs"]:
            plain = median(own["plain"])
            later = (one for arm, one in own.items() if arm != "plain")
            gains = (f"{median(one) / plain:.2f}×" if one else "–" for one in later)
            rows.append((title, *map(_range, own.values()), *gains))
    changes = tuple(_ARMS.values())
    heads = ("script", *changes, f"gain {changes[1]}", *(f"gain, {one}" for one in changes[2:]))
    return table(heads, rows) if rows else ""


def _rates(rows: Iterable[Mapping[str, Any]], case: str) -> dict[str, list[float]]:
    """Samples per second of one case in a record, by arm."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        if row["case"] == case and "samples_per_second" in row:
            rates.setdefault(row["arm"], []).append(row["samples_per_second"])
    return rates


def whole_scripts() -> str:
    """Gains of scripts under `trainfit run`, by their own clocks, from the newest record."""
    paths = sorted(RESULTS.glob("*-plain-scripts-*.json"))[-1:]
    found = [one for path in paths for one in json.loads(path.read_text())["records"]]
    rows = [
        _whole_script(record["rows"], case, gains)
        for record in found
        for case, gains in record["gains"].items()
    ]
    heads = ("script", "steps", "alone", "by trainfit run", "second half", "training", "process")
    return table(heads, rows) if rows else ""


def _whole_script(
    rows: Iterable[Mapping[str, Any]], case: str, gains: Mapping[str, float]
) -> Sequence[str]:
    sides = [[row for row in rows if _is(row, case, way)] for way in ("alone", "run")]
    speeds = (median(row["samples_per_second"] for row in side) for side in sides)
    times = (f"{gains[name]:.2f}×" for name in ("steps", "training", "process"))
    [*_, last] = sides[1]
    compiled = ", compiled" if last["changes"]["compiled"] else ""
    steps = f"{last['steps']:,}{compiled}"
    return _SCRIPTS[case], steps, *(f"{one:,.0f}" for one in speeds), *times


def _is(row: Mapping[str, Any], case: str, way: str) -> bool:
    return (row["case"], row["way"]) == (case, way) and "error" not in row


TABLES: dict[str, Callable[[], str]] = {
    "heads": head_speeds,
    "own-script": script_speeds,
    "whole-scripts": whole_scripts,
}
