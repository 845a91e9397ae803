"""Record what trainfit's own steps take on a GPU: peak memory and time, eager and compiled.

    python benchmarks/record_jobs.py --output FILE [--only WORD] [--device cpu]

Each case runs in a process of its own, and results are written as they come.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from job_cases import COMPILED, EAGER, build

GIB = 1024**3


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peaks(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {}
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def compiled(model: torch.nn.Module, how: str) -> None:
    from trainfit.runtime import compile_blocks, compile_model

    if how == "blocks":
        compile_blocks(model)
    elif how == "whole":
        compile_model(model)


def measure(case: dict[str, Any], device: str, how: str, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, make_step = build(case, device)
    compiled(model, how)
    step = make_step(model)
    started = time.perf_counter()
    step()
    step()
    sync(device)
    result: dict[str, Any] = {"first_two_seconds": time.perf_counter() - started, **peaks(device)}
    samples = []
    for _ in range(repeats):
        sync(device)
        started = time.perf_counter()
        step()
        sync(device)
        samples.append(time.perf_counter() - started)
    result |= {f"steady_{name}": value for name, value in peaks(device).items()}
    result["step_seconds"] = samples
    result["median_step_seconds"] = statistics.median(samples)
    return result


def launch_costs(repeats: int = 2000) -> dict[str, float]:
    """Seconds of the CPU per small operation, forward with a graph and backward."""
    width = 64
    x = torch.ones(width, width, device="cuda", requires_grad=True)
    weight = torch.ones(width, width, device="cuda", requires_grad=True)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(repeats // 4):
            y = (y @ weight).mul(0.5).add(x).tanh()
        return y.sum()

    rows = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = chain()
        middle = time.perf_counter()
        torch.cuda.synchronize()
        again = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        rows.append(((middle - begin) / repeats, (end - again) / repeats))
    return {"forward": min(r[0] for r in rows), "backward": min(r[1] for r in rows)}


def worker(queue: Any, work: Any, arguments: tuple[Any, ...]) -> None:
    try:
        queue.put(work(*arguments))
    except Exception as error:  # noqa: BLE001 - a case that fails is a result
        queue.put(
            {
                "error": f"{type(error).__name__}: {str(error)[:300]}",
                "trace": traceback.format_exc()[-1500:],
            }
        )


def alone(work: Any, *arguments: Any, seconds: float = 240) -> dict[str, Any]:
    """Run in a forked process: nothing is imported again, and nothing is left behind."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=worker, args=(queue, work, arguments))
    process.start()
    try:
        return queue.get(timeout=seconds)
    except Exception as error:  # noqa: BLE001
        return {"error": f"no answer ({type(error).__name__})"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--skip", default="\0")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--how", default="blocks")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=500)
    arguments = parser.parse_args()
    import transformers  # noqa: F401 - before the forks

    import trainfit.jobs.probes  # noqa: F401

    device = arguments.device
    begun = time.monotonic()
    jobs: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
    for name, case in {**EAGER, **COMPILED}.items():
        how = arguments.how if name.endswith("compiled") else "none"
        if arguments.only in name and arguments.skip not in name:
            jobs.append(
                (name, measure, (case, device, how, arguments.repeats), {**case, "how": how})
            )
    record: dict[str, Any] = {
        "command": " ".join(["python", *(Path(word).name for word in sys.argv)]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "results": [],
    }
    for name, work, given, facts in jobs:
        if time.monotonic() - begun > arguments.seconds:
            break
        outcome = alone(work, *given)
        record["results"].append({"name": name, "case": facts, **outcome})
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
        shown = {k: v for k, v in outcome.items() if k not in ("step_seconds", "trace")}
        print(f"{time.monotonic() - begun:5.0f}s {name}: {shown}", flush=True)
    if device == "cuda":
        record["launch_seconds"] = alone(launch_costs)
        record["context_gib"] = alone(context)
        record["hardware"] = torch.cuda.get_device_name(0)
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
        print(record["launch_seconds"], record["context_gib"])


def context() -> dict[str, float]:
    """What is gone of the GPU before anything is allocated."""
    torch.ones(1, device="cuda") @ torch.ones(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    return {"gib": (total - free - torch.cuda.memory_reserved()) / GIB}


if __name__ == "__main__":
    main()
