"""A training script as people write it, which knows nothing of trainfit.

python benchmarks/plain_script.py FOLDER RESULT --steps 250 [--kind trainer | cross-encoder]
    [--padding longest | 512] [--batch 32]

Trains a classifier of FOLDER/config.json with transformers' Trainer on the token ids of
FOLDER/rows.json, or a CrossEncoder of that folder on the pairs of texts of FOLDER/pairs.json in a
loop under Accelerate. `own_scripts.py` writes the folder, and runs this alone and by trainfit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

CUDA = torch.cuda.is_available()


class Clock:
    """Times the second half of the steps, with the GPU's work done at both ends."""

    def __init__(self, steps: int, batch: int) -> None:
        self.steps, self.batch, self.done = steps, batch, 0
        self.began = self.half = self.ended = time.perf_counter()

    def stepped(self) -> None:
        self.done += 1
        if self.done in (self.steps // 2, self.steps):
            if CUDA:
                torch.cuda.synchronize()
            self.half, self.ended = self.ended, time.perf_counter()

    def figures(self) -> dict[str, float]:
        samples = self.batch * (self.steps - self.steps // 2)
        return {
            "samples_per_second": samples / (self.ended - self.half),
            "training_seconds": self.ended - self.began,
        }


class Collate:
    """Pads to the longest text of the batch, or to a fixed width."""

    def __init__(self, padding: str, pad: int) -> None:
        self.width = None if padding == "longest" else int(padding)
        self.pad = pad

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = self.width or max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), width), self.pad)
        mask = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            size = len(row["input_ids"])
            ids[at, :size] = torch.tensor(row["input_ids"])
            mask[at, :size] = 1
        labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def with_trainer(given: argparse.Namespace) -> Clock:
    from transformers import (
        AutoConfig,
        AutoModelForSequenceClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    set_seed(0)
    config = AutoConfig.from_pretrained(given.folder)
    model = AutoModelForSequenceClassification.from_config(config)
    clock = Clock(given.steps, given.batch)

    class Timed(TrainerCallback):
        def on_train_begin(self, *_: Any, **_rest: Any) -> None:
            clock.began = time.perf_counter()

        def on_step_end(self, *_: Any, **_rest: Any) -> None:
            clock.stepped()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=given.batch,
            max_steps=given.steps,
            learning_rate=2e-5,
            bf16=CUDA,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(
            model=model,
            args=arguments,
            train_dataset=json.loads((given.folder / "rows.json").read_text()),
            data_collator=Collate(given.padding, config.pad_token_id or 0),
            callbacks=[Timed()],
        ).train()
    return clock


def with_accelerate(given: argparse.Namespace) -> Clock:
    from accelerate import Accelerator
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    torch.manual_seed(0)
    model = CrossEncoder(str(given.folder), num_labels=1, max_length=512)
    accelerator = Accelerator(mixed_precision="bf16" if CUDA else "no")

    def collate(rows: list[tuple[str, str, int]]) -> dict[str, Any]:
        queries, texts, labels = zip(*rows, strict=True)
        return {"queries": queries, "texts": texts, "labels": torch.tensor(labels)}

    rows = json.loads((given.folder / "pairs.json").read_text())
    loader = torch.utils.data.DataLoader(rows, batch_size=given.batch, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    loss_of = BinaryCrossEntropyLoss(model)
    clock = Clock(given.steps, given.batch)
    for batch in loader:
        with accelerator.autocast():
            loss = loss_of([batch["queries"], batch["texts"]], batch["labels"])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.stepped()
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kind", choices=("trainer", "cross-encoder"), default="trainer")
    parser.add_argument("--padding", default="longest")
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args()
    clock = (with_trainer if given.kind == "trainer" else with_accelerate)(given)
    given.result.write_text(json.dumps(clock.figures()))


if __name__ == "__main__":
    main()
