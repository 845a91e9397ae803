"""Fit the time estimator to steps recorded on a GPU, and judge it leaving one model family out.

    python benchmarks/time_estimator.py --output FILE [--write]

Every case is run on fake tensors here, without a GPU, for its operations; the times are those of
`record_estimator.py` and `record_jobs.py`. `--write` puts the fit into the package; without it
only FILE is written.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parent))
from trainfit.core import codec
from trainfit.hardware.catalogue import find
from trainfit.planning.estimator.estimate import Request, ask, target, told
from trainfit.planning.estimator.step_time import Calibration, Done, rates, seconds
from truth import FILES, GRIDS, PRETRAINING, Truth, measured_by_tune, recorded

HOME = Path(__file__).parent.parent / "src" / "trainfit" / "planning" / "calibration.json"
# Where the search starts, and by how much (as a logarithm) a value may reasonably differ: a family
# that is left out must not free a parameter that only it could fix.
START = {
    "product_half": (0.75, 0.15),
    "product_full": (0.75, 0.15),
    "product_scale": (4e9, 0.7),
    "full_scale": (3e8, 0.7),
    "unaligned": (0.5, 0.4),
    "attention": (0.45, 0.3),
    "own_attention": (0.2, 0.3),
    "copy": (0.75, 0.2),
    "slow": (0.35, 0.4),
    "cached": (1.5, 0.3),
    "kernel_seconds": (1.5e-6, 0.5),
    "forward_launch_seconds": (16e-6, 0.3),
    "backward_launch_seconds": (20e-6, 0.3),
    "compiled_launch_seconds": (7e-6, 0.5),
    "compiled_call_seconds": (3e-4, 0.7),
}
FIXED = {"cache_bytes": 60e6}
PULL = 1e-2
"""Towards the start; a third of it and three times as much judge no better."""
H200 = find("h200")


def operations(rows: list[Truth]) -> list[tuple[Done, ...]]:
    """The operations of each case, found without a GPU."""
    targets = (target(H200, H200.memory_gib),)
    return [told(ask([Request(task=row.task, targets=targets)])[0]).done for row in rows]


def calibrated(values: np.ndarray) -> Calibration:
    return Calibration(**dict(zip(START, np.exp(values).tolist(), strict=True)), **FIXED)


def predict(
    done: tuple[Done, ...], row: Truth, fitted: Calibration, other_host: float = 1.0
) -> float:
    """`other_host` is how much longer a launch takes on the other machine."""
    found = rates(H200, row.precision)
    assert found is not None
    if row.elsewhere:
        found = replace(found, forward_launch=other_host, backward_launch=other_host)
    return seconds(done, found, fitted).step(row.computed, row.started)


def fit(rows: list[Truth], work: list[tuple[Done, ...]]) -> Calibration:
    # The last value belongs to a machine and not to what is fitted.
    start = np.log([*(value for value, _ in START.values()), 1.0])
    spread = np.array([*(width for _, width in START.values()), 3.0])

    def residuals(values: np.ndarray) -> np.ndarray:
        fitted, host = calibrated(values[:-1]), float(np.exp(values[-1]))
        errors = [
            math.log(predict(done, row, fitted, host) / row.seconds)
            for row, done in zip(rows, work, strict=True)
        ]
        pulls = math.sqrt(PULL / len(start)) * (values - start) / spread
        return np.concatenate([np.array(errors) / math.sqrt(len(errors)), pulls])

    return calibrated(least_squares(residuals, start, x_scale=spread).x[:-1])


def judge(rows: list[Truth], work: list[tuple[Done, ...]]) -> list[dict[str, Any]]:
    """Each case of the reference machine predicted by a fit to the other families."""
    judged = []
    for family in sorted({row.family for row in rows}):
        others = [at for at, row in enumerate(rows) if row.family != family]
        fitted = fit([rows[at] for at in others], [work[at] for at in others])
        for row, done in zip(rows, work, strict=True):
            if row.family == family and not row.elsewhere:
                predicted = predict(done, row, fitted)
                error = 100 * (predicted / row.seconds - 1)
                judged.append(
                    {
                        "case": row.name,
                        "family": family,
                        "measured_seconds": row.seconds,
                        "predicted_seconds": predicted,
                        "error_percent": round(error, 2),
                    }
                )
                print(f"{error:+7.1f}%  {row.name}", flush=True)
    return judged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = recorded() + measured_by_tune()
    work = operations(rows)
    judged = judge(rows, work)
    fitted = fit(rows, work)
    errors = sorted(abs(row["error_percent"]) for row in judged)
    nine_in_ten = errors[math.ceil(0.9 * len(errors)) - 1]
    result = {
        "command": " ".join(["python", *sys.argv]),
        "truth": [*FILES, PRETRAINING, GRIDS],
        "judged": "each case by a fit that has not seen its model family",
        "within_20_percent": sum(e <= 20 for e in errors),
        "cases": len(errors),
        "nine_in_ten_percent": nine_in_ten,
        "calibration": codec.encode(fitted),
        "results": judged,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.write:
        kept = json.loads(HOME.read_text()) | {"calibration": result["calibration"]}
        HOME.write_text(json.dumps(kept, indent=2) + "\n")
    print(f"within 20%: {result['within_20_percent']} of {len(errors)}; 9 in 10: {nine_in_ten}%")


if __name__ == "__main__":
    main()
