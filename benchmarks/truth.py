"""What was recorded on a GPU, in one form: transformers' models and trainfit's own jobs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.records import TaskSpec

RESULTS = Path(__file__).parent / "results"
FILES = ("2026-11-15-estimator-h200.json", "2026-11-15-jobs-h200.json")


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
    peak_reserved: int
    seconds: float


def recorded(files: tuple[str, ...] = FILES) -> list[Truth]:
    """Everything that was recorded and that the estimator is asked to predict.

    Three of transformers' models were also compiled as a whole. trainfit compiles block by block,
    so those are kept in the file and not predicted.
    """
    rows = [row for name in files for row in json.loads((RESULTS / name).read_text())["results"]]
    whole = [row for row in rows if "factory" not in row["case"] and row["case"]["compile"]]
    return [_truth(row) for row in rows if row not in whole]


def _truth(row: dict[str, Any]) -> Truth:
    case = row["case"]
    if "factory" in case:
        compiled = case["how"] == "blocks"
        arguments = case["arguments"] | ({"compile": True} if compiled else {})
        name, family = row["name"], arguments["name"]
        task = TaskSpec(factory=case["factory"], arguments=arguments)
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


_FAMILIES = {"phobert-base-v2": "bert-base", "gpt-small": "gpt", "gpt-medium": "gpt", "gpt2": "gpt"}
"""Models of one architecture are one family."""
