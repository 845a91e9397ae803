"""Predicted against measured: the estimator's answers for the cases recorded on a GPU.

    python benchmarks/estimator.py benchmarks/results/2026-11-15-estimator-h200.json --output FILE

Needs no GPU: the measurements are in the file.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainfit.catalogue import find
from trainfit.planning.memory import Request, ask, target, told
from trainfit.records import TaskSpec

sys.path.insert(0, str(Path(__file__).parent))
from estimator_cases import Case

GIB = 1024**3


def compare(recorded: list[dict[str, Any]], gpu: str) -> list[dict[str, Any]]:
    spec = find(gpu)
    tasks = [TaskSpec(factory="estimator_cases:probe", arguments=row["case"]) for row in recorded]
    targets = (target(spec, spec.memory_gib),)
    rows = []
    answers = ask([Request(task=task, targets=targets) for task in tasks])
    for row, answer in zip(recorded, answers, strict=True):
        room = told(answer).rooms[0]
        rows.append(
            {
                "case": Case(**row["case"]).name,
                "allocated_gib": round(room.peak_allocated / GIB, 3),
                "measured_allocated_gib": round(row["peak_allocated"] / GIB, 3),
                "allocated_error_percent": percent(room.peak_allocated, row["peak_allocated"]),
                "reserved_gib": round(room.peak_reserved / GIB, 3),
                "measured_reserved_gib": round(row["peak_reserved"] / GIB, 3),
                "reserved_error_percent": percent(room.peak_reserved, row["peak_reserved"]),
            }
        )
    return rows


def percent(predicted: int, measured: int) -> float:
    return round(100 * (predicted / measured - 1), 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recorded", type=Path)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    recorded = json.loads(args.recorded.read_text())["results"]
    rows = compare([row for row in recorded if not row["case"]["compile"]], args.gpu)
    for row in rows:
        print(
            f"{row['case']:45s} allocated {row['allocated_error_percent']:+6.2f}%   "
            f"reserved {row['reserved_error_percent']:+6.2f}%"
        )
    allocated = [abs(row["allocated_error_percent"]) for row in rows]
    reserved = [abs(row["reserved_error_percent"]) for row in rows]
    summary = {
        "cases": len(rows),
        "allocated_within_0.1_percent": sum(e <= 0.1 for e in allocated),
        "allocated_within_2_percent": sum(e <= 2 for e in allocated),
        "reserved_within_5_percent": sum(e <= 5 for e in reserved),
    }
    print(summary)
    if args.output:
        record = {
            "command": " ".join(["python", "benchmarks/estimator.py", *sys.argv[1:]]),
            "predicted_on": {
                "torch": version("torch"),
                "transformers": version("transformers"),
                "python": platform.python_version(),
                "gpu": "none",
            },
            "measured": args.recorded.name,
            "summary": summary,
            "rows": rows,
        }
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
