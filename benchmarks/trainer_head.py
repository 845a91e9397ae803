"""The other side of benchmarks/heads.py: one head trained by transformers' Trainer, several ways.

Tokenised once, before any clock runs. Every setting has a new model, the fused AdamW and TF32; its
first epoch is the warm-up, and the device is waited for at both ends of the rest. It imports
nothing of trainfit.

python benchmarks/trainer_head.py SPEC.json    heads.py writes the file, and reads the result
"""

from __future__ import annotations

import csv
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
CUDA = torch.cuda.is_available()
HEADS = {
    "pairs": ("AutoModelForSequenceClassification", "DataCollatorWithPadding"),
    "labels": ("AutoModelForSequenceClassification", "DataCollatorWithPadding"),
    "tags": ("AutoModelForTokenClassification", "DataCollatorForTokenClassification"),
}
"""Classes of transformers by the kind of the data."""


def read_rows(tokenizer: Any) -> tuple[list[dict[str, Any]], int]:
    """Token ids and labels of every training row, and the number of classes."""
    path, kind = Path(SPEC["data"]), SPEC["kind"]
    most = {"truncation": True, "max_length": SPEC["max_length"]}
    with path.open(newline="", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file] if kind == "tags" else list(csv.DictReader(file))
    if kind == "tags":
        encoded = tokenizer([row["tokens"] for row in rows], is_split_into_words=True, **most)
        classes = sorted({tag for row in rows for tag in row["tags"]})
        labels: list[Any] = [
            _first_tokens(encoded.word_ids(at), [classes.index(tag) for tag in row["tags"]])
            for at, row in enumerate(rows)
        ]
    elif kind == "pairs":
        texts = ([row[name] for row in rows] for name in ("text1", "text2"))
        encoded = tokenizer(*texts, **most)
        classes = sorted({row["label"] for row in rows})
        labels = [classes.index(row["label"]) for row in rows]
    else:
        encoded = tokenizer([row["text"] for row in rows], **most)
        told = [row["labels"].split("|") for row in rows]
        classes = sorted({name for names in told for name in names if name})
        labels = [[float(name in names) for name in classes] for names in told]
    names = [name for name in encoded if name != "attention_mask"]
    made = [
        {"labels": label, **{name: encoded[name][at] for name in names}}
        for at, label in enumerate(labels)
    ]
    return made, len(classes)


def _first_tokens(words: list[int | None], tags: list[int]) -> list[int]:
    """A word's tag at its first token, and nothing to learn at the others."""
    before = [None, *words[:-1]]
    return [
        -100 if word is None or word == last else tags[word]
        for word, last in zip(words, before, strict=True)
    ]


class Clock(TrainerCallback):
    """Seconds of the steps after the first epoch."""

    def __init__(self) -> None:
        self.began = self.seconds = 0.0

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_rest: Any) -> None:
        if state.global_step not in (SPEC["warm_up"], SPEC["steps"]):
            return
        if CUDA:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.began, self.seconds = now, now - self.began


def measure(setting: dict[str, Any], rows: list[Any], tokenizer: Any, classes: int) -> Any:
    """Train in one setting."""
    head, collator = HEADS[SPEC["kind"]]
    torch.manual_seed(SPEC["seed"])
    several = {"problem_type": "multi_label_classification"} if SPEC["kind"] == "labels" else {}
    model = getattr(transformers, head).from_pretrained(
        SPEC["model"], num_labels=classes, dtype=torch.float32, **several
    )
    clock = Clock()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=SPEC["scratch"],
            max_steps=SPEC["steps"],
            per_device_train_batch_size=SPEC["batch"],
            learning_rate=2e-5,
            weight_decay=0.01,
            warmup_steps=0.1,  # below 1 it is a share
            optim="adamw_torch_fused",
            bf16=CUDA,
            tf32=True if CUDA else None,
            use_cpu=not CUDA,
            dataloader_num_workers=SPEC["workers"],
            dataloader_persistent_workers=SPEC["workers"] > 0,
            dataloader_pin_memory=CUDA,
            save_strategy="no",
            logging_steps=10,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            seed=SPEC["seed"],
            **setting,
        ),
        train_dataset=rows,
        data_collator=getattr(transformers, collator)(tokenizer, pad_to_multiple_of=8),
        callbacks=[clock],
    )
    began = time.perf_counter()
    trainer.train()
    timed = SPEC["steps"] - SPEC["warm_up"]
    return {
        "samples_per_second": timed * SPEC["batch"] / clock.seconds,
        "timed_steps": timed,
        "timed_seconds": clock.seconds,
        "seconds": time.perf_counter() - began,
        "compiled": hasattr(trainer.model_wrapped, "_orig_mod"),
        "attention": model.config._attn_implementation,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else None,
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SPEC["model"])
    rows, classes = read_rows(tokenizer)
    lengths = [len(row["input_ids"]) for row in rows]
    found: dict[str, Any] = {"mean_tokens": sum(lengths) / len(lengths), "settings": {}}
    for name, setting in SPEC["settings"].items():
        try:
            found["settings"][name] = measure(setting, rows, tokenizer, classes)
        except Exception as error:  # noqa: BLE001 - the other settings go on
            found["settings"][name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        Path(SPEC["result"]).write_text(json.dumps(found))
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
