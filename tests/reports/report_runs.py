"""Run folders written by hand, as a GPU job would leave them: for reports without a GPU."""

from __future__ import annotations

import csv
import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainfit.core.plan_records import Plan
from trainfit.core.records import Event, Receipt, ReceiptItem, RunResult
from trainfit.runs.opening import AttentionPath, RunSetup
from trainfit.runs.run_folder import Journal
from trainfit.tuning.rungs import Ladder, LadderStep
from trainfit.tuning.tuned_cache import Interval

OOM = Event(kind="oom", step=200, seconds=31.0, text="cut into 4 micro-batches from here on")
SKIP = Event(kind="skipped", step=410, seconds=60.0, text="step 410: loss nan; no update")
SETUP = RunSetup(
    device="cuda",
    device_name="NVIDIA GeForce RTX 4090",
    compute_capability=(8, 9),
    threads=16,
    ranks=1,
    sharded=False,
    tf32=("matmul", "cuDNN"),
    precision="bf16",
    loss_scaling=False,
    attention=AttentionPath(kind="varlen"),
    optimizer="AdamW",
    fused=True,
    learning_rate=2e-5,
    weight_decay=0.01,
    trained_weights=1_000_000,
    weights=1_000_000,
    num_workers=4,
    pin_memory=True,
    prefetch_factor=2,
    step_sequences=32,
    micro_batches=2,
    micro_batch_tokens=4096,
    packed=True,
    compiled=False,
)
RECEIPT = Receipt(
    run="x",
    items=(
        ReceiptItem(
            name="TF32", requested=True, observed=True, status="active", evidence="tf32 kernels"
        ),
        ReceiptItem(
            name="flash attention",
            requested="flash",
            observed="math",
            status="not_active",
            evidence="no flash kernel in the step",
            mend="leave out the mask",
        ),
        ReceiptItem(
            name="channels last",
            requested=None,
            observed=None,
            status="not_applicable",
            evidence="no convolution in the model",
        ),
    ),
)


def _step(name: str, rate: float | None, low: float = 0.0, high: float = 0.0) -> LadderStep:
    if rate is None:
        return LadderStep(name=name, what="", status="skipped", note="no convolution")
    return LadderStep(
        name=name,
        what=name,
        status="ok",
        samples_per_second=Interval(value=rate, low=low or rate, high=high or rate),
        speedup=Interval(value=rate / 24.0, low=rate / 24.0, high=rate / 24.0),
    )


LADDER = Ladder(
    device="RTX 4090",
    torch="2.9",
    taken="2026-11-15",
    samples_per_step=32,
    steps=(
        _step("fp32, padded", 24.0, 23.5, 24.4),
        _step("+ TF32", 51.0, 49.9, 52.2),
        _step("+ bf16", 96.0, 94.0, 98.1),
        replace(_step("+ packing", 159.0), peak_memory_gib=21.5),
        _step("+ channels last", None),
    ),
)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_rows(steps: int, every: int = 1, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    rows = []
    for step in range(every, steps + 1, every):
        share = step / steps
        rate = 200 * (1 + 0.04 * random.standard_normal())
        rows.append(
            {
                "kind": "train",
                "step": step,
                "total_steps": steps,
                "epoch": 3 * share,
                "loss": 0.7 * math.exp(-4 * share) + 0.02 + 0.02 * abs(random.standard_normal()),
                "learning_rate": 2e-5 * min(share / 0.1, (1 - share) / 0.9),
                "grad_norm": 0.5 + abs(random.standard_normal()),
                "step_seconds": 32 / rate,
                "samples_per_second": rate,
                "tokens_per_second": rate * 250,
                "mfu": 0.002 * rate,
                "memory_gib": 16.0 + min(share * 3, 1),
                "wait_share": 0.01 * random.random(),
                "micro_batches": 2,
                "skipped": 0,
            }
        )
    return rows


def write_run(
    folder: Path,
    plan: Plan | None = None,
    *,
    steps: int = 600,
    every: int = 1,
    seed: int = 0,
    name: str = "gemma-3-1b-it",
    learning_rate: float = 2e-5,
    classes: tuple[str, ...] = ("no evidence", "evidence"),
    results: dict[str, Any] | None = None,
    finished: bool = True,
) -> Path:
    """A run of one split, with GPU samples, events, a receipt, a ladder and predictions."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"id": folder.name}))
    config = {"model": {"name": name}, "training": {"learning_rate": learning_rate}}
    origins = {"model.name": "override", "training.learning_rate": "default"}
    whole = {"task": "nli", "hardware": "auto", "experiment": None}
    (folder / "config.json").write_text(json.dumps({**whole, "config": config, "origins": origins}))
    data = {"classes": classes, "train": {"pairs": 2000}, "test": {"pairs": 900}}
    (folder / "data.json").write_text(json.dumps({"checksum": "0", "folds": [data]}))
    if plan is not None:
        replace(plan, reasons=plan.reasons).save(folder / "plan.json")
    rows = train_rows(steps, every, seed)
    if steps >= 600:
        rows[409]["loss"] = {"$float": "nan"}
        rows[500]["grad_norm"] = 97.5  # the one spike that a mean over a stretch would hide
    for step in range(steps // 6, steps + 1, steps // 6):
        score = 0.9 * (1 - math.exp(-3 * step / steps))
        rows.append({"kind": "evaluation", "step": step, "loss": 1 - score, "f1": score})
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(folder / "gpus.jsonl", gpu_rows(steps))
    events = (OOM, SKIP) if steps >= 600 else ()
    with closing(Journal(folder)) as journal:
        list(journal.setup(SETUP, 0))
        for event in events:
            journal.event(event, {})
        journal.line("evaluation at step 300: f1 0.5000")
    if finished:
        write_end(folder, steps, events, results or {})
    RECEIPT.save(folder / "receipt.json")
    LADDER.save(folder / "ladder.json")
    write_predictions(folder / "predictions.csv", len(classes), seed)
    return folder


def write_end(folder: Path, steps: int, events: tuple[Event, ...], results: dict[str, Any]) -> None:
    RunResult(
        run=str(folder),
        status="finished",
        steps=steps,
        seconds=steps * 0.16,
        metrics={"f1": 0.85},
        peak_memory_gib=17.0,
        events=events,
    ).save(folder / "result.json")
    found = {
        "task": "nli",
        "run": str(folder),
        "status": "finished",
        "metrics": {"f1": 0.85, "precision": 0.8, "recall": 0.9, "accuracy": 0.95},
        "baselines": {"majority_f1": 0.0, "bag_of_words_f1": 0.62},
        "events": [],
        "seconds": steps * 0.16,
        **results,
    }
    (folder / "results.json").write_text(json.dumps(found))


def gpu_rows(steps: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "gpus": [
                {
                    "index": index,
                    "utilisation_percent": 96 - 3 * index,
                    "temperature_c": 61 + 4 * index,
                    "memory_used_gib": 18.2,
                    "power_w": 380.0,
                }
                for index in range(2)
            ],
        }
        for step in range(10, steps + 1, max(steps // 50, 1))
    ]


def write_predictions(path: Path, classes: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = ["score"] if classes == 2 else [f"score_{k}" for k in range(classes)]
        criterion = ["criterion"] if classes == 2 else []
        writer.writerow(["fold", "id", *criterion, "label", *names])
        for number in range(900):
            label = int(random.random() < 0.2) if classes == 2 else number % classes
            chances = random.dirichlet([3.0 if k == label else 1.0 for k in range(classes)])
            shown = chances[1:] if classes == 2 else chances
            code = [f"A.{number % 9 + 1}"] if classes == 2 else []
            writer.writerow([1, f"s_{number // 9}", *code, label, *shown.round(5)])
