"""What the profiled step of a run was measured to cost."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOUND = {
    f"{path.stem} {name}": one
    for path in sorted((ROOT / "benchmarks" / "results").glob("*-receipt-*.json"))
    for name, one in json.loads(path.read_text())["results"].items()
}


@pytest.mark.parametrize("name", FOUND)
def test_it_costs_less_than_a_hundredth_of_a_thousand_steps(name: str) -> None:
    found: dict[str, Any] = FOUND[name]
    pairs = zip(found["with_seconds"], found["without_seconds"], strict=True)
    extra = statistics.median(on - off for on, off in pairs)
    step = statistics.median(found["without_seconds"]) / (found["steps"] - 2)
    assert extra / (1000 * step) < 0.01
