"""Trials per hour: a study by trainfit beside the same study with Trainer and Optuna in a script.

The same trials (a fixed list of parameters), the same folds of the same made-up pairs, the same
epochs and precision, an evaluation of the fold's validation part after each epoch, nothing pruned,
nothing saved, no attention dropout anywhere. Trainer gets the best of its own settings, found first
on one fold: padded to the longest or grouped by length, batches of 32, 64 and 128. Trials
alternate, so that both see the same GPU in the same minutes. Planning is timed by itself: a plan is
made once per effective batch and kept.

It also measures what a trial finds in memory when the one before ran out of it, beside what a fresh
process finds.

python benchmarks/hpo.py --output FILE [--trials 4] [--epochs 1] [--no-peer] [--no-memory] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from torch import nn

from contenders import CUDA, GIB, Sequences, Setting, guarded, pad_to_longest
from nli import TINY, build_config
from trainfit.core.files import write_whole
from trainfit.data.tokens import Dataset
from trainfit.engine.observers import Observer, TrainRow
from trainfit.hpo.objective import Objective
from trainfit.hpo.studies import OpenStudy, open_study, read_setting
from trainfit.hpo.trial_queue import Claim
from trainfit.hpo.workers import run_trial
from trainfit.jobs.classification import ClassifierTask

TRIALS: tuple[dict[str, Any], ...] = tuple(
    {
        "training.learning_rate": rate,
        "training.weight_decay": decay,
        "training.warmup_ratio": warmup,
        "training.scheduler": scheduler,
        "training.effective_batch_size": batch,
    }
    for rate, decay, warmup, scheduler, batch in (
        (2e-5, 0.01, 0.1, "linear", 32),
        (1e-5, 0.03, 0.05, "cosine", 64),
        (3e-5, 0.002, 0.15, "linear", 128),
        (6e-6, 0.08, 0.08, "cosine", 32),
        (2.5e-5, 0.005, 0.12, "linear", 64),
        (1.4e-5, 0.05, 0.06, "cosine", 128),
    )
)
PEERS = tuple(
    Setting(name=f"{how}, batch {batch}", batch=batch, grouped=grouped)
    for how, grouped in (("padded to the longest", False), ("grouped by length", True))
    for batch in (32, 64, 128)
)
SWEEPS = (
    "training.learning_rate=tag(log,interval(5e-6,3e-5))",
    "training.weight_decay=tag(log,interval(0.001,0.1))",
    "training.warmup_ratio=interval(0.05,0.15)",
    "training.scheduler=linear,cosine",
    "training.effective_batch_size=32,64,128",
)


# ── trainfit ──────────────────────────────────────────────────────────────────────────────────


def study_words(sizes: Any, folder: Path) -> list[str]:
    return [
        f"model.name={sizes.model}",
        "model.weights=random",
        "model.method=full",
        "model.freeze_encoder=false",
        "model.pooling=first",
        "model.head_dropout=0.1",
        "model.attention_dropout=0",
        "model.feed_forward_dropout=0.1",
        "model.lora_rank=16",
        f"data.scale={sizes.scale}",
        f"data.max_length={sizes.longest}",
        "data.negative_ratio=1",
        "data.class_weights=false",
        "cv.folds=3",
        f"training.num_epochs={sizes.epochs}",
        "training.early_stopping_patience=null",
        f"runs_dir={folder / 'runs'}",
        f"hpo.trials={sizes.trials}",
        "hpo.study=bench",
        "hpo.pruner=none",
        "hpo.least_steps=1",
        *SWEEPS,
    ]


def open_own(sizes: Any, folder: Path) -> tuple[OpenStudy, Objective]:
    """A study whose trials are those of the list."""
    setting = read_setting("nli", study_words(sizes, folder))
    objective = Objective(setting.composed, "f1")
    opened = open_study(setting, lambda: objective)
    [waiting] = opened.study.get_trials(deepcopy=False)
    opened.database.storage.set_trial_state_values(waiting._trial_id, optuna.trial.TrialState.FAIL)
    opened.study.set_user_attr("note", "the trials are a fixed list")
    for params in TRIALS[: sizes.trials]:
        opened.study.enqueue_trial(params)
    hpo = replace(opened.setting.hpo, retries=0)  # the one that was there is not tried again
    return replace(opened, setting=replace(opened.setting, hpo=hpo)), objective


class Phases(Observer):
    """The seconds of each fold until its first step, in steps, and in evaluations."""

    def __init__(self) -> None:
        self.folds: list[dict[str, float]] = []
        self._last = time.perf_counter()

    def _spent(self, on: str) -> None:
        now = time.perf_counter()
        self.folds[-1][on] = self.folds[-1].get(on, 0.0) + now - self._last
        self._last = now

    def on_start(self, _step: int, _total_steps: int) -> None:
        self.folds.append({})
        self._spent("beginning")

    def on_log(self, _row: TrainRow) -> None:
        self._spent("training")

    def on_evaluation(self, _step: int, _metrics: Any) -> None:
        self._spent("evaluation")


def own_trial(opened: OpenStudy, objective: Objective) -> dict[str, Any]:
    start, phases = time.perf_counter(), Phases()
    queue = opened.queue()
    claim = queue.claim()
    assert isinstance(claim, Claim)
    outcome = run_trial(opened, objective, claim, lambda _trial, _fold: (phases,))
    queue.tell(claim.trial, outcome)
    return {
        "seconds": time.perf_counter() - start,
        "params": claim.params,
        "outcome": outcome.kind,
        "reason": outcome.reason,
        "value": outcome.value,
        "folds": phases.folds,
        **outcome.facts.get("plan", {}),
        "peak_gib": outcome.facts.get("peak_memory_gib"),
    }


def make_plans(opened: OpenStudy, objective: Objective, trials: int) -> list[Any]:
    """What each plan took to make, and what it says."""
    made = []
    for params in TRIALS[:trials]:
        start = time.perf_counter()
        plan = objective.plan(opened.setting.compose(params))
        made.append(
            {
                "effective_batch": params["training.effective_batch_size"],
                "seconds": time.perf_counter() - start,
                "packed": plan.packed,
                "batch_size": plan.batch_size,
                "compile": plan.compile,
                "precision": plan.precision,
            }
        )
    return made


# ── Trainer and Optuna ────────────────────────────────────────────────────────────────────────


def peer_model(name: str) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    with torch.device("cuda" if CUDA else "cpu"):
        model: nn.Module = AutoModelForSequenceClassification.from_config(build_config(name))
    return model


def f1_score(prediction: Any) -> dict[str, float]:
    from sklearn.metrics import f1_score as score

    labels = prediction.label_ids
    return {"f1": float(score(labels, np.argmax(prediction.predictions, -1), zero_division=0))}


def train_fold(sizes: Any, data: Dataset, params: dict[str, Any], setting: Setting) -> float:
    """A fold as a script would train it; returns the best F1 of its epochs."""
    from transformers import Trainer, TrainingArguments

    effective = params["training.effective_batch_size"]
    batch = min(setting.batch, effective)
    scores: list[float] = []

    def compute(prediction: Any) -> dict[str, float]:
        found = f1_score(prediction)
        scores.append(found["f1"])
        return found

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=peer_model(sizes.model),
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=sizes.epochs,
                per_device_train_batch_size=batch,
                per_device_eval_batch_size=4 * setting.batch,
                gradient_accumulation_steps=max(1, effective // batch),
                learning_rate=params["training.learning_rate"],
                weight_decay=params["training.weight_decay"],
                warmup_steps=params["training.warmup_ratio"],  # below 1 it is a share
                lr_scheduler_type=params["training.scheduler"],
                optim="adamw_torch_fused" if CUDA else "adamw_torch",
                bf16=CUDA,
                tf32=CUDA or None,
                train_sampling_strategy="group_by_length" if setting.grouped else "random",
                dataloader_num_workers=sizes.workers,
                dataloader_pin_memory=CUDA,
                eval_strategy="epoch",
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
                seed=42,
            ),
            train_dataset=Sequences(data.train),
            eval_dataset=Sequences(data.validation),
            data_collator=pad_to_longest,
            compute_metrics=compute,
        )
        try:
            trainer.train()
        finally:
            trainer.model = trainer.model_wrapped = trainer.optimizer = None
    return max(scores)


def choose_peer(sizes: Any, data: Dataset, record: dict[str, Any]) -> Setting:
    """Trainer's fastest setting, by a fold of the trial in the middle, each run once to warm up."""
    params = {**TRIALS[0], "training.effective_batch_size": 128}

    def timed(setting: Setting) -> dict[str, Any]:
        start = time.perf_counter()
        train_fold(sizes, data, params, setting)
        return {"seconds": time.perf_counter() - start}

    settings = [replace(s, batch=min(s.batch, sizes.most)) for s in PEERS]
    guarded(lambda: timed(settings[0]))
    record["peer_settings"] = {s.name: guarded(lambda s=s: timed(s)) for s in settings}
    for name, found in record["peer_settings"].items():
        print(f"  {name}: {found}", flush=True)
    found = record["peer_settings"]
    return min(settings, key=lambda s: found[s.name].get("seconds", float("inf")))


def named_peer(name: str | None) -> Setting | None:
    """One of the list, found best before; None: it is to be found."""
    found = [setting for setting in PEERS if setting.name == name]
    if name is not None and not found:
        raise SystemExit(f"no peer {name!r}: it is one of {[s.name for s in PEERS]}")
    return found[0] if found else None


class PeerStudy:
    """The script: Optuna asks, Trainer trains, the mean over folds is told."""

    def __init__(self, sizes: Any, folds: Any, setting: Setting, folder: Path) -> None:
        self._sizes, self._folds, self._setting = sizes, folds, setting
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(
            direction="maximize",
            storage=f"sqlite:///{folder / 'peer.db'}",
            sampler=optuna.samplers.TPESampler(seed=42),
            pruner=optuna.pruners.NopPruner(),
        )
        for params in TRIALS[: sizes.trials]:
            self._study.enqueue_trial(params)

    def _objective(self, trial: optuna.Trial) -> float:
        params = {
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
                "training.effective_batch_size", [32, 64, 128]
            ),
        }
        values = []
        for number, data in enumerate(self._folds):
            values.append(train_fold(self._sizes, data, params, self._setting))
            trial.report(float(np.mean(values)), number)
        return float(np.mean(values))

    def trial(self) -> dict[str, Any]:
        start = time.perf_counter()
        self._study.optimize(self._objective, n_trials=1, gc_after_trial=True)
        last = self._study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))[-1]
        return {
            "seconds": time.perf_counter() - start,
            "params": last.params,
            "value": last.value,
        }


# ── memory after a trial that ran out of it ───────────────────────────────────────────────────


class AtStart(Observer):
    """What is in memory when the first step is about to be taken."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_start(self, _step: int, _total_steps: int) -> None:
        if CUDA and not self.found:
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            self.found = {
                "allocated_mib": torch.cuda.memory_allocated() / 2**20,
                "reserved_mib": torch.cuda.memory_reserved() / 2**20,
                "used_on_the_device_mib": (total - free) / 2**20,
            }


def memory_child(sizes: Any) -> None:
    """A trial in this process: the first one, or one after another that ran out of memory."""
    torch_loss = ClassifierTask.loss
    full = sizes.memory == "after"

    def loss(self: Any, model: Any, batch: Any) -> Any:
        found = torch_loss(self, model, batch)  # its graph is alive when memory runs out
        if full and CUDA:
            torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
        elif full:
            raise torch.OutOfMemoryError("there is no GPU to fill")
        return found

    ClassifierTask.loss = loss  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        opened, objective = open_own(sizes, Path(folder))
        said: dict[str, Any] = {}
        if full:
            said["before"] = own_trial(opened, objective)
            full = False
        watcher = AtStart()
        queue = opened.queue()
        claim = queue.claim()
        assert isinstance(claim, Claim)
        claim.params.update(TRIALS[1])  # the same trial in both processes
        outcome = run_trial(opened, objective, claim, lambda _trial, _fold: (watcher,))
        print(json.dumps({**said, "trial": outcome.kind, "at_start": watcher.found}))


def measure_memory(record: dict[str, Any]) -> None:
    found = {}
    for which in ("fresh", "after"):
        words = [w for w in sys.argv[1:] if w not in ("--no-peer",)]
        done = subprocess.run(
            [sys.executable, __file__, *words, "--memory", which],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ,
        )
        lines = done.stdout.strip().splitlines()
        ok = done.returncode == 0 and lines
        found[which] = json.loads(lines[-1]) if ok else {"error": done.stderr[-600:]}
        print(f"  memory, {which}: {found[which]}", flush=True)
    record["memory"] = found
    starts = [found[which].get("at_start") for which in ("fresh", "after")]
    if all(starts):
        record["memory"]["difference_mib"] = {
            name: starts[1][name] - starts[0][name] for name in starts[0]
        }


# ── together ──────────────────────────────────────────────────────────────────────────────────


def compare(sizes: Any, folder: Path, record: dict[str, Any], keep: Any) -> None:
    opened, objective = open_own(sizes, folder)
    folds = objective._prepare(opened.setting.composed).datasets
    record["data"] = {
        "train": [len(data.train) for data in folds],
        "validation": [len(data.validation) for data in folds],
        "mean_length": float(folds[0].train.lengths.mean()),
    }
    print(f"  data {record['data']}", flush=True)
    record["plans"] = make_plans(opened, objective, sizes.trials)
    print(f"  plans {record['plans']}", flush=True)
    keep()
    peer = None
    if not sizes.no_peer:
        chosen = named_peer(sizes.peer) or choose_peer(sizes, folds[0], record)
        record["peer_setting"] = chosen.name
        peer = PeerStudy(sizes, folds, chosen, folder)
    for number in range(sizes.trials):
        own = own_trial(opened, objective)
        record["trainfit"].append(own)
        print(f"  trial {number}: trainfit {own['seconds']:.1f} s {own['outcome']}", flush=True)
        if peer is not None:
            found = guarded(peer.trial)
            record["peer"].append(found)
            print(f"  trial {number}: peer {found.get('seconds')} s", flush=True)
        keep()
    record["summary"] = summary(record)


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """Trials per hour over all trials, and without the first, in which everything warms up.

    Planning is no part of a trial's seconds; two ratios count it, over the trials that there were
    and over 50 of them, whose later ones take what the later ones took here.
    """
    found: dict[str, Any] = {}
    all_trials, fifty = {}, {}
    for who in ("trainfit", "peer"):
        seconds = [trial["seconds"] for trial in record[who] if "seconds" in trial]
        if seconds:
            warm = statistics.mean(seconds[1:] or seconds)
            found[who] = {
                "trials_per_hour": 3600 * len(seconds) / sum(seconds),
                "trials_per_hour_warm": 3600 / warm,
            }
            all_trials[who], fifty[who] = sum(seconds), seconds[0] + 49 * warm
    found["shares_of_later_trials"] = shares(record["trainfit"][1:])
    planning = sum(plan["seconds"] for plan in record["plans"])
    found["planning_seconds"] = planning
    if "peer" in found and "trainfit" in found:
        for key in ("trials_per_hour", "trials_per_hour_warm"):
            found[f"times_{key}"] = found["trainfit"][key] / found["peer"][key]
        for key, took in (
            ("times_with_planning", all_trials),
            ("times_in_50_trials_with_planning", fifty),
        ):
            found[key] = took["peer"] / (planning + took["trainfit"])
    return found


def shares(trials: list[dict[str, Any]]) -> dict[str, float]:
    """How much of these trials' time went where; the rest is between folds and at the end."""
    total = sum(trial["seconds"] for trial in trials)
    spent = {
        phase: sum(fold.get(phase, 0.0) for trial in trials for fold in trial["folds"]) / total
        for phase in ("beginning", "training", "evaluation")
    }
    return {**spent, "rest": 1 - sum(spent.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=4, choices=range(2, len(TRIALS) + 1))
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--model", default="deberta-v3-base")
    parser.add_argument("--workers", type=int, default=4, help="loader processes of the peer")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--peer", help="its setting, where it need not be found again")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory", choices=("fresh", "after"), help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for the CPU")
    sizes = parser.parse_args()
    sizes.scale, sizes.longest, sizes.most = "full", 512, 128
    with tempfile.TemporaryDirectory() as folder:
        if sizes.tiny:
            sizes.scale, sizes.longest, sizes.most, sizes.workers = "small", 48, 32, 0
            sizes.trials = min(sizes.trials, 2)
            model = Path(folder) / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 1}))
            sizes.model = str(model)
        if sizes.memory:
            memory_child(sizes)
            return
        work(sizes, Path(folder))


def work(sizes: Any, folder: Path) -> None:
    """Everything that was asked for, written down as it comes."""
    import transformers

    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/hpo.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": torch.cuda.get_device_name() if CUDA else platform.processor() or "CPU",
        "memory_gib": torch.cuda.mem_get_info()[1] / GIB if CUDA else None,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "optuna": optuna.__version__,
            "python": platform.python_version(),
        },
        "model": "a tiny BERT" if sizes.tiny else sizes.model,
        "trainfit": [],
        "peer": [],
    }

    def keep() -> None:
        write_whole(sizes.output, json.dumps(record, indent=1) + "\n")

    compare(sizes, folder, record, keep)
    keep()
    print(json.dumps(record["summary"], indent=1), flush=True)
    if not sizes.no_memory:
        measure_memory(record)
        keep()


if __name__ == "__main__":
    main()
