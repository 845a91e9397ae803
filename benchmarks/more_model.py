"""More model than memory: plans under caps, made without a GPU and held to their word on one.

python benchmarks/more_model.py --predict PLANS [--case NAME …] [--random 40] [--tiny]
python benchmarks/more_model.py --run PLANS --output FILE [--case NAME …]      20 steps of each
python benchmarks/more_model.py --run PLANS --output FILE --random 40          short steps of many
python benchmarks/more_model.py --peers PLANS --output FILE                    beside peft's QLoRA
python benchmarks/more_model.py --losses --output FILE                         300 steps, seeds

A plan is what the planner chooses by itself on an H200 of which only so much may be used; planning
takes seconds a case on slow cores, so it is done beforehand. The named cases run the engine's own
loop under `device.memory_gib`. Random ones run the planner's step in one process: those that are
said to fit, and up to ten that are not, cut as finely as they can be. Results are added to FILE as
they come.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from job_cases import build
from record_jobs import alone, peaks, sync
from trainfit.core import codec
from trainfit.core.errors import TrainfitError
from trainfit.core.files import write_whole
from trainfit.core.plan_records import Plan

GIB = 2**30
CUDA = torch.cuda.device_count() > 0
"""Found by NVML: is_available() would start CUDA, and no forked process could use it any more."""
STEPS, SHORT = 20, 4
MOST_UNFIT = 10
LONG = ("data.max_length=512", "training.effective_batch_size=16", "model.weights=random")
CASES: dict[str, tuple[list[str], float]] = {
    "7b lora": (["nli", "model.name=mistral-7b", "model.method=lora"], 10),
    "7b qlora": (["nli", "model.name=mistral-7b", "model.method=qlora"], 10),
    "gemma-4b dora": (["nli", "model.name=gemma-3-4b-it", "model.method=dora"], 8),
    "gemma-4b qdora": (["nli", "model.name=gemma-3-4b-it", "model.method=qdora"], 8),
    "gemma-1b full": (["nli", "model.name=gemma-3-1b-it", "model.method=full"], 12),
    "deberta-large full": (["nli", "model.name=deberta-v3-large", "model.method=full"], 8),
}
"""Words and GiB; every sequence has 512 tokens, 16 of them make a step. With nf4 asked for there is
room to recompute less; without, the planner rounds weights only where nothing else fits."""
SMALL, LARGE = (
    ("bert-base", "modernbert-base", "deberta-v3-base", "gemma-3-270m"),
    (
        "deberta-v3-large",
        "gemma-3-1b-it",
        "qwen2.5-0.5b",
        "llama-3.2-1b",
    ),
)
HUGE = ("qwen2.5-3b", "gemma-3-4b-it", "mistral-7b")
METHODS = ("full", "full", "lora", "dora", "frozen")
TINY = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 2000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}


# ── plans ─────────────────────────────────────────────────────────────────────────────────────


def random_cases(count: int, seed: int = 0) -> Iterable[tuple[str, list[str], float, list[int]]]:
    """Models, methods, caps and lengths, one draw each; few of the models are large."""
    draws = np.random.default_rng(seed)
    for number in range(count):
        among = draws.choice([0, 1, 2], p=[0.4, 0.45, 0.15])
        name = str(draws.choice((SMALL, LARGE, HUGE)[among]))
        method = str(draws.choice(("lora", "dora", "full") if among == 2 else METHODS))
        most = 80 if draws.random() < 0.3 else (12 if among else 9)  # most caps are tight
        cap = round(float(np.exp(draws.uniform(np.log(6), np.log(most)))), 1)
        longest = int(draws.choice([256, 512, 512]))
        shape = str(draws.choice(["even", "short", "equal"]))
        lengths = {
            "even": draws.integers(16, longest + 1, 1000),
            "short": np.clip(draws.lognormal(np.log(longest / 5), 0.6, 1000), 8, longest),
            "equal": np.full(1000, longest),
        }[shape]
        batch = int(draws.choice([16, 64, 256]))
        words = ["nli", f"model.name={name}", f"data.max_length={longest}", "model.weights=random"]
        words += [f"training.effective_batch_size={batch}", "optimization.compile=false"]
        words += ["model.freeze_encoder=true"] if method == "frozen" else [f"model.method={method}"]
        title = f"{number:02} {name} {method} {shape} {longest} × {batch}"
        yield title, words, cap, [int(length) for length in lengths]


def predict(name: str, words: list[str], cap: float, lengths: list[int], gpu: Any) -> Any:
    """Plan a case under its cap; a plan that says no is a result as well."""
    from trainfit.jobs.job_plan import plan

    capped = [f"device.memory_gib={cap}"] if gpu else []
    asked = [*words, *capped, "optimization.cuda_graph=false"]
    began = time.perf_counter()
    try:
        made = plan(*asked, gpu=gpu, lengths=lengths)
    except TrainfitError as error:
        return {"name": name, "words": asked, "cap_gib": cap, "fits": False, "error": str(error)}
    return {
        "name": name,
        "words": asked,
        "cap_gib": cap,
        "fits": made.fits,
        "plan_seconds": round(time.perf_counter() - began, 1),
        "savers": savers_of(made),
        "plan": codec.encode(made),
    }


def savers_of(made: Plan) -> dict[str, Any]:
    """Settings of a plan that save memory."""
    from trainfit.core.settings import BY_NAME
    from trainfit.planning.savers import SAVERS

    rows = {saver.setting: BY_NAME[saver.setting].of(made) for saver in SAVERS}
    return {
        "gradient_checkpointing": made.gradient_checkpointing,
        "gradient_accumulation_steps": made.gradient_accumulation_steps,
        "compile": made.compile,
        **rows,
    }


def predict_all(asked: argparse.Namespace) -> None:
    gpu = None if asked.tiny else "h200"
    jobs: list[Any]
    if asked.random:
        jobs = list(random_cases(asked.random))
    else:
        names = asked.case or CASES
        full = {name: CASES[name] for name in names}
        jobs = [(n, [*words, *LONG], cap, [512] * 1000) for n, (words, cap) in full.items()]
    plans = []
    for name, words, cap, lengths in jobs:
        given = [f"model.name={tiny_model()}", "data.max_length=32"] if asked.tiny else []
        made = predict(
            name,
            replaced(words, given),
            cap,
            [min(n, 32) for n in lengths] if asked.tiny else lengths,
            gpu,
        )
        plans.append(made)
        write_whole(asked.predict, json.dumps({"plans": plans}, indent=1) + "\n")
        print(*(made[key] for key in ("name", "cap_gib", "fits", "savers", "error") if key in made))


def replaced(words: list[str], given: list[str]) -> list[str]:
    """Words, with those of the same keys replaced."""
    keys = {word.partition("=")[0] for word in given}
    return [*(word for word in words if word.partition("=")[0] not in keys), *given]


def tiny_model() -> str:
    folder = Path(tempfile.gettempdir()) / "more_model_tiny"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


# ── runs ──────────────────────────────────────────────────────────────────────────────────────


def run_case(case: dict[str, Any], steps: int) -> dict[str, Any]:
    """Steps of the engine's own loop by the plan, under the plan's own cap."""
    from nli import Observer, run_trainfit
    from trainfit.conf import compose

    made = codec.decode(Plan, case["plan"])
    config = compose("nli", case["words"][1:]).config
    tokens = equal_tokens(16 * steps, made.workload.max_length)
    warm = steps // 4

    class Timed(Observer):
        """Keeps the end of every step and the losses that are logged."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.losses: list[float] = []

        def on_step(self, _step: int) -> None:
            sync("cuda" if CUDA else "cpu")
            self.ends.append(time.perf_counter())

        def on_log(self, row: Any) -> None:
            self.losses.append(row.loss)

    observer = Timed()
    result = run_trainfit(config, made, tokens, observer, steps)
    spent = np.diff(observer.ends)[warm:].tolist()
    return {
        "status": result.status,
        "events": [codec.encode(event) for event in result.events],
        "losses": observer.losses,
        "median_step_seconds": statistics.median(spent),
        "samples_per_second": made.effective_batch_size / statistics.median(spent),
        **peaks("cuda" if CUDA else "cpu"),
    }


def equal_tokens(count: int, length: int) -> Any:
    """Sequences of one length with random tokens and labels."""
    from trainfit.data.tokens import Tokens

    draws = np.random.default_rng(0)
    return Tokens(
        ids=draws.integers(300, 1900, count * length).astype(np.int32),
        starts=np.arange(count) * length,
        lengths=np.full(count, length),
        labels=draws.integers(0, 2, count),
    )


def least(method: str) -> dict[str, Any]:
    """Arguments of a step that take the least memory."""
    moved = {"checkpointing": "full", "offload_activations": True, "offload_optimizer": True}
    return moved | ({} if method == "full" else {"quantization": "nf4"})


def run_step(case: dict[str, Any], steps: int) -> dict[str, Any]:
    """Steps of the planner's probe in this process; running out of memory is a result."""
    device, plan = ("cuda" if CUDA else "cpu"), case["plan"]
    arguments = dict(plan["task"]["arguments"])
    arguments["micro_batches"] = min(3, plan["gradient_accumulation_steps"])
    if not case["fits"]:
        arguments |= least(arguments["method"])
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case["cap_gib"] * GIB / total)
    began = time.perf_counter()
    try:
        model, make_step = build(
            {"factory": plan["task"]["factory"], "arguments": arguments}, device
        )
        step = make_step(model)
        samples = []
        for _ in range(steps):
            started = time.perf_counter()
            step()
            sync(device)
            samples.append(time.perf_counter() - started)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error)[:200], "seconds": time.perf_counter() - began}
    return {
        "median_step_seconds": statistics.median(samples[1:]),
        "seconds": time.perf_counter() - began,
        **peaks(device),
    }


def run_all(asked: argparse.Namespace, record: dict[str, Any], keep: Callable[[], None]) -> None:
    plans = [p for p in json.loads(asked.run.read_text())["plans"] if "plan" in p]
    plans = [p for p in plans if not asked.case or p["name"] in asked.case]
    if asked.random:
        unfit = [p for p in plans if not p["fits"]][:MOST_UNFIT]
        plans = [p for p in plans if p["fits"]][: asked.random] + unfit
    begun = time.monotonic()
    for case in plans:
        if time.monotonic() - begun > asked.seconds:
            print("no time is left for the others")
            break
        done = (
            guarded(run_step, case, SHORT) if asked.random else alone(run_case, case, asked.steps)
        )
        record["results"].append({**told(case), **done})
        keep()
        print(f"{time.monotonic() - begun:5.0f}s {line(record['results'][-1])}", flush=True)


def guarded(work: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    try:
        return work(*given)
    except Exception as error:  # noqa: BLE001 - the other cases go on
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def told(case: dict[str, Any]) -> dict[str, Any]:
    """What the plan of a case promised."""
    plan = case["plan"]
    facts = {key: case[key] for key in ("name", "words", "cap_gib", "fits", "savers")}
    return facts | {"predicted": {"memory": plan["memory"], "time": plan["time"]}}


def line(row: dict[str, Any]) -> str:
    """Outcome of a case in a line."""
    memory = row["predicted"]["memory"]
    said = f"{row['name']} in {row['cap_gib']} GiB, {'fits' if row['fits'] else 'does not fit'}"
    peak = f"predicted {memory['peak_allocated_gib']:.2f}/{memory['peak_reserved_gib']:.2f}"
    if "peak_allocated" in row:
        peak += f", took {row['peak_allocated'] / GIB:.2f}/{row['peak_reserved'] / GIB:.2f}"
    more = {k: row[k] for k in ("out_of_memory", "error", "samples_per_second") if k in row}
    return f"{said}: {peak} GiB {more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", type=Path, metavar="PLANS")
    parser.add_argument("--run", type=Path, metavar="PLANS")
    parser.add_argument("--peers", type=Path, metavar="PLANS")
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case", nargs="*", choices=CASES)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on this CPU")
    asked = parser.parse_args()
    if asked.predict is not None:
        predict_all(asked)
        return
    if asked.output is None:
        parser.error("--output is missing")
    record = json.loads(asked.output.read_text()) if asked.output.exists() else opened()
    record["commands"].append(" ".join(["python", "benchmarks/more_model.py", *sys.argv[1:]]))

    def keep() -> None:
        write_whole(asked.output, json.dumps(record, indent=1) + "\n")

    if asked.run is not None:
        run_all(asked, record, keep)
    if asked.peers is not None:
        from more_model_peers import compare

        compare(asked, record, keep)
    if asked.losses:
        from more_model_losses import curves

        curves(asked, record, keep)


def hardware() -> dict[str, str]:
    return {"name": torch.cuda.get_device_name() if CUDA else platform.processor() or "CPU"}


def opened() -> dict[str, Any]:
    """Begin a record."""
    import transformers

    return {
        "commands": [],
        "date": time.strftime("%Y-%m-%d"),
        "hardware": alone(hardware)["name"],
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "results": [],
        "peers": [],
        "losses": [],
    }


if __name__ == "__main__":
    main()
