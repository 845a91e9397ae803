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
    heads = ("head", "model", "trainfit", "compiled", "Trainer's best", "faster")
    return table(heads, rows) if rows else ""


def _row(title: str, model: str, own: Mapping[str, Sequence[float]]) -> Sequence[str]:
    plain = own.get("trainfit", [])
    theirs = [(max(own[name]), words) for name, words in _TRAINER.items() if name in own]
    best, words = max(theirs, default=(0.0, ""))
    return (
        title,
        _MODELS.get(model, model),
        f"**{_range(plain)}**" if plain else "–",
        _range(own.get("trainfit-compiled", [])),
        f"{best:,.0f} ({words})" if theirs else "–",
        f"{min(plain) / best:.1f}×" if plain and theirs else "–",
    )


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


def script_speeds() -> str:
    """Samples per second of plain scripts and of the same with changes, in alternating runs."""
    paths = sorted(RESULTS.glob("*-own-script-*.json"))
    found = [one for path in paths for one in json.loads(path.read_text())["records"]]
    rows = []
    for case, title in _SCRIPTS.items():
        rates: dict[str, list[float]] = {}
        for row in (row for one in found for row in one["rows"] if row["case"] == case):
            if "samples_per_second" in row:
                rates.setdefault(row["arm"], []).append(row["samples_per_second"])
        plain, alone, graphs = (rates.get(arm, []) for arm in ("plain", "unpadded", "graphs"))
        if plain and alone and graphs:
            gains = (f"{median(one) / median(plain):.2f}×" for one in (alone, graphs))
            rows.append((title, _range(plain), _range(alone), _range(graphs), *gains))
    heads = ("script", "alone", "without padding", "all changes", "gain without padding", "by all")
    return table(heads, rows) if rows else ""


TABLES: dict[str, Callable[[], str]] = {"heads": head_speeds, "own-script": script_speeds}
