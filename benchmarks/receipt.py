"""What the receipt costs: the same run with and without its profiled step, in turns.

A run has one such step. Its cost is the difference of the times of two runs, from the third step
on, and is told as a share of a run of a thousand steps.

python benchmarks/receipt.py --output FILE --workload nli-deberta gpt
python benchmarks/receipt.py --output FILE --tiny                        on a CPU
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainfit.core.files import write_whole
from trainfit.engine.loop import train
from trainfit.engine.observers import Observer
from trainfit.jobs import job_plan, tuned_plans
from trainfit.measuring.machine_rates import device_name
from trainfit.measuring.timing import synchronize
from trainfit.runtime import applied, forget_compiled
from trainfit.tuning.trial import build, steps_alone
from trainfit.tuning.tuned_cache import TrialCandidate
from tune import WORKLOADS, job_of

FIRST = 2
"""Steps in which the compiler works."""
LONG_RUN = 1000


class Span(Observer):
    """Times the steps after the first ones as a whole: the device is waited for at both ends."""

    def __init__(self, steps: int) -> None:
        self.ends, self.marks = (FIRST, steps), list[float]()

    def on_step(self, step: int) -> None:
        """Mark an end."""
        if step in self.ends:
            synchronize()
            self.marks.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Between the two."""
        began, ended = self.marks
        return ended - began


def run(candidate: TrialCandidate, steps: int, profiled: bool) -> float:
    """Train so many steps; the seconds that they took."""
    setup, span = build(candidate), Span(steps)
    settings = replace(steps_alone(setup.settings), max_steps=steps, profile_step=profiled)
    with tempfile.TemporaryDirectory() as folder, applied(setup.runtime), setup.around():
        place = Path(folder) / "run"
        train(setup.task, settings, place, observers=[span])
        assert (place / "evidence.json").exists() == profiled
    forget_compiled()
    return span.seconds


def measure(name: str, steps: int, rounds: int) -> dict[str, Any]:
    job = job_of(WORKLOADS[name])
    plan = job_plan.with_tuned(job, job.ask({}))
    candidate = TrialCandidate(settings={}, plan=plan, task=tuned_plans.trial_task(job))
    run(candidate, FIRST + 1, profiled=False)  # what a process meets for the first time
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for profiled, spent in found.items():
            spent.append(run(candidate, steps, profiled))
    extra = [on - off for on, off in zip(found[True], found[False], strict=True)]
    step = statistics.median(found[False]) / (steps - FIRST)
    share = statistics.median(extra) / (LONG_RUN * step)
    print(f"{name}: {extra} s on steps of {step:.4f} s, {share:.2%} of {LONG_RUN}", flush=True)
    return {
        "steps": steps,
        "with_seconds": found[True],
        "without_seconds": found[False],
        "extra_seconds": extra,
        "step_seconds": step,
        "share_of_1000_steps": share,
        "device": device_name(job.profile).split(" GPU-")[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workload", nargs="*", choices=sorted(WORKLOADS), default=None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    asked = parser.parse_args()
    names = ["tiny"] if asked.tiny else asked.workload or [n for n in WORKLOADS if n != "tiny"]
    record: dict[str, Any] = {
        "command": "python benchmarks/receipt.py --output FILE "
        + ("--tiny" if asked.tiny else f"--workload {' '.join(names)}")
        + f" --steps {asked.steps} --rounds {asked.rounds}",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("torch", "transformers")}
        | {"python": platform.python_version()},
        "results": {},
    }
    for name in names:
        record["results"][name] = measure(name, asked.steps, asked.rounds)
        write_whole(asked.output, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
