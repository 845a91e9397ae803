"""Does `trainfit tune` find the best? Beside a grid that is declared here, run once, all of it.

Three workloads: NLI with the shapes of Gemma-3-1B and DeBERTa-v3-base (lengths as ReDSM5's, at most
512 tokens, 128 sequences a step), and GPT-2 124M (64 blocks of 1,024 tokens a step). Every point is
a trial of the engine's own loop in a child process, as tune's are. In the end the best of the grid
and tune's choice are timed again in turns, so that both see the same GPU in the same minute.

python benchmarks/tune.py --output FILE --workload nli-gemma --stage grid     goes on where it was
python benchmarks/tune.py --output FILE --workload nli-gemma --stage tune
python benchmarks/tune.py --output FILE --workload gpt --stage ladder
python benchmarks/tune.py --output FILE --workload gpt --stage removals     its second half alone
python benchmarks/tune.py --output FILE --workload gpt --stage rows --rows "batch size" TF32
python benchmarks/tune.py --output FILE --workload gpt --stage finder
python benchmarks/tune.py --output FILE --gpu h200 --stage predicted    its memory, on a CPU
python benchmarks/tune.py --output FILE --tiny                                 on a CPU, all stages
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from trainfit.conf import compose
from trainfit.core import codec
from trainfit.core.errors import TrainfitError
from trainfit.core.files import write_whole
from trainfit.core.plan_records import Plan
from trainfit.core.records import Scalar
from trainfit.hardware import catalogue
from trainfit.jobs import job_plan, tuned_plans
from trainfit.jobs.tuned_plans import JobQuestion
from trainfit.measuring.machine_rates import device_name
from trainfit.planning.estimator.estimate import GIB, Request, ask, target, told
from trainfit.tuning.candidates import Space, changed, differences, with_budget
from trainfit.tuning.children import Children
from trainfit.tuning.rungs import LadderStep
from trainfit.tuning.tuned_cache import Trial, TrialCandidate

STAGES = ("grid", "tune", "ladder", "finder", "removals", "rows", "predicted")
STEPS, WARM_UP, SECONDS, LIMIT = 20, 4, 4.0, 150.0


@dataclass(frozen=True)
class Workload:
    task: str
    words: tuple[str, ...]
    compile: tuple[str, ...]
    micro_batches: tuple[int, ...]
    ways: tuple[str, ...]
    """packed, padded, selective (checkpointing), efficient (attention), unfused."""
    sequences: int | None = 13_000
    more: tuple[dict[str, Scalar], ...] = ()
    """Points beside all combinations of these."""


NLI = ("model.weights=random", "model.method=full", "training.effective_batch_size=128")
WORKLOADS = {
    "nli-gemma": Workload(
        "nli",
        ("model.name=gemma-3-1b-it", *NLI),
        ("off", "default"),
        (1, 4),
        ("packed", "padded"),
        more=({"compile": "reduce-overhead", "micro_batches": 1, "way": "packed"},),
    ),
    "nli-deberta": Workload(
        "nli",
        ("model.name=deberta-v3-base", *NLI),
        ("off", "default"),
        (1, 4),
        ("packed", "padded"),
        more=({"compile": "reduce-overhead", "micro_batches": 1, "way": "packed"},),
    ),
    "gpt": Workload(
        "gpt",
        (
            "model.name=gpt-124m",
            "data.max_length=1024",
            "training.effective_batch_size=64",
            "training.max_steps=2000",
        ),
        ("off", "default", "reduce-overhead"),
        (1, 2),
        ("plain",),
        None,
        more=({"compile": "default", "micro_batches": 1, "way": "selective"},),
    ),
    "tiny": Workload(
        "nli",
        (
            "model.name=modernbert-tiny",
            "data.max_length=64",
            "training.effective_batch_size=16",
            "device.num_threads=1",
            *NLI[:2],
        ),
        ("off",),
        (1, 2),
        ("padded", "unfused"),
        400,
    ),
}
MOST_POINTS = 24
"""7 to 9 each: the best found elsewhere (a step at once, compiled), and what is around it."""


def points(workload: Workload) -> list[dict[str, Scalar]]:
    """The grid, declared before anything is measured."""
    found: list[dict[str, Scalar]] = [
        {"compile": mode, "micro_batches": count, "way": way}
        for way in workload.ways
        for mode in workload.compile
        for count in workload.micro_batches
    ] + list(workload.more)
    assert len(found) <= MOST_POINTS, len(found)
    return found


def job_of(workload: Workload, gpu: str | None = None) -> tuned_plans.JobQuestion:
    """The job on sequences of the documents' lengths, here or on a GPU of the catalogue."""
    composed = compose(workload.task, workload.words)
    longest = composed.config.data.max_length
    lengths = job_plan.assumed_lengths(workload.task, longest)
    if workload.sequences is not None:
        lengths = np.random.default_rng(0).permutation(lengths)[: workload.sequences]
    question = job_plan.question(composed, lengths.tolist())
    return tuned_plans.JobQuestion(
        composed=composed, question=question, profile=job_plan.machine(composed, gpu)
    )


def plan_of(space: Space, point: dict[str, Scalar]) -> Plan:
    """The plan of a point of the grid."""
    way, mode, count = point["way"], str(point["compile"]), int(point["micro_batches"] or 1)
    plan = space.ask({"flash": False}) if way == "padded" and space.base.packed else space.base
    plan = changed(
        plan,
        compile=mode != "off",
        gradient_checkpointing="selective" if way == "selective" else "none",
        optimizer="adamw" if way == "unfused" else "adamw_fused",
    )
    plan = replace(plan, compile_mode="default" if mode == "off" else mode)
    if plan.packed:
        return with_budget(space, plan, plan.gradient_accumulation_steps / count)
    whole = plan.effective_batch_size * plan.workload.max_length
    return with_budget(space, plan, whole / count / plan.micro_batch_tokens)


def grid(job: JobQuestion, workload: Workload, shown: dict[str, Any], keep: Any) -> None:
    """Every point once; those that are written down already are left alone."""
    done = shown.setdefault("grid", [])
    known = [one["point"] for one in done]
    todo = [point for point in points(workload) if point not in known]
    space = Space(question=job.question, profile=job.profile, base=job.ask({}), ask=job.ask)
    with _children(job) as children:
        for point in todo:
            plan = plan_of(space, point)
            found = _try(children, job, space.base, plan)
            done.append({"point": point, "plan": _short(plan), **_figures(found)})
            print(f"  {point}: {found.status} {_rate(found)} {found.note}", flush=True)
            keep()


def tune(job: JobQuestion, minutes: float, shown: dict[str, Any], keep: Any) -> None:
    """The command itself, then its choice and the grid's best in turns."""

    def tell(trial: Trial) -> None:
        print(f"  {trial.settings}: {trial.status} {_rate(trial)} {trial.note}", flush=True)

    result = tuned_plans.tune(job, minutes=minutes, tell=tell)
    shown["tune"] = codec.encode(result)
    print(f"  {result.seconds:.0f} s: {result.changes} {result.samples_per_second}", flush=True)
    keep()
    if shown.get("grid"):
        shown["in_turns"] = in_turns(job, result.best, shown["grid"])
        print(f"  {shown['in_turns']['verdict']}", flush=True)
        keep()


def in_turns(job: JobQuestion, best: Plan, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Two rounds of each, alternating."""
    space = Space(question=job.question, profile=job.profile, base=job.ask({}), ask=job.ask)
    ran = [one for one in measured if one["samples_per_second"] is not None]
    top = max(ran, key=lambda one: one["samples_per_second"]["value"])
    plans = {"tune": best, "grid": plan_of(space, top["point"])}
    rounds: dict[str, list[dict[str, Any]]] = {"tune": [], "grid": []}
    with _children(job) as children:
        for _ in range(2):
            for name, plan in plans.items():
                rounds[name].append(_figures(_try(children, job, space.base, plan)))
    rates = {
        name: [one["samples_per_second"]["value"] for one in found if one["samples_per_second"]]
        for name, found in rounds.items()
    }
    share = max(rates["tune"], default=0.0) / max(rates["grid"], default=1.0)
    verdict = {"point": top["point"], "tune_over_grid": share}
    return {"rounds": rounds, "verdict": verdict}


def ladder(
    stage: str,
    job: JobQuestion,
    minutes: float,
    rows: Sequence[str],
    shown: dict[str, Any],
    keep: Any,
) -> None:
    from trainfit.cli.pages import step_line
    from trainfit.tuning.climb import climb
    from trainfit.tuning.rungs import NAIVE_FACTORY

    began = time.monotonic()

    def watch(step: LadderStep) -> None:
        print(f"  {time.monotonic() - began:5.0f} s  {step_line(step)}", flush=True)

    with _children(job, NAIVE_FACTORY, at_most=3) as children:
        children.start(["eager", "default", "reduce-overhead"])  # they import while this plans
        best = job_plan.with_tuned(job, job.ask({}))
        made = climb(
            best,
            tuned_plans.trial_task(job),
            job.profile,
            title=job.composed.task,
            no_liger=job.question.no_liger,
            removals_only=stage == "removals",
            only=rows if stage == "rows" else (),
            minutes=minutes - (time.monotonic() - began) / 60,
            run=children.run,
            watch=watch,
        )
    shown[stage] = codec.encode(made)
    keep()


def predicted(job: JobQuestion, shown: dict[str, Any], keep: Any) -> None:
    """The memory of each measured step of one shape, by the estimator, which needs no GPU."""
    space = Space(question=job.question, profile=job.profile, base=job.ask({}), ask=job.ask)
    here = job.profile.gpus[0]
    gpu = target(catalogue.find(here.slug or ""), here.memory_gib)
    for one in shown.get("grid", []):
        graphs = one["point"]["compile"] == "reduce-overhead"
        if one["status"] != "ok" or graphs or one["point"]["way"] == "padded":
            continue
        request = Request(task=plan_of(space, one["point"]).task, targets=(gpu,))
        room = told(ask([request])[0]).rooms[0]
        one["predicted_gib"] = room.peak_allocated / GIB
        off = one["predicted_gib"] / one["peak_memory_gib"] - 1
        print(f"  {one['point']}: {one['predicted_gib']:.2f} GiB ({off:+.2%})", flush=True)
        keep()


def finder(job: JobQuestion, shown: dict[str, Any], keep: Any) -> None:
    from trainfit.jobs.tuned_plans import job_of as step_of
    from trainfit.tuning.finder import find

    shown["finder"] = codec.encode(find(step_of(job.ask({})), job.profile))
    keep()


def _children(job: JobQuestion, *more: str, at_most: int = 2) -> Children:
    factories = (tuned_plans.FACTORIES[job.composed.task], *more)
    return Children([factory.partition(":")[0] for factory in factories], at_most=at_most)


def _try(children: Children, job: JobQuestion, base: Plan, plan: Plan) -> Trial:
    candidate = TrialCandidate(
        settings=differences(base, plan), plan=plan, task=tuned_plans.trial_task(job)
    )
    return children.run(candidate, steps=STEPS, warm_up=WARM_UP, limit=LIMIT, most_seconds=SECONDS)


def _figures(trial: Trial) -> dict[str, Any]:
    data: dict[str, Any] = codec.encode(trial)
    return data


def _rate(trial: Trial) -> str:
    found = trial.samples_per_second
    return "" if found is None else f"{found.value:.1f} [{found.low:.1f}, {found.high:.1f}]"


def _short(plan: Plan) -> dict[str, Any]:
    long = ("workload", "reasons", "task", "runtime", "measurements", "advice")
    encoded = codec.encode(plan)
    return {name: value for name, value in encoded.items() if name not in long}


def _record(output: Path) -> dict[str, Any]:
    if output.is_file():
        found: dict[str, Any] = json.loads(output.read_text())
        return found
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("torch", "transformers")}
        | {"python": platform.python_version()},
        "workloads": {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workload", nargs="*", choices=sorted(WORKLOADS), default=None)
    parser.add_argument("--stage", nargs="*", choices=STAGES, default=None)
    parser.add_argument("--gpu", help="of the catalogue, for what is predicted")
    parser.add_argument("--minutes", type=float, default=3.5, help="of tune and of the ladder")
    parser.add_argument("--rows", nargs="*", default=[], help="of the ladder, for the stage rows")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    asked = parser.parse_args()
    names = ["tiny"] if asked.tiny else asked.workload or [n for n in WORKLOADS if n != "tiny"]
    record = _record(asked.output)

    def keep() -> None:
        write_whole(asked.output, json.dumps(record, indent=1) + "\n")

    for name in names:
        workload = WORKLOADS[name]
        job = job_of(workload, asked.gpu)
        if asked.gpu is None:
            record["hardware"] = device_name(job.profile).split(" GPU-")[0]
        shown = record["workloads"].setdefault(name, {"words": workload.words})
        for stage in asked.stage or STAGES[:4]:
            print(f"{name}, {stage}", flush=True)
            try:
                _stage(stage, job, workload, asked, shown, keep)
            except TrainfitError as error:  # the other stages can still say something
                shown[f"{stage}_error"] = str(error)
                print(f"  {error}", flush=True)
                keep()


def _stage(
    stage: str, job: JobQuestion, workload: Workload, asked: Any, shown: Any, keep: Any
) -> None:
    if stage == "grid":
        grid(job, workload, shown, keep)
    elif stage == "tune":
        tune(job, asked.minutes, shown, keep)
    elif stage in ("ladder", "removals", "rows"):
        ladder(stage, job, asked.minutes, asked.rows, shown, keep)
    elif stage == "predicted":
        predicted(job, shown, keep)
    else:
        finder(job, shown, keep)


if __name__ == "__main__":
    main()
