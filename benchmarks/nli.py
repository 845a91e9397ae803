"""How fast classifiers are fine-tuned: trainfit beside transformers' Trainer and Lightning.

The same model shape with random weights, the same sequences (as long as ReDSM5's, at most 512
tokens), the same precision, no attention dropout anywhere. trainfit's run is the engine's own, with
the settings that its planner chose; the peers' rounds come in between, so that all see the same GPU
in the same minutes. Trainer is given a fixed list of settings, and its defaults.

python benchmarks/nli.py --output FILE [--models bert-base …] [--tiny]
python benchmarks/nli.py --output FILE --cpu        a small model on a CPU, lengths as above
python benchmarks/nli.py --output FILE --curves     the loss over 300 steps, three seeds
python benchmarks/nli.py --output FILE --curves --exact       without dropout and warm-up
python benchmarks/nli.py --output FILE --warmups    compiling, cold and in a second process
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import loss_curves
from contenders import CUDA, GIB, Sequences, Setting, guarded, take_turn, trainer_round
from trainfit.conf import compose
from trainfit.core import codec
from trainfit.core.files import write_whole
from trainfit.core.plan_records import Plan
from trainfit.data.tokens import Tokens
from trainfit.engine.loop import train
from trainfit.engine.observers import Observer, TrainRow
from trainfit.jobs.classification import ClassifierTask, encoder_settings, model_decisions
from trainfit.jobs.job_plan import assumed_lengths, plan
from trainfit.jobs.models.backbone import build_encoder
from trainfit.jobs.models.building import on_device
from trainfit.jobs.models.classifier import EncoderClassifier, build_classifier
from trainfit.jobs.models.classifier_settings import settings_from
from trainfit.runtime import applied

MODELS = ("gemma-3-1b-it", "deberta-v3-base", "bert-base", "modernbert-base")
SETTINGS = (
    Setting(name="trainer defaults", batch=8, precision="fp32", workers=0, defaults=True),
    Setting(name="trainer, batch 32", batch=32),
    Setting(name="trainer, batch 128", batch=128),
    Setting(name="trainer, by length, batch 64", batch=64, grouped=True),
    Setting(name="trainer, by length, batch 128", batch=128, grouped=True),
    Setting(name="lightning, batch 32", batch=32, kind="lightning", once=True),
)
ON_A_CPU = (
    Setting(name="trainer defaults", batch=8, precision="fp32", workers=0, defaults=True),
    Setting(name="trainer, batch 16", batch=16, workers=0),
    Setting(name="trainer, by length, batch 16", batch=16, grouped=True, workers=0),
)
METHODS = ("full", "lora", "dora", "frozen")
WARM_UP = 12
TINY = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 2000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}


def sequences(count: int, longest: int, words: int = 1900, seed: int = 0) -> Tokens:
    """Random tokens; one in eight is of a kind that only sequences of its label have."""
    draws = np.random.default_rng(seed)
    lengths = draws.permutation(assumed_lengths("nli", longest))[:count].astype(np.int64)
    labels = draws.integers(0, 2, count)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    ids = draws.integers(300, words, int(lengths.sum()))
    telling = draws.random(len(ids)) < 0.125
    kind = draws.integers(100, 200, len(ids)) + 100 * np.repeat(labels, lengths)
    ids = np.where(telling, kind, ids).astype(np.int32)
    return Tokens(ids=ids, starts=starts, lengths=lengths, labels=labels)


class Peer(nn.Module):
    """trainfit's own classifier as Trainer wants a model, for equal weights and mathematics."""

    def __init__(self, model: EncoderClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any, **_rest: Any) -> Any:
        logits = self.model(input_ids, attention_mask)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def peer_model(name: str) -> nn.Module:
    """transformers' own classifier of that shape, made to look both ways as trainfit's does."""
    from transformers import AutoModelForSequenceClassification

    with torch.device("cuda" if CUDA else "cpu"):
        config = build_config(name)
        model = AutoModelForSequenceClassification.from_config(config)
    return model.train()


def build_config(name: str) -> Any:
    with torch.device("meta"):
        config = build_encoder(name, weights="random", attention_dropout=0.0).config
    config._attn_implementation = "eager" if config.model_type == "deberta-v2" else "sdpa"
    config.pad_token_id, config.num_labels = 0, 2
    return config


class Rounds(Observer):
    """Times trainfit's steps in rounds, with the peers' rounds in between."""

    def __init__(self, rounds: int, steps: int, samples: int, between: Any) -> None:
        self.rounds, self.steps, self.samples, self.between = rounds, steps, samples, between
        self.results: list[dict[str, Any]] = []
        self.rows: list[TrainRow] = []
        self._began = self._first = time.perf_counter()
        self.first_seconds = 0.0

    def on_start(self, _step: int, _total_steps: int) -> None:
        self._first = time.perf_counter()

    def on_step(self, step: int) -> None:
        if step == 2:
            _wait()
            self.first_seconds = time.perf_counter() - self._first
        done, inside = divmod(step - WARM_UP, self.steps)
        if step < WARM_UP or inside:
            return
        _wait()
        if done:
            seconds = time.perf_counter() - self._began
            peak = torch.cuda.max_memory_allocated() / GIB if CUDA else None
            reserved = torch.cuda.max_memory_reserved() / GIB if CUDA else None
            self.results.append(
                {
                    "steps": self.steps,
                    "seconds": seconds,
                    "samples_per_second": self.steps * self.samples / seconds,
                    "peak_gib": peak,
                    "peak_reserved_gib": reserved,
                }
            )
            self.between(done)
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def on_log(self, row: TrainRow) -> None:
        self.rows.append(row)


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def planned(name: str, tokens: Tokens, *words: str) -> tuple[Any, Plan]:
    """The configuration and the plan of this machine for it."""
    overrides = ["model.weights=random", f"model.name={name}", *words]
    made = plan("nli", *overrides, lengths=tokens.lengths.tolist())
    return compose("nli", overrides).config, made


def run_trainfit(
    config: Any, made: Plan, tokens: Tokens, observer: Observer, steps: int, **changes: Any
) -> Any:
    """The engine's own run by the plan."""
    asked = settings_from(config.model, weights="random", **model_decisions(made, config.model))
    seed = changes.pop("seed", 0)
    task = task_of(asked, tokens, made.effective_batch_size, seed)
    settings = encoder_settings(
        replace(config, seed=seed),
        made,
        [tokens.lengths],
        device="cuda" if CUDA else "cpu",
        ranks=1,
    )
    return run_engine(task, settings, made, observer, steps, **changes)


def task_of(asked: Any, tokens: Tokens, batch: int, seed: int) -> ClassifierTask:
    return ClassifierTask(
        on_device("cuda" if CUDA else "cpu", partial(build_classifier, asked)),
        tokens,
        tokens.subset(range(8)),
        effective_batch=batch,
        seed=seed,
    )


def run_engine(
    task: Any, settings: Any, made: Plan, observer: Observer, steps: int, **changes: Any
) -> Any:
    """So many steps of the engine's own loop, without evaluations or files that matter."""
    settings = replace(
        settings,
        max_steps=steps,
        eval_steps=10 * steps,
        logging_steps=changes.pop("logging_steps", steps // 2),
        keep_checkpoints=0,
        metric=None,
        early_stopping_patience=None,
        **changes,
    )
    with tempfile.TemporaryDirectory() as folder, applied(made.runtime):
        return train(task, settings, Path(folder) / "run", observers=[observer])


def compare(name: str, sizes: Any, record: Any, keep: Any) -> None:
    """One model: trainfit's rounds with the peers' in between."""
    tokens = sequences(sizes.count, sizes.longest)
    words = [
        f"data.max_length={sizes.longest}",
        f"training.effective_batch_size={sizes.batch}",
        "model.method=full",
        f"training.num_workers={sizes.workers}",
        "model.attention_dropout=0.0",
    ]
    began = time.perf_counter()
    config, made = planned(name, tokens, *words)
    shown = {"model": title(name), "plan_seconds": time.perf_counter() - began, "contenders": {}}
    record["models"].append(shown)
    contenders = shown["contenders"]

    def tell(peer: str, outcome: dict[str, Any]) -> None:
        print(f"  {peer}: {outcome}", flush=True)
        summarise(shown)
        keep()

    def between(_done: int) -> None:
        build = partial(peer_model, name)
        take_turn(build, Sequences(tokens), sizes.settings, sizes.steps, contenders, tell)

    observer = Rounds(sizes.rounds, sizes.own_steps, made.effective_batch_size, between)
    contenders["trainfit"] = {
        "rounds": observer.results,
        "plan": {
            key: codec.encode(value)
            for key, value in vars_of(made).items()
            if key not in ("workload", "reasons", "task", "runtime")
        },
    }
    total = WARM_UP + sizes.rounds * sizes.own_steps
    torch._dynamo.utils.counters.clear()
    result = run_trainfit(config, made, tokens, observer, total)
    counters = torch._dynamo.utils.counters
    contenders["trainfit"] |= {
        "first_two_steps_seconds": observer.first_seconds,
        "compiled_graphs": counters["stats"].get("unique_graphs", 0),
        "graph_breaks": sum(counters["graph_break"].values()),
        "events": [codec.encode(event) for event in result.events],
        "wait_share": observer.rows[-1].wait_share,
        "mfu": observer.rows[-1].mfu,
        "losses": [row.loss for row in observer.rows],
    }
    summarise(shown)
    keep()


def title(name: str) -> str:
    return f"BERT of {TINY['num_hidden_layers']} layers" if Path(name).is_dir() else name


def vars_of(made: Plan) -> dict[str, Any]:
    return {name: getattr(made, name) for name in made.__dataclass_fields__}


def summarise(shown: dict[str, Any]) -> None:
    """Median and range of each contender's rounds."""
    for found in shown["contenders"].values():
        rates = [each["samples_per_second"] for each in found["rounds"] if "error" not in each]
        if rates:
            found["samples_per_second"] = statistics.median(rates)
            found["range"] = [min(rates), max(rates)]
    best = max(
        (
            (found["samples_per_second"], name)
            for name, found in shown["contenders"].items()
            if name.startswith("trainer,") and "samples_per_second" in found
        ),
        default=None,
    )
    ours = shown["contenders"].get("trainfit", {}).get("samples_per_second")
    if best is not None and ours is not None:
        shown["trainers_best"] = best[1]
        shown["times_trainers_best"] = ours / best[0]
    plain = shown["contenders"].get("trainer defaults", {}).get("samples_per_second")
    if plain is not None and ours is not None:
        shown["times_trainers_defaults"] = ours / plain


def variants(name: str, sizes: Any, record: Any, keep: Any) -> None:
    """trainfit alone with adapters or a frozen encoder."""
    tokens = sequences(sizes.count, sizes.longest)
    for method in sizes.methods:
        frozen = method == "frozen"
        words = [
            f"data.max_length={sizes.longest}",
            f"training.effective_batch_size={sizes.batch}",
            f"model.method={'full' if frozen else method}",
            f"model.freeze_encoder={str(frozen).lower()}",
        ]
        config, made = planned(name, tokens, *words)
        observer = Rounds(1, sizes.steps, made.effective_batch_size, lambda _done: None)
        outcome = guarded(
            lambda config=config, made=made, observer=observer: {
                "status": run_trainfit(config, made, tokens, observer, WARM_UP + sizes.steps).status
            }
        )
        rounds = observer.results
        promised = {
            "gib": made.memory and made.memory.peak_allocated_gib,
            "samples_per_second": made.time and made.time.samples_per_second,
        }
        record["variants"].append(
            {
                "model": title(name),
                "method": method,
                "planned": promised,
                **outcome,
                "rounds": rounds,
            }
        )
        print(f"  {name} {method}: {outcome} {rounds}", flush=True)
        keep()


def curves(name: str, sizes: Any, record: Any, keep: Any) -> None:
    """The loss of the same classifier on the same task, by trainfit and by Trainer.

    Both start from the same weights and see the same sequences in each step. What is left between
    them is dropout's luck, how a sum is rounded, and the warm-up: Trainer's first step has the rate
    0, trainfit's has not. Exact curves are without dropout and warm-up, and differ by rounding.
    """
    tokens = sequences(sizes.count, sizes.longest)
    rate, batch, steps = 5e-5, 32, sizes.curve_steps
    warm_up = 0.0 if sizes.exact else 0.1
    plain = ("model.head_dropout=0.0", "model.feed_forward_dropout=0.0") if sizes.exact else ()
    words = [
        f"data.max_length={sizes.longest}",
        f"training.effective_batch_size={batch}",
        "model.method=full",
        f"training.learning_rate={rate}",
        "training.weight_decay=0.0",
        "training.scheduler=linear",
        f"training.warmup_ratio={warm_up}",
        "model.attention_dropout=0.0",
        *plain,
    ]
    config, made = planned(name, tokens, *words)
    asked = settings_from(config.model, weights="random", **model_decisions(made, config.model))

    def build() -> nn.Module:
        same = replace(asked, attention="auto")
        return Peer(on_device("cuda" if CUDA else "cpu", partial(build_classifier, same))())

    class Losses(Observer):
        def __init__(self) -> None:
            self.found: list[float] = []

        def on_log(self, row: TrainRow) -> None:
            self.found.append(row.loss)

    found = []
    for seed in range(3):
        ours, theirs = Losses(), []
        run_trainfit(config, made, tokens, ours, steps, seed=seed, logging_steps=1)
        torch.manual_seed(seed)
        setting = Setting(name="trainer, batch 32", batch=batch, workers=sizes.workers)
        dealt = task_of(asked, tokens, batch, seed).steps(0)
        trainer_round(
            build,
            Sequences(tokens.subset([at for step in dealt for at in step])),
            setting,
            steps - 4,
            seed=seed,
            losses=theirs,
            learning_rate=rate,
            warmup_steps=round(warm_up * steps),
            max_grad_norm=1.0,
            train_sampling_strategy="sequential",
        )
        found.append({"seed": seed, "trainfit": ours.found, "trainer": theirs})
        record["curves"].append({"model": title(name), **found[-1]})
        ends = [statistics.mean(losses[-30:]) for losses in (ours.found, theirs)]
        print(f"  seed {seed}: the last 30 losses, trainfit {ends[0]:.4f}, Trainer {ends[1]:.4f}")
        keep()
    record["curve_summaries"].append({"model": title(name), **loss_curves.summary(found)})
    print(json.dumps(record["curve_summaries"][-1], indent=1), flush=True)
    keep()


def first_steps(name: str, sizes: Any) -> None:
    """In a process of its own: how long until two steps are done, imports apart."""
    tokens = sequences(sizes.count, sizes.longest)
    config, made = planned(
        name,
        tokens,
        f"data.max_length={sizes.longest}",
        f"training.effective_batch_size={sizes.batch}",
        "model.method=full",
        "optimization.compile=true",
    )
    observer = Rounds(1, 5, made.effective_batch_size, lambda _done: None)
    run_trainfit(config, made, tokens, observer, WARM_UP + 5)
    steady = observer.results[0]["seconds"] / 5
    print(json.dumps({"first_two": observer.first_seconds, "step": steady}))


def warmups(name: str, arguments: list[str], record: Any, keep: Any) -> None:
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            "TRITON_CACHE_DIR": f"{cache}/triton",
        }
        for which in ("cold", "second process"):
            done = subprocess.run(
                [sys.executable, __file__, "--first-steps", name, "--output", "-", *arguments],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            lines = done.stdout.splitlines()
            found = json.loads(lines[-1]) if done.returncode == 0 else {"error": done.stderr[-400:]}
            record["warmups"].append({"model": name, "which": which, **found})
            print(f"  {name}, {which}: {found}", flush=True)
            keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=None)
    parser.add_argument("--settings", nargs="*", help="words that a peer's name must have one of")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50, help="timed steps of a peer's round")
    parser.add_argument("--own-steps", type=int, default=50, help="and of one of trainfit's")
    parser.add_argument("--batch", type=int, default=128, help="trainfit's effective batch")
    parser.add_argument("--methods", nargs="*", default=(), choices=METHODS)
    parser.add_argument("--peer-workers", type=int, help="loader processes of the peers")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--exact", action="store_true", help="curves without dropout and warm-up")
    parser.add_argument("--warmups", action="store_true")
    parser.add_argument("--first-steps", metavar="MODEL")
    parser.add_argument("--cpu", action="store_true", help="a small model, on this CPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it runs")
    sizes = parser.parse_args()
    words, sizes.settings = sizes.settings, () if sizes.no_peers else SETTINGS
    sizes.count, sizes.longest, sizes.curve_steps, sizes.workers = 13_000, 512, 300, 4
    if sizes.cpu:
        sizes.count, sizes.batch, sizes.workers, sizes.settings = 2_000, 16, 0, ON_A_CPU
        sizes.rounds, sizes.steps, sizes.own_steps = 3, 15, 15
    if sizes.tiny:
        sizes.count, sizes.longest, sizes.curve_steps, sizes.workers = 400, 64, 12, 0
        sizes.rounds, sizes.steps, sizes.own_steps, sizes.batch = 1, 4, 4, 16
        sizes.settings = tuple(
            replace(each, batch=min(each.batch, 16), workers=0) for each in sizes.settings
        )
    if sizes.peer_workers is not None:
        sizes.settings = tuple(replace(s, workers=sizes.peer_workers) for s in sizes.settings)
    if words:
        sizes.settings = tuple(s for s in sizes.settings if any(w in s.name for w in words))
    with tempfile.TemporaryDirectory() as folder:
        models = sizes.models or MODELS
        if sizes.tiny or sizes.cpu:
            deeper = {"hidden_size": 128, "intermediate_size": 512} if sizes.cpu else {}
            (Path(folder) / "config.json").write_text(json.dumps(TINY | deeper))
            models = [folder]
        if sizes.first_steps:
            first_steps(sizes.first_steps, sizes)
            return
        work(sizes, models)


def work(sizes: Any, models: Any) -> None:
    """Everything that was asked for, written down as it comes."""
    import transformers

    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/nli.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": torch.cuda.get_device_name() if CUDA else platform.processor() or "CPU",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "models": [],
        "variants": [],
        "curves": [],
        "curve_summaries": [],
        "warmups": [],
    }

    def keep() -> None:
        write_whole(sizes.output, json.dumps(record, indent=1) + "\n")

    for name in models:
        print(name, flush=True)
        if sizes.curves:
            curves(name, sizes, record, keep)
        elif sizes.warmups:
            warmups(name, ["--tiny"] if sizes.tiny else [], record, keep)
        elif sizes.methods:
            variants(name, sizes, record, keep)
        else:
            compare(name, sizes, record, keep)
            shown = record["models"][-1]
            for contender, found in shown["contenders"].items():
                print(f"  {contender}: {found.get('samples_per_second')} samples/s")
            for key in ("times_trainers_best", "times_trainers_defaults"):
                print(f"  {key}: {shown.get(key)}")


if __name__ == "__main__":
    main()
