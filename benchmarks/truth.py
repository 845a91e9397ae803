"""What was recorded on a GPU, in one form: transformers' models and trainfit's own jobs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tune
from trainfit.core.plan_records import TaskSpec
from trainfit.jobs.tuned_plans import JobQuestion
from trainfit.packing import ladder
from trainfit.planning.fit import profile_cuts

RESULTS = Path(__file__).parent / "results"
FILES = ("2026-11-15-estimator-h200.json", "2026-11-15-jobs-h200.json")
PRETRAINING = "2026-11-15-gpt-h200.json"
GRIDS = "2026-11-15-tune-h200.json"


@dataclass(frozen=True, kw_only=True)
class Truth:
    name: str
    family: str
    """The model: what is left out when a fit is judged."""
    compiled: bool
    precision: Any
    task: TaskSpec
    """The same step for the estimator."""
    peak_allocated: int
    peak_reserved: int | None
    """None where others were in the process's memory as well."""
    seconds: float
    computed: float = 1.0
    started: float = 1.0
    """How many times the tokens, and the micro-batches, of the step that the estimator runs."""
    elsewhere: bool = False
    """Whether another machine launched it than the one of the other steps."""


def recorded(files: tuple[str, ...] = FILES) -> list[Truth]:
    """Everything that was recorded and that the estimator is asked to predict.

    What trainfit does not do is kept in the files and not predicted: it compiles classifiers block
    by block, and three of transformers' models were also compiled as a whole; it compiles a GPT as
    a whole, and two were compiled block by block.
    """
    rows = [row for name in files for row in json.loads((RESULTS / name).read_text())["results"]]
    return [_truth(row) for row in rows if not _otherwise(row["case"])] + _pretraining()


def _otherwise(case: dict[str, Any]) -> bool:
    if "factory" in case:
        return case["how"] == "blocks" and "gpt" in case["factory"]
    return bool(case["compile"])


def _pretraining() -> list[Truth]:
    """trainfit's own steps among those that gpt.py compared."""
    runs = json.loads((RESULTS / PRETRAINING).read_text())["runs"]
    found = {
        (row["shape"], row["batch"]): row
        for run in runs
        for row in run["results"]
        if "error" not in row
        and row["settings"]["kind"] == "trainfit"
        and row["settings"]["gelu"] == "own"
        and row["settings"]["mode"] == "default"
    }
    return [_step_of(row) for row in found.values()]


def _step_of(row: dict[str, Any]) -> Truth:
    name = {"small": "gpt-124m", "medium": "gpt-medium"}[row["shape"]]
    parts = row["settings"].get("parts", 1)
    arguments = {
        "name": name,
        "vocab_size": 50304,
        "rows": row["batch"] // parts,
        "width": 1024,
        "micro_batches": parts,
        "precision": row["settings"]["precision"],
        "checkpointing": "none",
        "optimizer": row["settings"]["optimizer"],
        "loss_chunk": row["settings"]["chunk"],
        "half_stream": row["settings"]["half_stream"],
        "compile": True,
    }
    return Truth(
        name=f"{name} {row['batch']}x1024 compiled",
        family="gpt",
        compiled=True,
        precision=arguments["precision"],
        task=TaskSpec(factory="trainfit.jobs.probes:gpt_step", arguments=arguments),
        peak_allocated=round(row["peak_allocated_gib"] * 2**30),
        peak_reserved=None,
        seconds=row["seconds"],
    )


def _truth(row: dict[str, Any]) -> Truth:
    case = row["case"]
    if "factory" in case:
        compiled = case["how"] == "blocks"
        arguments = case["arguments"] | ({"compile": True} if compiled else {})
        name, family = row["name"], arguments["name"]
        task = TaskSpec(factory=case["factory"], arguments=arguments).from_a_file()
    else:
        from estimator_cases import Case

        compiled, arguments = False, case
        name, family = Case(**case).name, case["model"]
        task = TaskSpec(factory="estimator_cases:probe", arguments=case)
    return Truth(
        name=name,
        family=_FAMILIES.get(family, family),
        compiled=compiled,
        precision=arguments["precision"],
        task=task,
        peak_allocated=row["peak_allocated"],
        peak_reserved=row["peak_reserved"],
        seconds=row["median_step_seconds"],
    )


def measured_by_tune() -> list[Truth]:
    """The points of tune.py's grids, steps of several micro-batches among them, for their time.

    They ran on another machine, whose CPU is not as fast.
    """
    found = json.loads((RESULTS / GRIDS).read_text())["workloads"]
    return [
        _point(name, job, one)
        for name, work in found.items()
        for job in [tune.job_of(tune.WORKLOADS[name], "h200")]
        for one in work["grid"]
        if one["status"] == "ok" and not _left_out(one["point"])
    ]


def _left_out(point: dict[str, Any]) -> bool:
    """CUDA graphs are not predicted; padded rows were compiled for some of their widths alone."""
    mode = point["compile"]
    return mode == "reduce-overhead" or (mode == "default" and point["way"] == "padded")


def _point(name: str, job: JobQuestion, one: dict[str, Any]) -> Truth:
    plan, lengths = one["plan"], np.asarray(job.question.workload.lengths)
    alike = job.ask({} if plan["packed"] or job.question.causal else {"flash": False})
    batch, count = plan["effective_batch_size"], plan["gradient_accumulation_steps"]
    cuts = ladder(
        lengths, batch, plan["micro_batch_tokens"], padded=not plan["packed"], at_least=count
    )
    cutting = profile_cuts([lengths], cuts[:1], batch, 1)[0]
    assert cutting.cut.micro_batches == count, (name, one["point"])
    chosen = {"checkpointing": plan["gradient_checkpointing"], "compile": plan["compile"]}
    arguments = alike.task.arguments | cutting.shape | chosen
    return Truth(
        name=f"{name} {' '.join(map(str, one['point'].values()))}",
        family={"nli-gemma": "gemma-3-1b-it", "nli-deberta": "deberta-v3-base"}.get(name, name),
        compiled=plan["compile"],
        precision=plan["precision"],
        task=TaskSpec(factory=alike.task.factory, arguments=arguments),
        peak_allocated=round(one["peak_memory_gib"] * 2**30),
        peak_reserved=None,
        seconds=batch / one["samples_per_second"]["value"],
        elsewhere=True,
        computed=cutting.computed / (cutting.probed * cutting.rows * cutting.width),
        started=count / cutting.probed,
    )


_FAMILIES = {"phobert-base-v2": "bert-base", "gpt-small": "gpt", "gpt-medium": "gpt", "gpt2": "gpt"}
"""Models of one architecture are one family."""
