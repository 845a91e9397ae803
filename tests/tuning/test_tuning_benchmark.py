"""The benchmark of tune: its grid is declared, small enough, and goes on where it was left."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "tune.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_tune", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_of_tune"] = module
    spec.loader.exec_module(module)
    return module


def test_the_grids_are_declared_and_small(benchmark: ModuleType) -> None:
    for name, workload in benchmark.WORKLOADS.items():
        points = benchmark.points(workload)
        assert len(points) <= 24, name
        assert len({tuple(point.items()) for point in points}) == len(points)
    assert {"nli-gemma", "nli-deberta", "gpt"} < benchmark.WORKLOADS.keys()


@pytest.mark.parametrize("name", ["nli-gemma", "nli-deberta", "gpt"])
def test_the_workloads_are_those_of_the_documents(benchmark: ModuleType, name: str) -> None:
    job = benchmark.job_of(benchmark.WORKLOADS[name])
    workload = job.question.workload
    sizes = (workload.max_length, workload.effective_batch_size)
    assert sizes == ((1024, 64) if name == "gpt" else (512, 128))
    assert workload.method == "full"


@pytest.mark.soak
def test_a_tiny_grid_runs_and_is_not_run_twice(tmp_path: Path) -> None:
    output = tmp_path / "tune.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--stage", "grid", "--output", str(output)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TRAINFIT_CACHE": str(tmp_path / "cache"),
    }
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    record = json.loads(output.read_text())
    grid = record["workloads"]["tiny"]["grid"]
    assert len(grid) == 4
    assert {one["status"] for one in grid} == {"ok"}
    assert [one["plan"]["optimizer"] for one in grid] == ["adamw_fused"] * 2 + ["adamw"] * 2
    assert grid[0]["plan"]["micro_batch_tokens"] > grid[1]["plan"]["micro_batch_tokens"]
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "tiny, grid\n"
    assert json.loads(output.read_text()) == record
