"""Predicted against measured: the memory estimator's answers for what was recorded on a GPU.

    python benchmarks/estimator.py --output FILE

Needs no GPU: the measurements are in benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from trainfit.hardware.catalogue import find
from trainfit.planning.estimator.estimate import Request, ask, target, told
from truth import FILES, PRETRAINING, Truth, recorded

GIB = 1024**3
LIMITS = {False: (2, 5), True: (1, 5)}
"""Percent of allocated and reserved, eager and compiled."""


def compare(rows: list[Truth]) -> list[dict[str, Any]]:
    gpu = find("h200")
    targets = (target(gpu, gpu.memory_gib),)
    compared = []
    for row in rows:
        room = told(ask([Request(task=row.task, targets=targets)])[0]).rooms[0]
        compared.append(
            {
                "case": row.name,
                "compiled": row.compiled,
                "allocated_gib": round(room.peak_allocated / GIB, 3),
                "measured_allocated_gib": round(row.peak_allocated / GIB, 3),
                "allocated_error_percent": percent(room.peak_allocated, row.peak_allocated),
                "reserved_gib": round(room.peak_reserved / GIB, 3),
            }
        )
        last = compared[-1]
        line = f"{row.name:45s} allocated {last['allocated_error_percent']:+6.2f}%"
        if row.peak_reserved is not None:
            last["measured_reserved_gib"] = round(row.peak_reserved / GIB, 3)
            last["reserved_error_percent"] = percent(room.peak_reserved, row.peak_reserved)
            line += f"   reserved {last['reserved_error_percent']:+6.2f}%"
        print(line, flush=True)
    return compared


def percent(predicted: int, measured: int) -> float:
    return round(100 * (predicted / measured - 1), 2)


def summary(rows: list[dict[str, Any]], compiled: bool) -> dict[str, Any]:
    kind = [row for row in rows if row["compiled"] == compiled]
    allocated = [abs(row["allocated_error_percent"]) for row in kind]
    most, most_reserved = LIMITS[compiled]
    return {
        "cases": len(kind),
        "largest_allocated_error_percent": max(allocated, default=None),
        "allocated_within_0.1_percent": sum(e <= 0.1 for e in allocated),
        f"allocated_within_{most}_percent": sum(e <= most for e in allocated),
        "reserved_cases": sum("reserved_error_percent" in row for row in kind),
        f"reserved_within_{most_reserved}_percent": sum(
            abs(row["reserved_error_percent"]) <= most_reserved
            for row in kind
            if "reserved_error_percent" in row
        ),
        "missed": [
            row["case"]
            for row in kind
            if abs(row["allocated_error_percent"]) > most
            or abs(row.get("reserved_error_percent", 0)) > most_reserved
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = compare([row for row in recorded() if arguments.only in row.name])
    result = {
        "command": " ".join(["python", "benchmarks/estimator.py", *sys.argv[1:]]),
        "predicted_on": {
            "torch": version("torch"),
            "transformers": version("transformers"),
            "python": platform.python_version(),
            "gpu": "none",
        },
        "measured": [*FILES, PRETRAINING],
        "eager": summary(rows, compiled=False),
        "compiled": summary(rows, compiled=True),
        "rows": rows,
    }
    print(json.dumps({key: result[key] for key in ("eager", "compiled")}, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
