"""Tables of the docs: searches, and single settings with and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ladder_docs
from result_files import GIB, RESULTS, Row, recorded, table

# ── search, tuning, batch size ────────────────────────────────────────────────────────────────


def hpo() -> str:
    """Trials per hour beside a study written with Trainer and Optuna."""
    found = recorded("hpo-h200")["summary"]
    ours, theirs = found["trainfit"], found["peer"]
    rows: list[Row] = [
        (
            title,
            f"{ours[key]:.0f}",
            f"{theirs[key]:.0f}",
            f"{found[f'times_{key}']:.2f}×",
        )
        for title, key in (
            ("trials per hour, all four", "trials_per_hour"),
            ("trials per hour without the first, which warms up", "trials_per_hour_warm"),
        )
    ]
    planning = found["planning_seconds"]
    rows += [
        (
            f"all four with {planning:.0f} s of planning",
            "",
            "",
            f"{found['times_with_planning']:.2f}×",
        ),
        (
            "50 trials with the planning, at the later trials' rate",
            "",
            "",
            f"{found['times_in_50_trials_with_planning']:.2f}×",
        ),
    ]
    return table(("", "trainfit", "Trainer and Optuna", "faster"), rows)


_JOBS = {
    "gpt": "GPT-2 124M, 64 × 1,024 tokens a step",
    "nli-deberta": "NLI, DeBERTa-v3-base, 128 sequences a step",
    "nli-gemma": "NLI, Gemma-3-1B, 128 sequences a step",
}
_COMPILED = {"off": "eager", "default": "compiled", "reduce-overhead": "CUDA graphs"}


def _rate(found: dict[str, float]) -> str:
    return f"{found['value']:,.1f} [{found['low']:,.1f}–{found['high']:,.1f}]"


def tune_choice() -> str:
    """The setting that tune chose beside the best of a whole grid."""
    rows = []
    for name, title in _JOBS.items():
        work = recorded("tune-h200")["workloads"][name]
        ran = [point for point in work["grid"] if point["status"] == "ok"]
        best = max(ran, key=lambda point: point["samples_per_second"]["value"])
        point, chosen = best["point"], work["tune"]["samples_per_second"]
        words = f"{_COMPILED[point['compile']]}, {point['way']}, {point['micro_batches']} part"
        rows.append(
            (
                title,
                len(work["grid"]),
                f"{_rate(best['samples_per_second'])} ({words})",
                f"{_rate(chosen)} ({'changed' if work['tune']['changes'] else 'as planned'})",
                f"{chosen['value'] / best['samples_per_second']['value']:.3f}",
                f"{work['tune']['seconds']:.0f} s",
            )
        )
    return table(("job", "points", "best of the grid", "tune's choice", "ratio", "took"), rows)


def tune_memory() -> str:
    """Peak memory of the planner's own setting, promised and measured."""
    rows = []
    for name, title in _JOBS.items():
        tuned = recorded("tune-h200")["workloads"][name]["tune"]
        as_planned = next(trial for trial in tuned["trials"] if not trial["settings"])
        promised = tuned["best"]["memory"]["peak_allocated_gib"]
        rows.append((title, f"{promised:.2f}", f"{as_planned['peak_memory_gib']:.2f}"))
    return table(("job", "predicted, GiB", "measured, GiB"), rows)


def finder() -> str:
    """Largest batch that find_batch_size found, beside the truth by bisection."""
    rows = []
    for row in recorded("finder-h200")["finder"]:
        found = row["finder"]
        memory = "whole GPU" if row["cap_gib"] is None else f"{row['cap_gib']:g} GiB"
        rows.append(
            (
                memory,
                found["largest_rows"],
                row["truth"]["largest_rows"],
                len(found["probes"]),
                found["ooms"],
                f"{found['seconds_after_build']:.1f}",
            )
        )
    heads = ("memory", "found, rows", "truth, rows", "probes", "ran out of memory", "seconds")
    return table(heads, rows)


def finder_lightning() -> str:
    """Lightning's finder on the same model."""
    titles = {"power": "power", "binsearch": "binsearch, less its 5% margin"}
    rows = [
        (
            titles[mode],
            found["largest_rows"],
            found["ooms"],
            f"{found['seconds_after_build']:.1f}",
        )
        for mode, found in recorded("finder-h200")["lightning"].items()
    ]
    return table(("mode", "found, rows", "ran out of memory", "seconds"), rows)


# ── single settings ───────────────────────────────────────────────────────────────────────────


def _job(name: str) -> dict[str, Any]:
    return next(job for job in recorded("jobs-h200")["results"] if job["name"] == name)


def _figures(step: dict[str, Any]) -> tuple[float, float]:
    return 1000 * step["median_step_seconds"], step["peak_allocated"] / GIB


def compiling() -> str:
    """Eager steps beside compiled ones."""
    names = (
        "bert packed 16384",
        "bert padded 32x512",
        "modernbert packed 16384",
        "deberta padded 16x512",
        "gemma packed 8192",
        "gemma packed 8192 lora",
        "gpt-small 16x1024",
        "gpt-medium 8x1024 x2",
    )
    rows = []
    for name in names:
        compiled = _job(f"{name} compiled")
        (slow, much), (fast, little) = _figures(_job(name)), _figures(compiled)
        times = (f"{slow:.1f} ms", f"{fast:.1f} ms", f"{slow / fast:.2f}×")
        rows.append(
            (name, *times, f"{much:.1f}", f"{little:.1f}", f"{compiled['first_two_seconds']:.0f} s")
        )
    return table(
        ("step", "eager", "compiled", "faster", "GiB eager", "GiB compiled", "first two steps"),
        rows,
    )


def _step(model: str, shape: str, **wanted: Any) -> dict[str, Any]:
    """A recorded eager bf16 step without padding, by its shape."""
    batch, length = map(int, shape.split("x"))
    case = {
        "compile": False,
        "padded": False,
        "precision": "bf16",
        "method": "full",
        "checkpointing": False,
    }
    case |= {**wanted, "model": model, "batch": batch, "length": length}
    [found] = [
        step
        for step in recorded("estimator-h200")["results"]
        if {key: step["case"][key] for key in case} == case
    ]
    return dict(found)


def checkpointing() -> str:
    """Steps with and without gradient checkpointing."""
    names = (
        "bert-base 32x512",
        "deberta-v3-base 16x512",
        "modernbert-base 32x512",
        "gemma-3-1b-it 8x512",
        "gpt2 8x1024",
        "llama-1b 4x2048",
    )
    rows = []
    for name in names:
        fast, much = _figures(_step(*name.split()))
        slow, little = _figures(_step(*name.split(), checkpointing=True))
        times = (f"{fast:.0f} ms", f"{slow:.0f} ms", f"{100 * (slow / fast - 1):.0f}%")
        rows.append(
            (name, *times, f"{much:.1f}", f"{little:.1f}", f"{100 * (1 - little / much):.0f}%")
        )
    return table(
        ("step", "without", "with", "slower", "GiB without", "GiB with", "less memory"), rows
    )


def adapters() -> str:
    """Gemma-3-1B trained in full, with LoRA and with DoRA."""
    rows = []
    for method in ("full", "lora", "dora"):
        packed = "gemma packed 8192" + ("" if method == "full" else f" {method}")
        figures = (_figures(_step("gemma-3-1b-it", "8x512", method=method)), _figures(_job(packed)))
        cells = [cell for time, size in figures for cell in (f"{time:.0f} ms", f"{size:.1f}")]
        rows.append((method, *cells))
    return table(("method", "8 × 512, padded", "GiB", "8,192 tokens, packed", "GiB"), rows)


def receipt_cost() -> str:
    """Cost of the profiled step."""
    rows = []
    titles = {"nli-deberta": "DeBERTa-v3-base", "gpt": "GPT-2 124M", "tiny": "the embedded job"}
    for name in ("receipt-h200", "receipt-cpu"):
        for job, found in recorded(name)["results"].items():
            extra = 1e6 * found["share_of_1000_steps"] * found["step_seconds"]
            device = "two CPU cores" if name.endswith("cpu") else found["device"]
            share = f"{found['share_of_1000_steps']:.2%}"
            rows.append(
                (
                    titles[job],
                    device,
                    f"{extra:.0f} ms",
                    f"{1e3 * found['step_seconds']:.1f} ms",
                    share,
                )
            )
    return table(("job", "device", "cost, once", "a step", "of 1,000 steps"), rows)


def machine() -> str:
    """The rates of one H200 beside its datasheet."""
    result = recorded("check-h200")["result"]
    [sheet], values = (
        result["datasheet"],
        {i["name"]: i["value"] for i in result["measured"]["items"]},
    )
    rows: list[Row] = [
        (
            f"matrix products in {kind}, TFLOP/s",
            f"{values[f'matmul_{kind}']:.3g}",
            f"{values[f'matmul_{kind}_sustained']:.3g}",
            f"{sheet[f'{kind}_tflops']:g}",
        )
        for kind in ("bf16", "fp16", "tf32", "fp32")
    ]
    rows += [
        ("copies in memory, GB/s", f"{values['copy']:,.0f}", "", f"{sheet['bandwidth_gbs']:,.0f}"),
        ("copies from the host, pinned, GB/s", f"{values['host_to_device_pinned']:.1f}", "", ""),
        (
            "copies from the host, pageable, GB/s",
            f"{values['host_to_device_pageable']:.1f}",
            "",
            "",
        ),
        ("reads from the disk, GB/s", f"{values['disk_read']:.2f}", "", ""),
    ]
    return table(("NVIDIA H200", "measured", "sustained", "datasheet"), rows)


def ladders() -> str:
    """A chapter with table and picture for each recorded ladder."""
    return ladder_docs.chapters(ladder_docs.recorded(RESULTS))


TABLES: dict[str, Callable[[], str]] = {
    "hpo": hpo,
    "tune-choice": tune_choice,
    "tune-memory": tune_memory,
    "finder": finder,
    "finder-lightning": finder_lightning,
    "compiling": compiling,
    "checkpointing": checkpointing,
    "adapters": adapters,
    "receipt-cost": receipt_cost,
    "machine": machine,
    "ladders": ladders,
}
