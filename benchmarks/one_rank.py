"""What sharding costs: a run of one rank with FSDP2 really active beside one without.

Both are the plain command on the same files, compiled, and without CUDA graphs, which a sharded
step cannot have. One rank sends nothing, so that the difference is the work of FSDP2 itself: its
hooks, and the copies of what it makes whole. Steps are large, as those of sharded models are, and
Python is ahead of the GPU. The memory of both is capped, so that the run's own plan predicts it.

python benchmarks/one_rank.py MODEL --out FILE [--rounds 2] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from head_files import write_parts
from heads import HEADS, HERE, MODELS, Size, command, read_speed
from jobs import Bench, Job, hardware, timed, versions

FULL, TINY = Size(256, (5120, 64, 64), 512), Size(8, (160, 16, 16), 64)
WAYS = {"whole": "optimization.sharding=none", "sharded": "optimization.sharding=fsdp"}
FIXED = ("optimization.cuda_graph=false",)
GPU = ("optimization.compile=true", "device.memory_gib=40")


def run(bench: Bench, size: Size, words: list[str], runs: Path) -> dict[str, Any]:
    """Speed and memory of a run, and its receipt's word on sharding."""
    shutil.rmtree(runs, ignore_errors=True)
    started = [sys.executable, "-m", "trainfit", *words]
    found = timed(bench, started, bench.scratch / "caches", False)
    if "error" in found:
        return found
    [folder] = (path.parent for path in runs.glob("*/run.json"))
    receipt = json.loads((folder / "receipt.json").read_text())
    [item] = (one for one in receipt["items"] if one["name"] == "sharding")
    result = json.loads((folder / "result.json").read_text())
    planned = json.loads((folder / "plan.json").read_text())["memory"] or {}
    names = ("peak_allocated_gib", "peak_reserved_gib", "bound")
    return {
        **found,
        **read_speed(runs, size),
        "predicted": {name: planned.get(name) for name in names},
        "peak_allocated_gib": result["peak_memory_gib"],
        "receipt": {key: item[key] for key in ("requested", "observed", "status", "evidence")},
    }


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed of the sharded runs by that of the others, and the error of the predictions."""
    good = [one for one in runs if "error" not in one]
    rates = {way: [one["samples_per_second"] for one in good if one["way"] == way] for way in WAYS}
    if not all(rates.values()):
        return {}
    errors = {
        one["way"]: one["predicted"]["peak_allocated_gib"] / one["peak_allocated_gib"] - 1
        for one in good
        if one["predicted"]["peak_allocated_gib"]
    }
    return {
        "speed_of_sharded": median(rates["sharded"]) / median(rates["whole"]),
        "memory_error": errors,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, on the CPU")
    parser.add_argument("--scratch", type=Path, help="where models and data are kept")
    given = parser.parse_args()
    roots = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(root).resolve()) for root in roots)
    head, size = HEADS["pairs"], TINY if given.tiny else FULL
    scratch = (given.scratch or Path(tempfile.gettempdir()) / "trainfit-heads").resolve()
    scratch /= "tiny" if given.tiny else "full"
    folder, data, runs = scratch / "models" / MODELS[given.model], scratch / "one", scratch / "runs"
    write_parts(data, head.kind, size.parts, tiny=given.tiny)
    if not (folder / "tokenizer.json").exists():
        words = [sys.executable, str(HERE / "head_files.py"), MODELS[given.model], str(folder)]
        subprocess.run([*words, *(["--tiny"] if given.tiny else [])], check=True)
    bench = Bench(
        job=Job(title="one rank, sharded"),
        name="one-rank",
        scratch=scratch,
        out=given.out,
        rounds=given.rounds,
        tiny=given.tiny,
        warm=True,
        only=None,
        limit=None,
    )
    ways = {
        way: [*command(head, size, data, folder, runs), *FIXED, *(() if given.tiny else GPU), word]
        for way, word in WAYS.items()
    }
    bench.record = {
        "id": f"one-rank-{given.model}-{time.strftime('%Y%m%d-%H%M%S')}",
        "model": MODELS[given.model],
        "command": " ".join(["python", "benchmarks/one_rank.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": "CPU" if given.tiny else hardware(),
        "versions": versions(),
        "tiny": given.tiny,
        "batch": size.batch,
    }
    for number in range(1, given.rounds + 1):
        for way, words in ways.items():
            found = {"round": number, "way": way, **run(bench, size, words, runs)}
            bench.record |= compare([*bench.record.get("runs", ()), found])
            bench.keep(found)
    shown = ("speed_of_sharded", "memory_error")
    print(json.dumps({name: bench.record.get(name) for name in shown}), flush=True)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
