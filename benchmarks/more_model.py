"""More model than memory: plans under caps, made without a GPU and held to their word on one.

On a CPU, 10 to 60 s a case on slow cores (all named ones 5 minutes, 50 random ones half an hour):

    python benchmarks/more_model.py --predict NAMED --seconds 280
    python benchmarks/more_model.py --predict DRAWN --random 50 --seconds 280

On a GPU, with `--seconds 240` (the default) for calls of 5 minutes:

    python benchmarks/more_model.py --run NAMED --output FILE
    python benchmarks/more_model.py --run DRAWN --output FILE --random 50
    python benchmarks/more_model.py --peers NAMED --output FILE
    python benchmarks/more_model.py --losses --output FILE

A named case takes 1 to 2 minutes, a random one 5 to 20 s, a round of a contender a minute, and each
of the 18 runs for the losses 20 s: 8, 10, 20 and 6 minutes in all.

Every command takes the same words again until it says nothing of time: results are written as they
come, no case begins after `--seconds`, and the next call goes on where the last one stopped.
`--case NAME …` takes some of the named cases. `--tiny` is a tiny model, on a CPU: all of the above
in 10 minutes.

A plan is what the planner chooses by itself on an H200 of which only so much may be used. The named
cases run the engine's own loop under `device.memory_gib`. Random ones run the planner's step: four
in five are the first that are said to fit, the others the first that are not, which are tried with
the leanest settings, whole and by single sequences.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
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
from trainfit.engine.optimizer import take_workspaces
from trainfit.hardware.model_shapes import model_shape

GIB = 2**30
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
CUDA = torch.cuda.device_count() > 0
"""Found by NVML: were CUDA started here, no forked process could use it any more."""
STEPS, SHORT = 20, 5
UNFIT = 5
"""One in so many random cases is said not to fit."""
MOST_DRAWN = 4
"""Draws for each case that is asked for, at most."""
KEPT = 0.125
"""GiB that a process may keep from one case to the next: workspaces of libraries."""
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
HUGE = ("llama-3.2-1b", "qwen2.5-1.5b", "gemma-2-2b")
NARROW = ("gemma-3-1b-it", "llama-3.2-1b", "qwen2.5-1.5b", "gemma-2-2b")
"""Models whose weights and gradients alone take 6 GiB and more."""
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


def random_cases(seed: int = 0) -> Iterator[tuple[str, list[str], float, list[int]]]:
    """Yield models, methods, caps and lengths without end; most of the caps are tight.

    One in five is about what float32 weights and gradients take, with nothing beside them.
    """
    draws, number = np.random.default_rng(seed), 0
    while True:
        among = draws.choice([0, 1, 2], p=[0.35, 0.4, 0.25])
        name = str(draws.choice((SMALL, LARGE, HUGE)[among]))
        method = str(draws.choice(("full", "full", "lora", "dora") if among == 2 else METHODS))
        most = 80 if draws.random() < 0.3 else (16, 12, 9)[2 - among]
        cap = round(float(np.exp(draws.uniform(np.log(6), np.log(most)))), 1)
        narrow = number % UNFIT == UNFIT - 1
        if narrow:
            name, method = str(draws.choice(NARROW)), "full"
            held = 8 * model_shape(name).parameters / GIB
            cap = round(max(6.0, held * draws.uniform(0.8, 1.05)), 1)
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
        title += ", narrow" if narrow else ""
        number += 1
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
    """Plan the cases that the file does not have yet."""
    wide = {"hidden_size": 256, "intermediate_size": 1024} if asked.random else {}
    given = [f"model.name={tiny_model(**wide)}", "data.max_length=32"] if asked.tiny else []
    found = json.loads(asked.predict.read_text())["plans"] if asked.predict.exists() else []
    names = {made["name"] for made in found}
    until = time.monotonic() + asked.seconds
    for name, words, cap, lengths in random_cases() if asked.random else named_cases(asked):
        if asked.random and enough(found, asked.random):
            break
        if name in names:
            continue
        if time.monotonic() > until:
            print("no time is left for the others: call again to go on", flush=True)
            break
        if asked.tiny:
            cap, lengths = max(0.1, round(cap / 80, 2)), [min(n, 32) for n in lengths]
        gpu = None if asked.tiny and not asked.random else "h200"
        made = predict(name, replaced(words, given), cap, lengths, gpu)
        found.append(made)
        write_whole(asked.predict, json.dumps({"plans": found}) + "\n")
        shown = (made[key] for key in ("name", "cap_gib", "fits", "savers", "error") if key in made)
        print(*shown, flush=True)
    if asked.random:
        print(json.dumps(predicted(taken(found, asked.random)), indent=1))


def named_cases(asked: argparse.Namespace) -> Iterator[tuple[str, list[str], float, list[int]]]:
    for name in asked.case or CASES:
        words, cap = CASES[name]
        yield name, [*words, *LONG], cap, [512] * 1000


def taken(plans: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Choose the first plans that fit and the first that do not, in the order of the draws."""
    wanted = {True: count - count // UNFIT, False: count // UNFIT}
    chosen = []
    for one in plans:
        if "plan" in one and wanted[one["fits"]]:
            wanted[one["fits"]] -= 1
            chosen.append(one)
    return chosen


def enough(plans: list[dict[str, Any]], count: int) -> bool:
    return len(taken(plans, count)) == count or len(plans) >= MOST_DRAWN * count


def predicted(plans: list[dict[str, Any]]) -> dict[str, Any]:
    """Count what the plans promise, and the seconds that their steps take."""
    fitting = [one for one in plans if one["fits"]]
    seconds = [
        one["plan"]["time"]["step_seconds"]
        * SHORT
        * micro_batches(one["plan"])
        / one["plan"]["gradient_accumulation_steps"]
        for one in fitting
    ]
    return {
        "fit": len(fitting),
        "do not fit": len(plans) - len(fitting),
        "caps": sorted(one["cap_gib"] for one in plans),
        "seconds of the steps": round(sum(seconds), 1),
        "the longest": round(max(seconds, default=0.0), 1),
    }


def replaced(words: list[str], given: list[str]) -> list[str]:
    """Words, with those of the same keys replaced."""
    keys = {word.partition("=")[0] for word in given}
    return [*(word for word in words if word.partition("=")[0] not in keys), *given]


def tiny_model(**wide: int) -> str:
    folder = Path(tempfile.gettempdir()) / f"more_model_{'wide' if wide else 'tiny'}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | wide))
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


def least(arguments: dict[str, Any], longest: int | None) -> dict[str, Any]:
    """Arguments of a step that takes the least memory, as it is cut or by single sequences.

    Whole steps have larger activations, and no second gradients to add to the first.
    """
    moved = {"checkpointing": "full", "offload_activations": True, "offload_optimizer": True}
    row: dict[str, Any] = {} if arguments["method"] == "full" else {"quantization": "nf4"}
    if longest is not None:
        row |= {"rows": 1, "width": longest, "micro_batches": 3}
        row |= {} if arguments["slots"] is None else {"slots": 1, "lengths": [longest]}
    return arguments | moved | row


def micro_batches(plan: dict[str, Any]) -> int:
    """Micro-batches of a short step: the third meets what the first two have left behind."""
    return min(3, int(plan["gradient_accumulation_steps"]))


def run_step(case: dict[str, Any], steps: int, single: bool = False) -> dict[str, Any]:
    """Steps of the planner's probe in this process; running out of memory is a result.

    `single`: what does not fit is cut into single sequences.
    """
    device, plan = ("cuda" if CUDA else "cpu"), case["plan"]
    arguments = dict(plan["task"]["arguments"])
    arguments["micro_batches"] = micro_batches(plan)
    if not case["fits"]:
        arguments = least(arguments, max(plan["workload"]["lengths"]) if single else None)
    if not CUDA:
        arguments["attention"] = "auto"  # the plan's may be the GPU's alone
    facts = {"steps": steps, "micro_batches": arguments["micro_batches"]}
    with torch.device(device):
        take_workspaces()  # as the loop does: later they would hold on to a large segment
    if CUDA:
        facts["kept_gib"] = torch.cuda.memory_allocated() / GIB
        if facts["kept_gib"] > KEPT:
            raise RuntimeError(f"{facts['kept_gib']:.2f} GiB were taken before the case began")
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case["cap_gib"] * GIB / total)
    began = time.perf_counter()
    samples = []
    try:
        model, make_step = build(
            {"factory": plan["task"]["factory"], "arguments": arguments}, device
        )
        step = make_step(model)
        facts["build_seconds"] = time.perf_counter() - began
        for _ in range(steps):
            started = time.perf_counter()
            step()
            sync(device)
            samples.append(time.perf_counter() - started)
    except torch.OutOfMemoryError as error:
        facts |= {"out_of_memory": str(error)[:200], "steps": len(samples)}
    else:
        facts["median_step_seconds"] = statistics.median(samples[1:])
    return {**facts, "seconds": time.perf_counter() - began, **peaks(device)}


def run_steps(pipe: Any, cases: list[dict[str, Any]], steps: int) -> None:
    """Run cases one after the other, as long as the process is as good as a new one."""
    for case in cases:
        done = guarded(run_step, case, steps)
        gc.collect()
        if not case["fits"] and "out_of_memory" in done:
            if CUDA:
                torch.cuda.empty_cache()
            done = {**guarded(run_step, case, steps, True), "before": done}
        pinned = not case["fits"] or any(
            value is True for name, value in case["savers"].items() if name.startswith("offload")
        )
        clean = not pinned and "error" not in done and "out_of_memory" not in done
        if CUDA and clean:
            torch.cuda.empty_cache()
            clean = torch.cuda.memory_allocated() < KEPT * GIB
        pipe.send((done, clean))
        if not clean:
            break


def in_turn(
    cases: list[dict[str, Any]], steps: int, seconds: float = 120
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield cases and their results; a process that is not clean is followed by a new one."""
    context, left = multiprocessing.get_context("fork"), deque(cases)
    while left:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_steps, args=(theirs, list(left), steps))
        process.start()
        theirs.close()
        clean = True
        try:
            while left and clean:
                try:
                    lost = not ours.poll(seconds)
                    done, clean = ({"error": "no answer"}, False) if lost else ours.recv()
                except EOFError:
                    done, clean = {"error": "the process ended"}, False
                yield left.popleft(), done
        finally:
            process.kill()
            process.join()


def import_models(plans: list[dict[str, Any]]) -> None:
    """Import before the forks what all of them need; CUDA is not started."""
    from trainfit.jobs import probes  # noqa: F401
    from trainfit.jobs.models.backbone import build_encoder

    for name in {one["plan"]["task"]["arguments"]["name"] for one in plans}:
        with torch.device("meta"):
            build_encoder(name, weights="random")


def run_all(asked: argparse.Namespace, record: dict[str, Any], keep: Callable[[], None]) -> None:
    plans = [p for p in json.loads(asked.run.read_text())["plans"] if "plan" in p]
    plans = [p for p in plans if not asked.case or p["name"] in asked.case]
    if asked.random:
        plans = taken(plans, asked.random)
    names = {row["name"] for row in record["results"]}
    left = [p for p in plans if p["name"] not in names]
    begun = time.monotonic()
    results: Iterator[tuple[dict[str, Any], dict[str, Any]]]
    if asked.random:
        import_models(left)
        results = in_turn(left, SHORT)
    else:
        results = ((case, alone(run_case, case, asked.steps)) for case in left)
    for number, (case, done) in enumerate(results, 1):
        record["results"].append({**told(case), **done})
        keep()
        print(f"{time.monotonic() - begun:5.0f}s {line(record['results'][-1])}", flush=True)
        if over(asked) and number < len(left):
            break
    if asked.random:
        record["summary"] = summary([r for r in record["results"] if r["name"] not in CASES])
        keep()
        print(json.dumps(record["summary"], indent=1))


def over(asked: argparse.Namespace) -> bool:
    """Tell if the time is used up, in words too."""
    if time.monotonic() < asked.until:
        return False
    print("no time is left for the others: call again to go on", flush=True)
    return True


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the promises that were kept."""
    kept = [row for row in rows if "out_of_memory" not in row and "error" not in row]
    fit = [row for row in kept if row["fits"]]
    errors = [
        row["predicted"]["memory"]["peak_allocated_gib"] / (row["peak_allocated"] / GIB) - 1
        for row in fit
        if "peak_allocated" in row
    ]
    return {
        "said to fit": sum(row["fits"] for row in rows),
        "of these ran": len(fit),
        "without a retry": sum(not row.get("retries") for row in fit),
        "said not to fit": sum(not row["fits"] for row in rows),
        "of these ran all the same": len(kept) - len(fit),
        "failed for other reasons": sum("error" in row for row in rows),
        "peak within 3%": sum(abs(one) <= 0.03 for one in errors),
        "lowest and highest error of the peak": [round(f(errors), 4) for f in (min, max)]
        if errors
        else None,
    }


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
    keys = ("out_of_memory", "error", "retries", "seconds", "samples_per_second")
    more = {k: row[k] for k in keys if row.get(k)}
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
    parser.add_argument("--seconds", type=float, default=240, help="no case begins later")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on this CPU")
    asked = parser.parse_args()
    asked.until = time.monotonic() + asked.seconds
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
