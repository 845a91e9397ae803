"""Loss over 300 steps of a task that can be learned: rounded moments and rounded weights.

Three seeds of AdamW's float32 moments beside three of each kind of rounded ones, and LoRA on
weights as they are beside LoRA on rounded ones, on the same sequences at the same rates. Rounded
weights are drawn block by block, and so are others than those that are not. A way is as good as
another where their mean losses differ by no more than the other's seeds do.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from loss_curves import smoothed
from more_model import over, tiny_model
from nli import planned, run_trainfit, sequences
from trainfit.engine.observers import Observer, TrainRow

STEPS, LAST, WINDOW, SEEDS = 300, 30, 10, 3
FULL = ("model.method=full", "training.learning_rate=5e-5")
LORA = ("model.method=lora", "training.learning_rate=1e-3")
WAYS: dict[str, tuple[str, ...]] = {
    "full, adamw_fused": (*FULL, "optimization.optimizer=adamw_fused"),
    "full, adamw_bf16": (*FULL, "optimization.optimizer=adamw_bf16"),
    "full, adamw_8bit": (*FULL, "optimization.optimizer=adamw_8bit"),
    "lora": (*LORA, "model.quantization=none"),
    "lora, int8": (*LORA, "model.quantization=int8"),
    "lora, nf4": (*LORA, "model.quantization=nf4"),
}


BESIDE = {
    "full, adamw_bf16": "full, adamw_fused",
    "full, adamw_8bit": "full, adamw_fused",
    "lora, int8": "lora",
    "lora, nf4": "lora",
}
"""Ways, and those that they are compared with."""


class Losses(Observer):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, row: TrainRow) -> None:
        self.found.append(row.loss)


def curves(asked: argparse.Namespace, record: dict[str, Any], keep: Callable[[], None]) -> None:
    """Train every way with each seed, a seed of all ways at a time."""
    longest, steps = (32, 8) if asked.tiny else (128, STEPS)
    tokens = sequences(400 if asked.tiny else 10_000, longest)
    name = tiny_model() if asked.tiny else "bert-base"
    common = (
        f"data.max_length={longest}",
        "training.effective_batch_size=32",
        "training.weight_decay=0.01",
        "training.warmup_ratio=0.1",
        "model.attention_dropout=0.0",
        "optimization.compile=false",
    )

    @cache
    def plan_of(way: str) -> Any:
        return planned(name, tokens, *common, *WAYS[way])

    done = {(row["way"], row["seed"]) for row in record["losses"]}
    left = [(way, seed) for seed in range(SEEDS) for way in WAYS if (way, seed) not in done]
    for way, seed in left:
        if over(asked):
            break
        config, made = plan_of(way)
        seen = Losses()
        run_trainfit(config, made, tokens, seen, steps, seed=seed, logging_steps=1)
        record["losses"].append({"way": way, "seed": seed, "losses": seen.found})
        record["loss_summary"] = compared(record["losses"])
        keep()
        last = statistics.mean(seen.found[-LAST:])
        print(f"seed {seed}, {way}: the last {LAST} losses {last:.4f}", flush=True)
    for way, row in record.get("loss_summary", {}).items():
        print(way, row)


def compared(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Compare each way with its like: steps at which means differ by no more than seeds do."""
    found: dict[str, dict[str, Any]] = {}
    curves = {way: [row["losses"] for row in rows if row["way"] == way] for way in WAYS}
    for way, seeds in curves.items():
        if not seeds:
            continue
        last = [round(statistics.mean(losses[-LAST:]), 4) for losses in seeds]
        found[way] = {"first": round(seeds[0][0], 4), f"last_{LAST}": last}
        beside = curves.get(BESIDE.get(way, ""), [])
        if len(seeds) < SEEDS or len(beside) < SEEDS:
            continue
        ours, theirs = (np.stack([smoothed(s, WINDOW) for s in one]) for one in (seeds, beside))
        apart = np.abs(ours.mean(0) - theirs.mean(0))
        range_ = [statistics.mean(losses[-LAST:]) for losses in beside]
        found[way] |= {
            "steps": len(apart),
            "steps_within": int((apart <= np.ptp(theirs, axis=0)).sum()),
            "furthest_beyond": round(float((apart - np.ptp(theirs, axis=0)).max()), 4),
            "end_within": bool(
                abs(statistics.mean(last) - statistics.mean(range_)) <= max(range_) - min(range_)
            ),
        }
    return found
