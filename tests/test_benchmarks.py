"""The benchmarks run at their tiny size, and write down what they promise to."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(script: str, folder: Path, *words: str | Path) -> str:
    """What the script prints, in this folder, on one core and without a GPU."""
    here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *words],
        cwd=folder,
        env=os.environ | here | {"TRAINFIT_CACHE": str(folder / "cache")},
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    ).stdout


@pytest.mark.soak
def test_fine_tuning_beside_the_peers(tmp_path: Path):
    output = tmp_path / "nli.json"
    run("nli.py", tmp_path, "--tiny", "--output", output)
    contenders = json.loads(output.read_text())["models"][0]["contenders"]
    assert {"trainfit", "trainer defaults", "lightning, batch 32"} <= contenders.keys()
    for name, found in contenders.items():
        errors = [each["error"] for each in found["rounds"] if "error" in each]
        assert not errors, name
        [only] = found["rounds"]
        assert only["steps"] == 4
        assert only["samples_per_second"] > 0


@pytest.mark.soak
def test_losses_are_those_of_trainer_where_nothing_is_left_to_luck(tmp_path: Path):
    output = tmp_path / "curves.json"
    run("nli.py", tmp_path, "--tiny", "--curves", "--exact", "--output", output)
    record = json.loads(output.read_text())
    assert [curve["seed"] for curve in record["curves"]] == [0, 1, 2]
    for curve in record["curves"]:
        assert len(curve["trainfit"]) == 12
        assert len(set(curve["trainfit"])) == 12
        assert curve["trainfit"] == pytest.approx(curve["trainer"], rel=1e-6)
    [summary] = record["curve_summaries"]
    assert [spread["within_wider"] for spread in summary["spreads"]] == [12, 12]


@pytest.mark.soak
def test_what_the_receipt_costs(tmp_path: Path):
    output = tmp_path / "receipt.json"
    words = ("--tiny", "--steps", "25", "--rounds", "2", "--output", output)
    run("receipt.py", tmp_path, *words)
    found = json.loads(output.read_text())["results"]["tiny"]
    assert [len(found[name]) for name in ("with_seconds", "without_seconds")] == [2, 2]
    assert all(seconds > 0 for seconds in found["with_seconds"] + found["without_seconds"])


def test_curves_are_held_against_the_spread_of_their_seeds():
    loss_curves = importlib.import_module("loss_curves")
    curves = [
        {"trainfit": [1.0, 4.0, 2.0], "trainer": [1.0, 1.0, 8.0]},
        {"trainfit": [3.0, 4.5, 2.0], "trainer": [3.5, 1.0, 4.0]},
    ]
    single = loss_curves.compare(curves, 1)
    assert single == {
        "window": 1,
        "steps": 3,
        "within_trainfit": 1,  # means 2 and 2.25, 4.25 and 1, 2 and 6; ranges 2, 0.5 and 0
        "beyond_trainfit": {"step": 3, "by": 4.0},
        "within_trainer": 2,  # ranges 2.5, 0 and 4
        "beyond_trainer": {"step": 2, "by": 3.25},
        "within_wider": 2,
        "beyond_wider": {"step": 2, "by": 2.75},
    }
    assert loss_curves.smoothed([1.0, 2.0, 6.0, 1.0], 2).tolist() == [1.0, 1.5, 4.0, 3.5]
    assert loss_curves.compare(curves, 3)["steps"] == 3


@pytest.mark.soak
def test_everyone_on_the_same_work(tmp_path: Path):
    """In one command without a word behind it; where there is no GPU, of tiny shapes."""
    printed = run("peers.py", tmp_path)
    [output] = (tmp_path / "runs").glob("peers-*.json")
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
            assert f"\n{name} " in printed
