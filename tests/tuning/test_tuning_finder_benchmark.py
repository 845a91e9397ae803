"""The finder's benchmark runs at its tiny size, and writes down what it promises to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.soak
def test_the_finder_beside_the_truth(tmp_path: Path):
    output = tmp_path / "finder.json"
    subprocess.run(
        [sys.executable, ROOT / "benchmarks/finder.py", "--tiny", "--output", output],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRAINFIT_CACHE": str(tmp_path / "cache")},
        check=True,
        capture_output=True,
        timeout=600,
    )
    (row,) = json.loads(output.read_text())["finder"]
    tried = dict(row["truth"]["tried"])
    largest = row["truth"]["largest_rows"]
    assert tried[largest]
    assert not tried[largest + 1]
    assert abs(row["error_percent"]) <= 5
