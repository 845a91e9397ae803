"""A whole job with transformers' Trainer, as a careful user writes it.

bf16 and TF32, the fused AdamW, samples grouped by length, loader processes, an evaluation and a
checkpoint each epoch, the best of them loaded at the end and scored on what was held out, fold by
fold; tokenised once for all folds. DoRA is peft's. It imports nothing of trainfit.

python benchmarks/trainer_job.py SPEC.json    jobs.py writes the file, and reads the result
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
BEGAN = float(os.environ.get("JOB_BEGAN", time.time()))
"""Time at which the process was started."""

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

CUDA = torch.cuda.is_available()
if SPEC.get("threads"):
    torch.set_num_threads(SPEC["threads"])
STAGES: dict[str, float] = {"start": time.time() - BEGAN}
RESULT: dict[str, Any] = {"stages": STAGES, "folds": []}


def keep(**found: Any) -> None:
    """Write down what is known: the machine may be gone the next moment."""
    RESULT.update(found)
    Path(SPEC["result"]).write_text(json.dumps(RESULT))


@contextmanager
def stage(name: str) -> Iterator[None]:
    began = time.time()
    try:
        yield
    finally:
        STAGES[name] = STAGES.get(name, 0.0) + time.time() - began


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


class Watch(TrainerCallback):
    """The first finished update, and the speed after the first quarter of the steps."""

    def __init__(self) -> None:
        self.begun = 0.0

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_rest: Any) -> None:
        step, last = state.global_step, state.max_steps
        if step == 1 and "first_update_seconds" not in RESULT:
            wait()
            keep(first_update_seconds=time.time() - BEGAN)
        if SPEC.get("max_steps") and step in (last // 4, last):
            wait()
            if step == last:
                seconds = time.time() - self.begun
                count = (last - last // 4) * SPEC["batch"]
                keep(samples_per_second=count / seconds)
            self.begun = time.time()


class Timed(Trainer):
    """Trainer that tells where the time goes."""

    def evaluate(self, *args: Any, **options: Any) -> Any:
        wait()
        with stage("evaluation"):
            return super().evaluate(*args, **options)

    def _save_checkpoint(self, *args: Any, **options: Any) -> Any:
        wait()
        with stage("checkpoint"):
            return super()._save_checkpoint(*args, **options)


# ── classification ────────────────────────────────────────────────────────────────────────────


def read_pairs(tokenizer: Any) -> list[dict[str, Any]]:
    """Every post with every criterion; a pair that is too long loses the end of its post."""
    folder = Path(SPEC["data"])
    csv.field_size_limit(10**9)
    with (folder / "redsm5_posts.csv").open(newline="") as file:
        posts = {row["post_id"]: row["text"] for row in csv.DictReader(file)}
    with (folder / "redsm5_annotations.csv").open(newline="") as file:
        marked = {
            (row["post_id"], row["DSM5_symptom"])
            for row in csv.DictReader(file)
            if row["status"] == "1"
        }
    criteria = json.loads((folder / "criteria.json").read_text())
    pairs = [(post, symptom) for post in posts for symptom in criteria]
    encoded = tokenizer(
        [posts[post] for post, _ in pairs],
        [criteria[symptom] for _, symptom in pairs],
        truncation="only_first",
        max_length=SPEC["max_length"],
    )
    return _rows(encoded, [int(pair in marked) for pair in pairs])


def read_texts(tokenizer: Any) -> list[dict[str, Any]]:
    with (Path(SPEC["data"]) / "texts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    classes = sorted({row["label"] for row in rows})
    texts = [row["text"] for row in rows]
    encoded = tokenizer(texts, truncation=True, max_length=SPEC["max_length"])
    return _rows(encoded, [classes.index(row["label"]) for row in rows])


def _rows(encoded: Any, labels: list[int]) -> list[dict[str, Any]]:
    names = [name for name in encoded if name != "attention_mask"]
    return [
        {"labels": label, **{name: encoded[name][at] for name in names}}
        for at, label in enumerate(labels)
    ]


class MaxPooled(torch.nn.Module):
    """The encoder of a classifier, the maximum of each feature over the tokens, a linear head.

    transformers' own head averages them. Evidence is a few words of a post: they stand out in a
    maximum, and the same encoder learns far more of them.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.config, self.encoder = whole.config, whole.base_model
        self.head = torch.nn.Linear(whole.config.hidden_size, 2)
        torch.nn.init.normal_(self.head.weight, std=0.02)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, attention_mask: Any, labels: Any = None, **inputs: Any) -> dict[str, Any]:
        hidden = self.encoder(attention_mask=attention_mask, **inputs).last_hidden_state
        seen = hidden.masked_fill(attention_mask[..., None] == 0, float("-inf"))
        logits = self.head(seen.amax(1))
        if labels is None:  # which Trainer takes where it computes the loss itself
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def build(tokenizer: Any) -> Any:
    """The pretrained encoder with a new head, or with DoRA on its attention, or frozen."""
    method = SPEC["method"]
    half = CUDA and method != "full"  # frozen weights need no master copy
    model = AutoModelForSequenceClassification.from_pretrained(
        SPEC["model"], num_labels=2, dtype=torch.bfloat16 if half else torch.float32
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    if SPEC.get("pooling") == "max":
        model = MaxPooled(model)
    if method == "frozen":
        model.base_model.requires_grad_(False)
    if method == "dora":
        from peft import LoraConfig, TaskType, get_peft_model

        config = LoraConfig(
            task_type=TaskType.SEQ_CLS,
            r=16,
            lora_alpha=32,
            lora_dropout=0.05,
            use_dora=True,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        )
        model = get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def f1_of(prediction: Any) -> dict[str, float]:
    from sklearn.metrics import f1_score

    found = np.argmax(prediction.predictions, -1)
    return {"f1": float(f1_score(prediction.label_ids, found, zero_division=0))}


def weighted_loss(labels: list[int]) -> Any:
    """Cross-entropy with each class weighed against its share."""
    counts = np.bincount(labels, minlength=2)
    weights = torch.tensor(len(labels) / (2 * np.maximum(counts, 1)), dtype=torch.float32)

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        del num_items_in_batch
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
        return torch.nn.functional.cross_entropy(
            logits.float(), labels.view(-1), weight=weights.to(logits.device)
        )

    return loss


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    bf16 = SPEC["precision"] == "bf16"
    steps = SPEC.get("max_steps")
    when = "no" if steps else "epoch"
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": SPEC["epochs"],
        "max_steps": steps or -1,
        "per_device_train_batch_size": SPEC["batch"],
        "per_device_eval_batch_size": 2 * max(64, SPEC["batch"]),
        "learning_rate": SPEC["learning_rate"],
        "weight_decay": 0.01,
        "warmup_steps": 0.1,  # below 1 it is a share
        "optim": "adamw_torch_fused",
        "bf16": bf16,
        "tf32": True if CUDA else None,
        "use_cpu": not CUDA,
        "train_sampling_strategy": "group_by_length",
        "dataloader_num_workers": SPEC["workers"],
        "dataloader_persistent_workers": SPEC["workers"] > 0,
        "dataloader_pin_memory": CUDA,
        "eval_strategy": when,
        "save_strategy": when,
        "save_total_limit": 1,
        "load_best_model_at_end": not steps,
        "metric_for_best_model": "f1",
        "logging_steps": 10,
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "seed": SPEC["seed"],
    }
    return TrainingArguments(**{**settings, **changes})


def train_fold(
    rows: list[dict[str, Any]],
    part: dict[str, list[int]],
    tokenizer: Any,
    *,
    scored: str | None = "test",
    **changes: Any,
) -> float:
    """A fold: train, choose the epoch, score a part of it; returns its F1."""
    folder = Path(SPEC["scratch"]) / "checkpoints"
    train, validation = ([rows[at] for at in part[name]] for name in ("train", "validation"))
    before = sum(STAGES.values())
    began = time.time()
    with stage("build"):
        model = build(tokenizer)
    callbacks: list[TrainerCallback] = [Watch()]
    if SPEC.get("patience"):
        callbacks.append(EarlyStoppingCallback(SPEC["patience"]))
    trainer = Timed(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=train,
        eval_dataset=validation,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
        compute_metrics=f1_of,
        compute_loss_func=weighted_loss([row["labels"] for row in train]),
        callbacks=callbacks,
    )
    trainer.train()
    wait()
    inside = sum(STAGES.values()) - before
    STAGES["steps"] = STAGES.get("steps", 0.0) + time.time() - began - inside
    score = 0.0
    if scored == "test":
        with stage("judge"):
            test = [rows[at] for at in part["test"]]
            score = trainer.predict(test).metrics["test_f1"]
    elif scored == "validation":
        score = max(row["eval_f1"] for row in trainer.state.log_history if "eval_f1" in row)
    shutil.rmtree(folder, ignore_errors=True)
    steps = trainer.state.global_step
    RESULT["folds"].append({"seconds": time.time() - began, "f1": score, "steps": steps})
    keep(f1=float(np.mean([fold["f1"] for fold in RESULT["folds"]])))
    return score


def classify() -> None:
    with stage("data"):
        tokenizer = AutoTokenizer.from_pretrained(SPEC["model"])
        rows = read_pairs(tokenizer) if SPEC["kind"] == "pairs" else read_texts(tokenizer)
        parts = json.loads(Path(SPEC["parts"]).read_text())
    only_steps = SPEC.get("max_steps") is not None
    for part in parts["folds"]:
        train_fold(rows, part, tokenizer, scored=None if only_steps else "test")


# ── a study ───────────────────────────────────────────────────────────────────────────────────


def search() -> None:
    """Optuna asks, Trainer trains the folds, the mean of their F1 is told; then the best model."""
    import optuna

    with stage("data"):
        tokenizer = AutoTokenizer.from_pretrained(SPEC["model"])
        rows = read_pairs(tokenizer)
        parts = json.loads(Path(SPEC["parts"]).read_text())
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        storage=f"sqlite:///{SPEC['scratch']}/trainer.db",
        sampler=optuna.samplers.TPESampler(seed=SPEC["seed"]),
        pruner=optuna.pruners.NopPruner(),
    )
    trials = json.loads(Path(SPEC["trials_file"]).read_text())
    for params in trials:
        study.enqueue_trial(params)
    drawn = {params["training.effective_batch_size"] for params in trials}
    batches = sorted(drawn | set(SPEC["batches"]))

    def objective(trial: optuna.Trial) -> float:
        changes = changes_of(
            {
                "training.learning_rate": trial.suggest_float(
                    "training.learning_rate", 5e-6, 3e-5, log=True
                ),
                "training.weight_decay": trial.suggest_float(
                    "training.weight_decay", 1e-3, 0.1, log=True
                ),
                "training.warmup_ratio": trial.suggest_float("training.warmup_ratio", 0.05, 0.15),
                "training.scheduler": trial.suggest_categorical(
                    "training.scheduler", ["linear", "cosine"]
                ),
                "training.effective_batch_size": trial.suggest_categorical(
                    "training.effective_batch_size", batches
                ),
            }
        )
        plain = {"save_strategy": "no", "load_best_model_at_end": False}
        values = [
            train_fold(rows, part, tokenizer, scored="validation", **changes, **plain)
            for part in parts["folds"]
        ]
        return float(np.mean(values))

    study.optimize(objective, n_trials=SPEC["trials"])
    RESULT["trials"] = [{"params": t.params, "value": t.value} for t in study.trials]
    keep(f1=train_fold(rows, parts["final"], tokenizer, **changes_of(study.best_params)))


def changes_of(params: dict[str, Any]) -> dict[str, Any]:
    """A trial's parameters as arguments of Trainer."""
    names = {
        "training.learning_rate": "learning_rate",
        "training.weight_decay": "weight_decay",
        "training.warmup_ratio": "warmup_steps",
        "training.scheduler": "lr_scheduler_type",
        "training.effective_batch_size": "per_device_train_batch_size",
    }
    return {names[name]: value for name, value in params.items()}


# ── pretraining ───────────────────────────────────────────────────────────────────────────────


class Blocks(torch.utils.data.Dataset[Any]):
    """Blocks of a stream of tokens."""

    def __init__(self, path: Path, block: int, most: int | None = None) -> None:
        self.ids, self.block = np.memmap(path, dtype="<u2", mode="r"), block
        self.count = min(len(self.ids) // block, most or len(self.ids))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> dict[str, Any]:
        row = torch.from_numpy(self.ids[at * self.block : (at + 1) * self.block].astype(np.int64))
        return {"input_ids": row, "labels": row}


def pretrain() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator

    with stage("data"):
        block, folder = SPEC["max_length"], Path(SPEC["data"])
        train = Blocks(folder / "train.bin", block)
        validation = Blocks(folder / "val.bin", block, SPEC["evaluated"])
    with stage("build"):
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=SPEC["vocabulary"],
                n_positions=block,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                **SPEC["shape"],
            )
        )
    began, before = time.time(), sum(STAGES.values())
    trainer = Timed(
        model=model,
        args=arguments(
            Path(SPEC["scratch"]) / "checkpoints",
            per_device_eval_batch_size=SPEC["batch"],
            train_sampling_strategy="random",
            torch_compile=SPEC["compile"],
            lr_scheduler_type="cosine",
            weight_decay=0.1,
            adam_beta2=0.95,
            save_strategy="steps",
            save_steps=SPEC["max_steps"],
        ),
        train_dataset=train,
        eval_dataset=validation,
        data_collator=default_data_collator,
        callbacks=[Watch()],
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    inside = sum(STAGES.values()) - before
    STAGES["steps"] = time.time() - began - inside
    with stage("export"):
        trainer.save_model(str(Path(SPEC["scratch"]) / "export"))
    keep(val_loss=loss)


if __name__ == "__main__":
    {"pairs": classify, "texts": classify, "study": search, "tokens": pretrain}[SPEC["job_kind"]]()
    STAGES["other"] = max(0.0, time.time() - BEGAN - sum(STAGES.values()))
    keep(seconds=time.time() - BEGAN)
