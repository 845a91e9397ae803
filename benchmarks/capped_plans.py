"""Plan models under memory caps, for `record_jobs.py --plans` to hold the plans to their word.

python benchmarks/capped_plans.py --output FILE
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from trainfit.core import codec
from trainfit.core.errors import TrainfitError
from trainfit.jobs.job_plan import plan

CAPS = (8, 11, 16, 24, 40, 80)
JOBS: dict[str, list[str]] = {
    "bert full": ["nli", "model.name=bert-base", "model.method=full"],
    "modernbert full": ["nli", "model.name=modernbert-base", "model.method=full"],
    "deberta full": ["nli", "model.name=deberta-v3-base", "model.method=full"],
    "gemma full": ["nli", "model.name=gemma-3-1b-it", "model.method=full"],
    "gemma lora": ["nli", "model.name=gemma-3-1b-it", "model.method=lora"],
    "gpt-small": ["gpt", "model.name=gpt-small"],
    "gpt-medium": ["gpt", "model.name=gpt-medium"],
}
# Many sequences per step, so that memory and not the step is what limits a micro-batch.
BATCH = "training.effective_batch_size=256"


def make(job: tuple[str, list[str], int]) -> dict[str, Any]:
    """The plan of a job under a cap, with what it promises."""
    name, words, cap = job
    try:
        made = plan(*words, BATCH, gpu="h200", memory_gib=cap)
    except TrainfitError as error:
        return {"name": f"{name} {cap} GiB", "cap_gib": cap, "fits": False, "error": str(error)}
    return {
        "name": f"{name} {cap} GiB",
        "cap_gib": cap,
        "fits": made.fits,
        "memory": codec.encode(made.memory),
        "time": codec.encode(made.time),
        "accumulation": made.gradient_accumulation_steps,
        "checkpointing": made.gradient_checkpointing,
        "compile": made.compile,
        "tokens": made.micro_batch_tokens,
        "factory": made.task.factory,
        "arguments": made.task.arguments,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names with caps, as in 'bert full 8'")
    parser.add_argument("--eager", action="store_true", help="plan without compiling")
    arguments = parser.parse_args()
    eager = ["optimization.compile=false"] if arguments.eager else []
    jobs = [
        (name, [*words, *eager], cap)
        for name, words in JOBS.items()
        for cap in CAPS
        if not arguments.only or f"{name} {cap}" in arguments.only
    ]
    plans: list[dict[str, Any]] = []
    # Planning waits for children, each of which is asked by one plan at a time: processes.
    with ProcessPoolExecutor(arguments.processes) as pool:
        for made in pool.map(make, jobs):
            plans.append(made)
            arguments.output.write_text(json.dumps({"plans": plans}, indent=1) + "\n")
            told = ("name", "fits", "checkpointing", "compile", "tokens", "error")
            print(*(made[key] for key in told if key in made), flush=True)


if __name__ == "__main__":
    main()
