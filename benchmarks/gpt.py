"""How fast a small GPT is pretrained: trainfit's step, a nanoGPT-style loop, and transformers.

The same shape, optimizer and batches for all; rounds of a few steps come in turn, so that all see
the same GPU in the same minutes; the figure is the median of the rounds. MFU is
(6·N + 12·L·H·Q·T) per token against the dense bf16 peak of the catalogue.

    python benchmarks/gpt.py --output FILE --shape small --stage peers     everyone, by batch
    python benchmarks/gpt.py --output FILE --shape small --stage ladder    what each step gave
    python benchmarks/gpt.py --output FILE --shape small --stage combined  what it gave, together
    python benchmarks/gpt.py --output FILE --shape small --stage curve     bf16 against TF32
    python benchmarks/gpt.py --output FILE --tiny                          all of it on a CPU

`--only WORDS` takes those whose name has one of the words, `--batch N` another batch for the
ladder, `--profile` adds where the time of a step goes. Results are written as they come.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from gpt_contenders import Batch, Contender, Step, make_step
from trainfit.core.files import write_whole
from trainfit.core.plan_records import RuntimeSettings
from trainfit.hardware.catalogue import lookup
from trainfit.jobs.models.gpt_model import GptShape
from trainfit.runtime import applied
from trainfit.tuning.tuner import sampled

GIB = 1024**3
STAGES = ("peers", "ladder", "combined", "curve", "all")
SHAPES = {
    "small": GptShape(vocab_size=50304, block_size=1024, n_layer=12, n_head=12, n_embd=768),
    "medium": GptShape(vocab_size=50304, block_size=1024, n_layer=24, n_head=16, n_embd=1024),
    "tiny": GptShape(vocab_size=512, block_size=32, n_layer=2, n_head=2, n_embd=32),
}
BATCHES = {"small": (12, 16, 32, 64), "medium": (8, 16, 32), "tiny": (2, 4)}
LADDER_BATCH = {"small": 32, "medium": 16, "tiny": 4}
CURVE_BATCH = {"small": 16, "medium": 8, "tiny": 4}
GPU_FIGURES = ("clock_sm_mhz", "clock_sm_max_mhz", "power_w", "power_limit_w", "temperature_c")
"""Of the last round, as the driver tells them."""
WARM_UP = 5
"""Steps before each round: a GPU that has waited for a compiler runs faster than it can go on."""
BEST: dict[str, Any] = {"half_stream": True, "chunk": 16384}
"""What the product takes; --best says otherwise."""


def peers(shape: str, best: dict[str, Any]) -> list[Contender]:
    """Everyone, with each batch of the declared list, the largest first."""
    found = []
    for batch in reversed(BATCHES[shape]):
        found += [
            Contender(name="trainfit", batch=batch, **best),
            Contender(name="nanoGPT-style", kind="nanogpt", batch=batch),
            Contender(name="transformers", kind="transformers", batch=batch),
        ]
    return found


def ladder(batch: int) -> list[Contender]:
    """One thing after the other, each on top of what is before it unless its name says alone."""
    start = Contender(
        name="eager, math attention, plain AdamW",
        batch=batch,
        compile="none",
        attention="math",
        optimizer="adamw",
        gelu="torch",
    )
    flash = replace(start, name="+ flash attention", attention="flash")
    fused = replace(flash, name="+ fused AdamW", optimizer="adamw_fused")
    blocks = replace(fused, name="+ blocks compiled", compile="blocks")
    whole = replace(fused, name="+ whole model compiled", compile="model")
    cudnn = replace(whole, name="+ cuDNN attention", attention="auto")
    return [start, flash, fused, blocks, whole, cudnn, *combined(batch)]


def combined(batch: int) -> list[Contender]:
    """From a nanoGPT-style loop to trainfit's step, and what more was tried on top of it."""
    plain = Contender(name="whole model compiled", batch=batch, gelu="torch")
    half = replace(plain, name="+ bf16 between blocks", half_stream=True)
    chunks = replace(half, name="+ loss by chunks of 16384", chunk=16384)
    best = replace(chunks, name="+ own GELU (trainfit)", gelu="own")
    return [
        Contender(name="nanoGPT-style", kind="nanogpt", batch=batch),
        plain,
        half,
        chunks,
        best,
        replace(best, name="trainfit, 8 times the batch in 4 parts", batch=8 * batch, parts=4),
        Contender(
            name="nanoGPT-style, 8 times the batch in 4 parts",
            kind="nanogpt",
            batch=8 * batch,
            parts=4,
        ),
        replace(best, name="trainfit, CUDA graphs", mode="reduce-overhead"),
        replace(best, name="trainfit, bf16 weights with float32 copies", kind="masters"),
        replace(best, name="trainfit, only blocks and loss compiled", compile="blocks+loss"),
        replace(best, name="trainfit, flash attention", attention="flash"),
        Contender(name="transformers", kind="transformers", batch=batch),
    ]


def curves(batch: int, best: dict[str, Any]) -> list[Contender]:
    """Who trains from the same weights on the same data."""
    return [
        Contender(name="TF32 reference", precision="fp32", compile="none", batch=batch),
        Contender(name="trainfit", batch=batch, **best),
        Contender(name="nanoGPT-style", kind="nanogpt", batch=batch),
    ]


# ── data ──────────────────────────────────────────────────────────────────────────────────────


def make_batches(shape: GptShape, batch: int, count: int, device: str, seed: int) -> list[Batch]:
    """Half of all tokens follow from the one before, the rest are as common as words are."""
    random = np.random.default_rng(seed)
    size, length = shape.vocab_size, shape.block_size + 1
    follows = np.random.default_rng(0).permutation(size)  # the same world for every seed
    chances = 1.0 / np.arange(1, size + 1)
    drawn = random.choice(size, size=(count * batch, length), p=chances / chances.sum())
    chained = random.random((count * batch, length)) < 0.5
    for at in range(1, length):
        drawn[:, at] = np.where(chained[:, at], follows[drawn[:, at - 1]], drawn[:, at])
    rows = torch.from_numpy(drawn.astype(np.int64)).split(batch)
    pairs = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows]
    if device != "cuda":
        return pairs
    return [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in pairs]


# ── measuring ─────────────────────────────────────────────────────────────────────────────────


class Record:
    """The file of results, written whole after each one."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.data = path, facts | {"results": [], "curves": []}
        if path.exists():
            earlier = json.loads(path.read_text())
            self.data["results"] = earlier["results"]
            self.data["curves"] = earlier["curves"]

    def add(self, kind: str, entry: dict[str, Any]) -> None:
        """Replace or append, by what it is about."""
        keys = ("stage", "shape", "name", "batch")
        same = [tuple(one.get(k) for k in keys) for one in self.data[kind]]
        mine = tuple(entry.get(k) for k in keys)
        if mine in same:
            self.data[kind][same.index(mine)] = entry
        else:
            self.data[kind].append(entry)
        write_whole(self.path, json.dumps(self.data, indent=1) + "\n")


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Running:
    """A contender that is built and warm, and its rounds."""

    def __init__(self, who: Contender, shape: GptShape, device: str) -> None:
        self.who, self.device = who, device
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        self.step: Step = make_step(who, shape, device, seed=0)
        self.batches = make_batches(shape, who.batch, 4, device, seed=1)
        self.seconds: list[float] = []
        self.peaks: list[tuple[float, float]] = []
        self.gpu: dict[str, Any] = {}
        started = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.loss = float(self.step(self.batches[0]))
        self.first = time.perf_counter() - started
        self.warnings = sorted({str(w.message).splitlines()[0][:200] for w in caught})
        for number in range(3 if who.parts == 1 else 1):
            self.step(self.batches[number % 4])
        sync(device)
        self.own = (torch.cuda.memory_allocated() - before) if device == "cuda" else 0

    def round(self, steps: int) -> None:
        """Some steps, without waiting for any of them but the last."""
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        others = (torch.cuda.memory_allocated() if self.device == "cuda" else 0) - self.own
        steps = max(1, steps // self.who.parts)  # they are so much longer
        for number in range(max(1, WARM_UP // self.who.parts)):
            self.step(self.batches[number % 4])
        sync(self.device)
        with sampled() as samples:
            started = time.perf_counter()
            for number in range(steps):
                self.step(self.batches[number % 4])
            sync(self.device)
            self.seconds.append((time.perf_counter() - started) / steps)
        self.gpu = {name: samples.mean(name) for name in GPU_FIGURES}
        self.gpu["notices"] = samples.notices()
        if self.device == "cuda":
            peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self.peaks.append(tuple((peak - others) / GIB for peak in peaks))

    def where_time_goes(self) -> list[dict[str, Any]]:
        """The kernels of a step that take the most."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            self.step(self.batches[0])
            sync(self.device)
        kernels = [e for e in found.key_averages() if e.device_type == DeviceType.CUDA]
        kernels.sort(key=lambda e: -e.self_device_time_total)
        return [
            {"kernel": e.key[:140], "ms": e.self_device_time_total / 1e3, "count": e.count}
            for e in kernels[:80]
        ]


def flops_per_token(shape: GptShape) -> float:
    return shape.flops.of_step([shape.block_size]) / shape.block_size


def figures(one: Running, shape: GptShape, peak: float | None) -> dict[str, Any]:
    seconds = statistics.median(one.seconds)
    tokens = one.who.batch * shape.block_size
    rate = tokens / seconds
    return {
        "settings": asdict(one.who),
        "seconds": seconds,
        "rounds": one.seconds,
        "tokens_per_second": rate,
        "mfu": None if peak is None else rate * flops_per_token(shape) / (peak * 1e12),
        "peak_allocated_gib": max((p[0] for p in one.peaks), default=None),
        "peak_reserved_gib": max((p[1] for p in one.peaks), default=None),
        "gpu": one.gpu,
        "first_step_seconds": one.first,
        "first_loss": one.loss,
        "warnings": one.warnings,
    }


def compare(
    stage: str, who: list[Contender], options: argparse.Namespace, record: Record, peak: Any
) -> None:
    """Build everyone, then let them take turns."""
    shape, name, device = SHAPES[options.shape], options.shape, options.device
    running: list[Running] = []
    for one in who:
        label = {"stage": stage, "shape": name, "name": one.name, "batch": one.batch}
        try:
            running.append(Running(one, shape, device))
        except Exception as error:  # noqa: BLE001  one that fails is a result too
            record.add("results", label | {"error": f"{type(error).__name__}: {error}"[:500]})
            print(f"{one.name}, batch {one.batch}: {type(error).__name__}", flush=True)
            gc.collect()
            continue
        built = running[-1]
        built.round(options.steps)  # so that something is known of everyone, should time run out
        record.add("results", label | figures(built, shape, peak))
        print(f"{one.name}, batch {one.batch}: built in {built.first:.0f} s", flush=True)
        if time.monotonic() > options.deadline:
            print("out of time: the rest is not built")
            break
    for one in running:
        one.seconds.clear()  # of a GPU that had a rest while someone was compiled
    for _ in range(options.rounds):
        for one in running:
            one.round(options.steps)
    for one in running:
        label = {"stage": stage, "shape": name, "name": one.who.name, "batch": one.who.batch}
        entry = label | figures(one, shape, peak)
        if options.profile and device == "cuda":
            entry["kernels"] = one.where_time_goes()
        record.add("results", entry)
        share = "" if entry["mfu"] is None else f"  mfu {entry['mfu']:.1%}"
        memory = entry["peak_allocated_gib"]
        room = "" if memory is None else f"  {memory:.1f} GiB"
        print(
            f"{one.who.name:48} batch {one.who.batch:3}  {1e3 * entry['seconds']:8.2f} ms  "
            f"{entry['tokens_per_second']:>10,.0f} tokens/s{share}{room}",
            flush=True,
        )
    running.clear()
    gc.collect()
    torch.compiler.reset()


# ── the same curve? ───────────────────────────────────────────────────────────────────────────


def trained(
    one: Contender, shape: GptShape, options: argparse.Namespace, *, seed: int, data: int
) -> list[float]:
    """The loss of every step."""
    step = make_step(one, shape, options.device, seed=seed)
    losses = []
    for start in range(0, options.curve_steps, 20):
        count = min(20, options.curve_steps - start)
        for batch in make_batches(shape, one.batch, count, options.device, data + start):
            losses.append(step(batch))
    return torch.stack(losses).float().cpu().tolist()


def smooth(losses: list[float]) -> np.ndarray:
    width = min(10, len(losses))
    return np.convolve(losses, np.ones(width) / width, "valid")


def compare_curves(who: list[Contender], options: argparse.Namespace, record: Record) -> None:
    """Same weights, same data; how far apart two seeds of the reference are is the noise."""
    shape = SHAPES[options.shape]
    base = who[0]
    reference = trained(base, shape, options, seed=0, data=1000)
    other = trained(base, shape, options, seed=1, data=1000)
    noise = float(np.abs(smooth(other) - smooth(reference)).max())
    label = {"stage": "curve", "shape": options.shape, "batch": base.batch}
    record.add(
        "curves",
        label | {"name": base.name, "losses": reference, "other_seed": other, "noise": noise},
    )
    print(
        f"{base.name}: {reference[0]:.4f} to {reference[-1]:.4f}; two seeds differ by {noise:.4f}"
    )
    for one in who[1:]:
        gc.collect()
        torch.compiler.reset()
        try:
            losses = trained(one, shape, options, seed=0, data=1000)
        except Exception as error:  # noqa: BLE001  one that fails is a result too
            record.add("curves", label | {"name": one.name, "error": str(error)[:500]})
            print(f"{one.name}: {type(error).__name__}")
            continue
        apart = np.abs(smooth(losses) - smooth(reference))
        entry = {"losses": losses, "furthest": float(apart.max()), "mean": float(apart.mean())}
        record.add("curves", label | {"name": one.name} | entry)
        print(
            f"{one.name}: ends at {losses[-1]:.4f}, at most {apart.max():.4f} from it", flush=True
        )


# ── the script ────────────────────────────────────────────────────────────────────────────────


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--stage", choices=STAGES, default="all")
    parser.add_argument("--only", nargs="*", help="contenders whose name has one of these words")
    parser.add_argument("--batch", type=int, help="of the ladder and the curve")
    parser.add_argument("--batches", type=int, nargs="*", help="of the peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--curve-steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds in which to build")
    parser.add_argument("--best", nargs="*", help="trainfit's settings, such as chunk=8192")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape in float32 on the CPU")
    options = parser.parse_args()
    options.device = "cuda"
    if options.best is not None:
        words = dict(word.split("=", 1) for word in options.best)
        options.best = {name: yaml.safe_load(value) for name, value in words.items()}
    else:
        options.best = BEST
    options.deadline = time.monotonic() + options.budget
    if options.tiny:
        options.shape, options.device = "tiny", "cpu"
        options.rounds, options.steps, options.curve_steps = 2, 2, 30
    return options


def chosen(who: list[Contender], options: argparse.Namespace) -> list[Contender]:
    if options.only:
        who = [one for one in who if any(word in one.name for word in options.only)]
    if options.batches:
        who = [one for one in who if one.batch in options.batches]
    if options.device == "cpu":  # no bf16 products, no kernel to choose, no graphs
        who = [replace(one, precision="fp32", attention="auto", mode="default") for one in who]
    return who


def main() -> None:
    options = arguments()
    # Many models of one class, each of one shape: nothing is to become dynamic or be given up.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 4096
    torch._dynamo.config.automatic_dynamic_shapes = False
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor()
    total = (
        torch.cuda.get_device_properties(0).total_memory / GIB if options.device == "cuda" else 0
    )
    spec = lookup(name, total) if options.device == "cuda" else None
    peak = spec.peak_tflops("bf16") if spec is not None else None
    shape = SHAPES[options.shape]
    record = Record(
        options.output,
        {
            "device": name,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "peak_tflops": peak,
            "flops_per_token": {key: flops_per_token(one) for key, one in SHAPES.items()},
            "parameters": {key: one.flops.weights for key, one in SHAPES.items()},
        },
    )
    batch = options.batch or LADDER_BATCH[options.shape]
    print(f"{name}, torch {torch.__version__}, {flops_per_token(shape) / 1e6:.1f} MFLOP per token")
    with applied(RuntimeSettings(tf32=True)):
        if options.stage in ("ladder", "all"):
            compare("ladder", chosen(ladder(batch), options), options, record, peak)
        if options.stage in ("combined", "all"):
            compare("combined", chosen(combined(batch), options), options, record, peak)
        if options.stage in ("peers", "all"):
            compare(
                "peers", chosen(peers(options.shape, options.best), options), options, record, peak
            )
        if options.stage in ("curve", "all"):
            size = options.batch or CURVE_BATCH[options.shape]
            compare_curves(chosen(curves(size, options.best), options), options, record)


if __name__ == "__main__":
    main()
