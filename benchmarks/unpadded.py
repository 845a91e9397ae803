"""A plain classification script with Trainer, with and without `trainfit.speed_up`, in turns.

Models have the real shapes and random weights, texts have random tokens and lengths as those of
posts (120 tokens on average, up to 512), batches of 32, bf16. The script pads each batch to its
longest text, or all to 512. Each run is a fresh model and Trainer in this process: steps per second
come from the steps after the warm-up. --exact compares the losses of each step in float32 with
dropout off instead. Each run is written down as it ends.

python benchmarks/unpadded.py --out FILE [--models bert modernbert deberta] [--padding longest 512]
    [--arms plain unpadded] [--rounds 3] [--steps 60] [--exact] [--tiny]

One call adds a record to FILE. --arms also knows plain-compiled and unpadded-compiled
(TrainingArguments' torch_compile). --tiny shows on a CPU that all works.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import trainfit
from trainfit.hardware.model_shapes import model_shape, transformers_config

MODELS = {"bert": "bert-base", "modernbert": "modernbert-base", "deberta": "deberta-v3-base"}
ARMS = ("plain", "unpadded", "plain-compiled", "unpadded-compiled")
LONGEST = 512
TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
TINY_MODERN = {
    "layer_types": ["sliding_attention", "full_attention"],
    **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
}
CUDA = torch.cuda.is_available()


def config_of(name: str, tiny: bool, dropout: bool) -> Any:
    shape = model_shape(MODELS[name])
    small: dict[str, Any] = {}
    if tiny:
        small = TINY | (TINY_MODERN if name == "modernbert" else {})
    config = transformers_config(shape, **small, num_labels=3)
    for field in () if dropout else [one for one in vars(config) if "dropout" in one]:
        setattr(config, field, 0.0)
    return config


def lengths_of(count: int, average: float, seed: int) -> list[int]:
    """Lengths as of posts: log-normal, at least 8, at most 512."""
    draw = torch.Generator().manual_seed(seed)
    spread = 0.8
    centre = torch.log(torch.tensor(average)).item() - spread**2 / 2
    drawn = torch.exp(centre + spread * torch.randn(count, generator=draw))
    return [int(one) for one in drawn.round().clamp(8, LONGEST)]


def texts(count: int, vocabulary: int, average: float) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(5, vocabulary, (length,), generator=draw).tolist(),
            "labels": at % 3,
        }
        for at, length in enumerate(lengths_of(count, average, 0))
    ]


class Collate:
    """Pads to the longest text of the batch, or to a fixed width."""

    def __init__(self, padding: str, pad: int) -> None:
        self.width = None if padding == "longest" else int(padding)
        self.pad = pad
        self.real: list[int] = []
        self.padded: list[int] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = self.width or max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), width), self.pad)
        mask = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            size = len(row["input_ids"])
            ids[at, :size] = torch.tensor(row["input_ids"])
            mask[at, :size] = 1
        self.real.append(int(mask.sum()))
        self.padded.append(mask.numel())
        labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Clock(TrainerCallback):
    """Times the steps after the warm-up."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.began = self.seconds = 0.0

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_rest: Any) -> None:
        if state.global_step in (self.warm_up, state.max_steps):
            if CUDA:
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.began
            self.began = time.perf_counter()


def train(name: str, padding: str, arm: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run one training; return its speed, or its losses with --exact."""
    set_seed(0)
    config = config_of(name, given.tiny, dropout=not given.exact)
    model = AutoModelForSequenceClassification.from_config(config)
    count = given.batch * (given.warm_up + given.steps)
    rows = texts(count, config.vocab_size, 24.0 if given.tiny else 120.0)
    collate, clock = Collate(padding, config.pad_token_id or 0), Clock(given.warm_up)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=given.batch,
                max_steps=given.warm_up + given.steps,
                learning_rate=2e-5,
                bf16=CUDA and not given.exact,
                torch_compile=arm.endswith("compiled"),
                logging_steps=1 if given.exact else 10_000,
                logging_first_step=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=0,
            ),
            train_dataset=rows,
            data_collator=collate,
            callbacks=[clock],
        )
        if arm.startswith("unpadded"):
            trainfit.speed_up(trainer, quiet=True)
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    found: dict[str, Any] = {
        "model": name,
        "padding": padding,
        "arm": arm,
        "steps_per_second": given.steps / clock.seconds,
        "real_tokens": mean(collate.real),
        "padded_tokens": mean(collate.padded),
    }
    if CUDA:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if given.exact:
        found["losses"] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return found


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each model, padding and arm: the speed, beside plain; with --exact how losses differ."""
    cases = sorted(
        {(run["model"], run["padding"], run["arm"]) for run in runs if "error" not in run}
    )
    lines = []
    for model, padding, arm in cases:
        mine = _of(runs, model, padding, arm)
        plain = _of(runs, model, padding, "plain")
        speed = median(run["steps_per_second"] for run in mine)
        line = {"model": model, "padding": padding, "arm": arm, "steps_per_second": speed}
        if plain:
            line["times"] = speed / median(run["steps_per_second"] for run in plain)
        if plain and "losses" in plain[0]:
            both = zip(mine[0]["losses"], plain[0]["losses"], strict=True)
            line["largest_difference"] = max(abs(one - other) for one, other in both)
        lines.append(line)
    return lines


def _of(runs: list[dict[str, Any]], *case: str) -> list[dict[str, Any]]:
    keys = ("model", "padding", "arm")
    return [run for run in runs if "error" not in run and tuple(run[key] for key in keys) == case]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "trainfit": trainfit.__version__}
    for name in ("torch", "transformers", "accelerate"):
        found[name] = importlib.metadata.version(name)
    return found


def save(out: Path, record: dict[str, Any]) -> None:
    """Write the record of this call after those of earlier ones."""
    earlier = json.loads(out.read_text())["records"] if out.exists() else []
    earlier = [one for one in earlier if one["began"] != record["began"]]
    out.write_text(json.dumps({"records": [*earlier, record]}, indent=1) + "\n")


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--padding", nargs="+", choices=("longest", "512"), default=["longest"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["plain", "unpadded"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--exact", action="store_true", help="compare losses in float32")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    return parser.parse_args()


def main() -> None:
    given = asked()
    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/unpadded.py", *sys.argv[1:]]),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": torch.cuda.get_device_name() if CUDA else platform.processor() or "CPU",
        "versions": versions(),
        "runs": [],
    }
    cases = [(name, padding) for name in given.models for padding in given.padding]
    for name, padding in cases:
        for round_ in range(1 if given.exact else given.rounds):
            for arm in given.arms:
                try:
                    run = train(name, padding, arm, given)
                except Exception as error:  # noqa: BLE001 a failed run is a row too
                    run = {"model": name, "padding": padding, "arm": arm, "error": repr(error)}
                record["runs"].append(run | {"round": round_})
                record["summary"] = summary(record["runs"])
                save(given.out, record)
    for line in record["summary"]:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
