"""Everyone on the same work in one command: trainfit, Trainer, Lightning and a plain loop.

Fine-tuning of an encoder on sequences as long as ReDSM5's (`nli`), or pretraining of a GPT on full
blocks (`gpt`): the same shape with random weights, the same tokens, the same precision, no dropout
in attention. trainfit runs its engine by its own plan; a round of each peer comes between two of
its rounds, so that all see the same machine in the same minutes. The figure is the median of the
rounds, with their range beside it.

    python benchmarks/peers.py                               both; without a GPU, tiny shapes
    python benchmarks/peers.py --workload nli [--model deberta-v3-base] [--output FILE]
    python benchmarks/peers.py --workload gpt
    python benchmarks/peers.py --tiny                        to see that it runs

nli.py and gpt.py hold the longer comparisons: more models, more settings, the curves of the loss.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
from contenders import CUDA, Blocks, Sequences, Setting, take_turn
from gpt_contenders import PlainGpt, hub_gpt2
from nli import TINY, WARM_UP, Rounds, peer_model, planned, run_engine, run_trainfit, sequences
from nli import summarise as summarise_rounds
from trainfit.conf import compose
from trainfit.core.files import write_whole
from trainfit.jobs import gpt
from trainfit.jobs.job_plan import plan
from trainfit.jobs.pretraining import GptTask

NLI = (
    Setting(name="trainer defaults", batch=8, precision="fp32", workers=0, defaults=True),
    Setting(name="trainer, batch 32", batch=32),
    Setting(name="trainer, by length, batch 64", batch=64, grouped=True),
    Setting(name="lightning, batch 32", batch=32, kind="lightning"),
    Setting(name="plain loop, batch 32", batch=32, kind="plain"),
)
GPT = (
    Setting(name="trainer defaults", batch=8, precision="fp32", workers=0, defaults=True),
    Setting(name="trainer, batch 32", batch=32),
    Setting(name="trainer, compiled, batch 32", batch=32, compile=True),
    Setting(name="lightning, compiled, batch 32", batch=32, kind="lightning", compile=True),
    Setting(name="plain loop, compiled, batch 32", batch=32, kind="plain", compile=True),
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What everyone does, and how trainfit does it."""

    name: str
    settings: tuple[Setting, ...]
    models: dict[str, Any]
    """What builds the peers' model, by the kind of peer."""
    data: Any
    samples: int
    """Sequences of one of trainfit's steps."""
    trainfit: Any
    """Runs so many steps of trainfit's, watched by an observer."""


class PlainGptLoss(PlainGpt):
    """The GPT of a short script as the peers want a model: it shifts its labels itself."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return {
            "loss": super().forward(input_ids, functional.pad(labels[:, 1:], (0, 1), value=-100))
        }


def fine_tuning(options: argparse.Namespace, folder: Path) -> Work:
    """An encoder classifier."""
    name, count, longest = options.model or "deberta-v3-base", 13_000, 512
    if options.tiny:
        (folder / "config.json").write_text(json.dumps(TINY))
        name, count, longest = str(folder), 400, 64
    tokens = sequences(count, longest)
    config, made = planned(
        name,
        tokens,
        f"data.max_length={longest}",
        f"training.effective_batch_size={16 if options.tiny else 128}",
        "model.method=full",
        f"training.num_workers={0 if options.tiny else 4}",
        "model.attention_dropout=0.0",
    )
    build = partial(peer_model, name)
    return Work(
        name="tiny BERT" if options.tiny else name,
        settings=NLI,
        models=dict.fromkeys(("trainer", "lightning", "plain"), build),
        data=Sequences(tokens),
        samples=made.effective_batch_size,
        trainfit=partial(run_trainfit, config, made, tokens),
    )


def pretraining(options: argparse.Namespace, _folder: Path) -> Work:
    """A GPT; the plain loop has a model of its own, as such scripts do."""
    name, block, blocks = options.model or "gpt-124m", 1024, 8192
    if options.tiny:
        name, block, blocks = "gpt-tiny", 32, 256
    words = [
        f"model.name={name}",
        f"data.max_length={block}",
        f"training.effective_batch_size={16 if options.tiny else 64}",
        f"training.num_workers={0 if options.tiny else 4}",
    ]
    made = plan("gpt", *words, lengths=[block] * 256)
    config: Any = compose("gpt", words).config
    shape = gpt.shape_of(config)
    draws = np.random.default_rng(0)
    ids = draws.integers(0, shape.vocab_size, blocks * block + 1).astype(np.uint32)
    task = GptTask(
        partial(gpt.build, config, made),
        ids,
        ids,
        block_size=block,
        effective_batch=made.effective_batch_size,
        evaluated=1,
    )
    settings = gpt.gpt_settings(config, made, device="cuda" if CUDA else "cpu", ranks=1)
    return Work(
        name=name,
        settings=GPT,
        models={
            "trainer": partial(hub_gpt2, shape),
            "lightning": partial(hub_gpt2, shape),
            "plain": partial(PlainGptLoss, shape),
        },
        data=Blocks(ids, block),
        samples=made.effective_batch_size,
        trainfit=partial(run_engine, task, settings, made),
    )


WORKLOADS = {"nli": fine_tuning, "gpt": pretraining}


def race(work: Work, options: argparse.Namespace, shown: dict[str, Any], keep: Any) -> None:
    """trainfit's rounds with a round of each peer after each of them."""
    contenders: dict[str, Any] = shown["contenders"]
    observer = Rounds(options.rounds, options.steps, work.samples, lambda done: between(done))
    contenders["trainfit"] = {"rounds": observer.results}

    def tell(_name: str, _outcome: dict[str, Any]) -> None:
        summarise_rounds(shown)
        keep()

    def between(done: int) -> None:
        print(f"  round {done} of {options.rounds}", flush=True)
        for kind, build in work.models.items():
            own = [setting for setting in work.settings if setting.kind == kind]
            take_turn(build, work.data, own, options.steps, contenders, tell)

    work.trainfit(observer, WARM_UP + options.rounds * options.steps)
    tell("trainfit", {})


def fitted(settings: tuple[Setting, ...], options: argparse.Namespace) -> tuple[Setting, ...]:
    """As they are, or as small as a tiny shape on a CPU wants them."""
    if not options.tiny:
        return settings
    names = [
        re.sub(r"batch \d+", "batch 8", one.name).replace(", compiled", "") for one in settings
    ]
    small = {"batch": 8, "workers": 0, "compile": False}
    found = {n: replace(one, name=n, **small) for n, one in zip(names, settings, strict=True)}
    return tuple(found.values())


def table(shown: dict[str, Any]) -> str:
    """Median and range of each, and trainfit's as a multiple of it."""
    found = shown["contenders"]
    ours = found["trainfit"].get("samples_per_second")
    lines = [f"{'':34}{'samples/s':>12}{'range':>24}{'trainfit is':>14}{'peak GiB':>10}"]
    for name, one in found.items():
        rate = one.get("samples_per_second")
        if rate is None:
            lines.append(
                f"{name:34}  {one['rounds'][-1]['error'] if one['rounds'] else 'no round'}"
            )
            continue
        low, high = one["range"]
        peaks = [each["peak_gib"] for each in one["rounds"] if each.get("peak_gib") is not None]
        peak = f"{max(peaks):.1f}" if peaks else "-"
        times = f"{ours / rate:.2f}×" if ours and name != "trainfit" else ""
        span = f"{low:,.1f} to {high:,.1f}"
        lines.append(f"{name:34}{rate:>12,.1f}{span:>24}{times:>14}{peak:>10}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="runs/peers-TIME.json, if none is named")
    parser.add_argument("--workload", choices=WORKLOADS, help="both, if none is named")
    parser.add_argument("--model", help="of the catalogue; with --workload")
    parser.add_argument("--rounds", type=int, help="3, or 2 of a tiny shape")
    parser.add_argument("--steps", type=int, help="timed steps of a round: 50, or 4")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it runs")
    options = parser.parse_args()
    if options.model and not options.workload:
        parser.error("--model needs --workload")
    if not CUDA and not options.tiny and not options.model:
        options.tiny = True
        print("there is no GPU: tiny shapes; a --model is raced as it is", flush=True)
    options.output = options.output or Path("runs", f"peers-{time.strftime('%Y%m%d-%H%M%S')}.json")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.rounds = options.rounds or (2 if options.tiny else 3)
    options.steps = options.steps or (4 if options.tiny else 50)
    import lightning
    import transformers

    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/peers.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": torch.cuda.get_device_name() if CUDA else platform.processor() or "CPU",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "lightning": lightning.__version__,
            "python": platform.python_version(),
        },
        "models": [],
    }

    def keep() -> None:
        write_whole(options.output, json.dumps(record, indent=1) + "\n")

    for workload in [options.workload] if options.workload else WORKLOADS:
        with tempfile.TemporaryDirectory() as folder:
            work = WORKLOADS[workload](options, Path(folder))
            work = replace(work, settings=fitted(work.settings, options))
            shown = {"workload": workload, "model": work.name, "contenders": {}}
            record["models"].append(shown)
            print(f"{workload}, {work.name}", flush=True)
            race(work, options, shown, keep)
        print(table(shown), flush=True)
    print(f"Written: {options.output}")


if __name__ == "__main__":
    main()
