"""Loss over 300 steps of a task that can be learned: rounded moments and rounded weights.

Three seeds of AdamW's float32 moments beside three of each kind of rounded ones, and LoRA on
weights as they are beside LoRA on rounded ones, on the same sequences at the same rates. Rounded
weights are drawn block by block, and so are others than those that are not.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from more_model import tiny_model
from nli import planned, run_trainfit, sequences
from trainfit.engine.observers import Observer, TrainRow

STEPS, LAST = 300, 30
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


class Losses(Observer):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, row: TrainRow) -> None:
        self.found.append(row.loss)


def curves(asked: argparse.Namespace, record: dict[str, Any], keep: Callable[[], None]) -> None:
    """Train every way with three seeds, a seed of each in turn."""
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
    plans = {way: planned(name, tokens, *common, *words) for way, words in WAYS.items()}
    for seed in range(3):
        for way, (config, made) in plans.items():
            seen = Losses()
            run_trainfit(config, made, tokens, seen, steps, seed=seed, logging_steps=1)
            record["losses"].append({"way": way, "seed": seed, "losses": seen.found})
            keep()
            last = statistics.mean(seen.found[-LAST:])
            print(f"seed {seed}, {way}: the last {LAST} losses {last:.4f}", flush=True)
