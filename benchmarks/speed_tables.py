"""Tables of the docs: speed beside other trainers, and predictions beside measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from result_files import Row, recorded, table

# ── fine-tuning ───────────────────────────────────────────────────────────────────────────────

_SHAPES = {
    "deberta-v3-base": "DeBERTa-v3-base",
    "modernbert-base": "ModernBERT-base",
    "bert-base": "BERT-base",
    "gemma-3-1b-it": "Gemma-3-1B",
}


def _rounds(model: str, who: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Finished rounds of the contenders whose name starts with `who`."""
    for each in recorded("nli-h200")["models"]:
        if each["model"] == model:
            for name, contender in each["contenders"].items():
                if name.startswith(who) and not name.endswith("with TF32"):
                    yield from ((name, r) for r in contender["rounds"] if "error" not in r)


def _own_rates(model: str) -> list[float]:
    contenders = [m["contenders"] for m in recorded("nli-h200")["models"] if m["model"] == model]
    return [each["trainfit"]["samples_per_second"] for each in contenders]


def _rate_range(model: str) -> str:
    return " to ".join(dict.fromkeys(f"{rate:,.0f}" for rate in sorted(_own_rates(model))))


def _best_trainer(model: str) -> tuple[str, dict[str, Any]]:
    return max(_rounds(model, "trainer, "), key=lambda found: found[1]["samples_per_second"])


def _defaults(model: str) -> float:
    """Rate of Trainer's defaults in the first process that ran them."""
    found = (
        m["contenders"].get("trainer defaults")
        for m in recorded("nli-h200")["models"]
        if m["model"] == model
    )
    return float(next(each["samples_per_second"] for each in found if each))


def speed() -> str:
    """Samples per second of trainfit and of Trainer."""
    rows = []
    for model, title in _SHAPES.items():
        name, best = _best_trainer(model)
        defaults = _defaults(model)
        own = min(_own_rates(model))
        rows.append(
            (
                title,
                f"**{_rate_range(model)}**",
                f"{best['samples_per_second']:,.0f} ({name.removeprefix('trainer, ')})",
                f"{own / best['samples_per_second']:.1f}×",
                f"{defaults:.3g}",
                f"{own / defaults:.0f}×",
            )
        )
    heads = ("model", "trainfit", "Trainer's best", "faster", "Trainer's defaults", "faster")
    return table(heads, rows)


def speed_memory() -> str:
    """Peak memory of trainfit and of Trainer at its best."""
    rows = []
    for model, title in _SHAPES.items():
        peak = max(found["peak_gib"] for _, found in _rounds(model, "trainfit"))
        rows.append((title, f"{peak:.1f}", f"{_best_trainer(model)[1]['peak_gib']:.1f}"))
    return table(("model", "trainfit, GiB", "Trainer's best, GiB"), rows)


def methods() -> str:
    """Gemma-3-1B with other methods than full fine-tuning."""
    rows = []
    for found in recorded("nli-h200")["variants"]:
        [measured], planned = found["rounds"], found.get("planned")
        rate, gib = measured["samples_per_second"], measured["peak_gib"]
        title = {"dora": "DoRA", "frozen": "frozen encoder"}[found["method"]]
        rows.append(
            (
                title if planned else f"{title} with peft's own layers",
                f"{rate:,.0f}",
                f"{planned['samples_per_second']:,.0f}" if planned else "–",
                f"{gib:.1f}",
                f"{planned['gib']:.1f}" if planned else "–",
            )
        )
    return table(("method", "samples/s", "predicted", "GiB", "predicted"), rows)


def curves() -> str:
    """Steps at which the two mean losses differ by no more than the seeds do."""
    [found] = recorded("curves-h200")["curve_summaries"]
    single, smooth = found["spreads"]
    rows = [
        (title, *(each[f"within_{who}"] for who in ("wider", "trainer", "trainfit")))
        for title, each in (("mean of the last ten steps", smooth), ("each step alone", single))
    ]
    heads = (
        f"steps of {single['steps']}",
        "the wider of the two ranges",
        "the range of Trainer's seeds",
        "the range of trainfit's seeds",
    )
    return table(heads, rows)


# ── GPT ───────────────────────────────────────────────────────────────────────────────────────

_GPT_NAMES = {
    "transformers": "transformers' GPT-2, compiled",
    "nanoGPT-style": "nanoGPT-style loop, compiled",
}


def _gpt(run: int) -> dict[str, Any]:
    return {one["name"]: one for one in recorded("gpt-h200")["runs"][run]["results"]}


def gpt_steps() -> str:
    """GPT-2 124M: each line adds one thing to the line above."""
    found = _gpt(0) | _gpt(1)
    names = (
        *_GPT_NAMES,
        "whole model compiled",
        "+ bf16 between blocks",
        "+ loss by chunks of 16384",
        "+ own GELU (trainfit)",
        "trainfit, twice the batch",
    )
    rows = [
        (
            _GPT_NAMES.get(name, name),
            f"{1e3 * one['seconds']:.1f}",
            f"{one['tokens_per_second']:,.0f}",
            f"{one['mfu']:.1%}",
            f"{one['peak_allocated_gib']:.1f}",
        )
        for name, one in ((name, found[name]) for name in names)
    ]
    return table(("GPT-2 124M", "ms a step", "tokens/s", "MFU", "peak GiB"), rows)


def gpt_larger() -> str:
    """GPTs beside a nanoGPT-style loop, with larger steps and a larger model."""
    large = "8 times the batch in 4 parts"
    pairs = {
        ("GPT-2 124M", "64"): (2, "nanoGPT-style", "+ own GELU (trainfit)"),
        ("GPT-2 124M", "512 in 4 parts"): (2, f"nanoGPT-style, {large}", f"trainfit, {large}"),
        ("GPT-2 medium", "64"): (3, "nanoGPT-style", "+ own GELU (trainfit)"),
    }
    rows = []
    for title, (run, *names) in pairs.items():
        ends = [_gpt(run)[name] for name in names]
        rates = [f"{one['tokens_per_second']:,.0f} ({one['mfu']:.1%})" for one in ends]
        rows.append((*title, *rates, ", ".join(f"{one['peak_allocated_gib']:.1f}" for one in ends)))
    heads = (
        "model",
        "sequences a step",
        "nanoGPT-style, tokens/s (MFU)",
        "trainfit, tokens/s (MFU)",
        "peak GiB of each",
    )
    return table(heads, rows)


# ── predicted against measured ────────────────────────────────────────────────────────────────


def predictions() -> str:
    """How many predictions came true within a limit."""
    found, time = recorded("estimator-predicted"), recorded("time-h200")
    eager, compiled = found["eager"], found["compiled"]
    runs = recorded("capped-h200")["results"]
    ran = [run for run in runs if "error" not in run]
    rows = [
        ("peak allocated, eager steps", eager["cases"], eager["allocated_within_2_percent"], "2%"),
        (
            "peak allocated, compiled steps",
            compiled["cases"],
            compiled["allocated_within_1_percent"],
            "1%",
        ),
        (
            "peak reserved, eager steps",
            eager["reserved_cases"],
            eager["reserved_within_5_percent"],
            "5%",
        ),
        (
            "peak reserved, compiled steps",
            compiled["reserved_cases"],
            compiled["reserved_within_5_percent"],
            "5%",
        ),
        (
            "time of a step, with its model family left out of the fit",
            time["cases"],
            time["within_20_percent"],
            "20%",
        ),
        (
            "plans for 8 to 80 GiB that ran 20 steps within that memory",
            len(runs),
            len(ran),
            "no OOM",
        ),
    ]
    return table(("predicted without a GPU", "cases", "within the limit", "limit"), rows)


def misses() -> str:
    """Every prediction outside its limit."""
    rows: list[Row] = [
        (
            row["case"],
            "peak reserved",
            f"{row['reserved_gib']:.2f} GiB",
            f"{row['measured_reserved_gib']:.2f} GiB",
            f"{row['reserved_error_percent']:+.0f}%",
        )
        for row in recorded("estimator-predicted")["rows"]
        if abs(row.get("reserved_error_percent") or 0) > 5
    ]
    rows += [
        (
            row["case"],
            "time of a step",
            f"{1e3 * row['predicted_seconds']:.0f} ms",
            f"{1e3 * row['measured_seconds']:.0f} ms",
            f"{row['error_percent']:+.0f}%",
        )
        for row in recorded("time-h200")["results"]
        if abs(row["error_percent"]) > 20
    ]
    rows += [
        (
            run["name"],
            "fits",
            f"{run['case']['memory']['peak_reserved_gib']:.2f} GiB",
            "ran out of memory",
            "",
        )
        for run in recorded("capped-h200")["results"]
        if "error" in run
    ]
    return table(("step", "what", "predicted", "measured", "error"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "speed": speed,
    "speed-memory": speed_memory,
    "methods": methods,
    "curves": curves,
    "gpt-steps": gpt_steps,
    "gpt-larger": gpt_larger,
    "predictions": predictions,
    "misses": misses,
}
