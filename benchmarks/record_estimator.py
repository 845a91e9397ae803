"""Record the truth that the estimators are judged on: peak memory and step time on a GPU.

    python benchmarks/record_estimator.py --output FILE [--only WORD] [--trace FOLDER]

Each case runs in a process of its own, forked after the imports, so that no case sees another's
memory. Results are written as they come.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from estimator_cases import CASES, Case, as_json, build_model, build_step

GIB = 1024**3


def measure(case: Case, repeats: int, trace: Path | None) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.device("cuda"):
        model = build_model(case)
    if case.compile:
        model.compile()
    step = build_step(case, model, "cuda")
    started = time.perf_counter()
    weights = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    if trace is not None:
        torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
    step()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    result = {
        "case": as_json(case),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "retries": stats["num_alloc_retries"],
        "weights": weights,
        "between_steps": torch.cuda.memory_allocated(),
        "first_step_seconds": first,
    }
    if trace is not None:
        write_trace(trace)
    result["step_seconds"] = times(step, repeats)
    result["median_step_seconds"] = statistics.median(result["step_seconds"])
    return result


def times(step: Any, repeats: int) -> list[float]:
    step()
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - started)
    return samples


def write_trace(path: Path) -> None:
    """Allocations (+bytes) and frees (-bytes) of the second step, with where they came from."""
    events = []
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
        if entry["action"] not in ("alloc", "free_completed"):
            continue
        sign = 1 if entry["action"] == "alloc" else -1
        frames = entry.get("frames", [])[:4] if sign > 0 else []
        where = [f"{Path(f['filename']).name}:{f['line']}:{f['name']}" for f in frames]
        events.append([sign * entry["size"], entry["addr"], *where])
    torch.cuda.memory._record_memory_history(enabled=None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(events).encode()))


def child(queue: Any, case: Case, repeats: int, trace: Path | None) -> None:
    try:
        queue.put(measure(case, repeats, trace))
    except BaseException as error:  # noqa: BLE001 - a case that failed is a result too
        queue.put({"case": as_json(case), "error": f"{type(error).__name__}: {error}"[:2000]})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--skip", default="\0")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    chosen = [c for n, c in CASES.items() if args.only in n and args.skip not in n][args.start :]
    context = multiprocessing.get_context("fork")
    results: list[dict[str, Any]] = []
    for case in chosen:
        queue = context.Queue()
        trace = args.trace / f"{case.name.replace(' ', '_')}.json.gz" if args.trace else None
        process = context.Process(target=child, args=(queue, case, args.repeats, trace))
        started = time.perf_counter()
        process.start()
        result = queue.get()
        process.join()
        results.append(result)
        shown = result.get("error") or (
            f"{result['peak_allocated'] / GIB:.3f} / {result['peak_reserved'] / GIB:.3f} GiB, "
            f"{result['median_step_seconds'] * 1000:.1f} ms"
        )
        print(f"{case.name}: {shown} ({time.perf_counter() - started:.1f} s)", flush=True)
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        record = {
            "command": " ".join(["python", "benchmarks/record_estimator.py", *sys.argv[1:]]),
            "versions": versions,
            "results": results,
        }
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
