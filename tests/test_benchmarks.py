"""The benchmarks run at their tiny size, and write down what they promise to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_fine_tuning_beside_the_peers(tmp_path: Path):
    output = tmp_path / "nli.json"
    subprocess.run(
        [sys.executable, ROOT / "benchmarks/nli.py", "--tiny", "--output", output],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRAINFIT_CACHE": str(tmp_path / "cache")},
        check=True,
        capture_output=True,
        timeout=600,
    )
    contenders = json.loads(output.read_text())["models"][0]["contenders"]
    assert {"trainfit", "trainer defaults", "lightning, batch 32"} <= contenders.keys()
    for name, found in contenders.items():
        errors = [each["error"] for each in found["rounds"] if "error" in each]
        assert not errors, name
        [only] = found["rounds"]
        assert only["steps"] == 4
        assert only["samples_per_second"] > 0


@pytest.mark.soak
@pytest.mark.skipif(not os.environ.get("TRAINFIT_SOAK"), reason="set TRAINFIT_SOAK=1, or make soak")
def test_everyone_on_the_same_work(tmp_path: Path):
    output = tmp_path / "peers.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/peers.py", "--tiny", "--output", output],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRAINFIT_CACHE": str(tmp_path / "cache")},
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    models = json.loads(output.read_text())["models"]
    assert [model["workload"] for model in models] == ["nli", "gpt"]
    for model in models:
        contenders = model["contenders"]
        assert {"trainfit", "trainer, batch 8", "lightning, batch 8"} <= contenders.keys()
        assert "plain loop, batch 8" in contenders
        for name, found in contenders.items():
            rates = [each["samples_per_second"] for each in found["rounds"]]
            assert len(rates) == 2, name
            assert found["range"] == [min(rates), max(rates)]
            assert f"\n{name} " in done.stdout
