"""Reading of the records in benchmarks/results, and Markdown tables of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30
Row = Sequence[object]


@cache
def recorded(name: str) -> Any:
    """Content of one record, by its name without date and ending."""
    [path] = RESULTS.glob(f"*-{name}.json")
    return json.loads(path.read_text())


def table(heads: Row, rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = (heads, ["---"] * len(heads), *rows)
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
