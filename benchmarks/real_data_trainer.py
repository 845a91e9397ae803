"""The other side of benchmarks/real_data.py: a plain script with transformers' Trainer.

python benchmarks/real_data_trainer.py SPEC.json    trains and scores, or with `export` in SPEC
scores that folder by AutoModelForSequenceClassification. It imports nothing of trainfit.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

CLASSES = ("negative", "positive")


def read_rows(path: str, tokenizer: Any, max_length: int) -> list[dict[str, Any]]:
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    texts = [row["text"] for row in rows]
    ids = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
    labels = [CLASSES.index(row["label"]) for row in rows]
    return [{"input_ids": one, "labels": y} for one, y in zip(ids, labels, strict=True)]


def scores(prediction: Any) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, f1_score

    found, labels = np.argmax(prediction.predictions, -1), prediction.label_ids
    return {
        "accuracy": float(accuracy_score(labels, found)),
        "f1": float(f1_score(labels, found, zero_division=0)),
    }


def make_trainer(spec: dict[str, Any], model: Any, tokenizer: Any, **parts: Any) -> Trainer:
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=spec["scratch"],
            num_train_epochs=spec["epochs"],
            per_device_train_batch_size=spec["batch"],
            per_device_eval_batch_size=2 * spec["batch"],
            learning_rate=spec["learning_rate"],
            weight_decay=0.01,
            warmup_steps=0.1,  # below 1 it is a share
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="f1",
            logging_steps=10,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=spec["seed"],
        ),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=scores,
        **parts,
    )


def main() -> None:
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(spec["seed"])  # before the head is drawn
    folder = spec.get("export", spec["model"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    named = {
        "id2label": dict(enumerate(CLASSES)),
        "label2id": {c: i for i, c in enumerate(CLASSES)},
    }
    model = AutoModelForSequenceClassification.from_pretrained(folder, **named)
    parts = {
        name: read_rows(spec[name], tokenizer, spec["max_length"])
        for name in ("train", "validation", "test")
    }
    trainer = make_trainer(
        spec, model, tokenizer, train_dataset=parts["train"], eval_dataset=parts["validation"]
    )
    found: dict[str, Any] = {}
    if "export" not in spec:
        trainer.train()
        rows = trainer.state.log_history
        found["validation_f1"] = [row["eval_f1"] for row in rows if "eval_f1" in row]
        found["losses"] = [row["loss"] for row in rows if "loss" in row]
    scored = trainer.predict(parts["test"]).metrics
    found |= {name: scored[f"test_{name}"] for name in ("accuracy", "f1")}
    Path(spec["result"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
