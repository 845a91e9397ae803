"""The ladders on the page are the recorded ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from trainfit.core import codec
from trainfit.reports.plots import ladder_plot
from trainfit.tuning.ladder.rungs import Ladder, LadderStep
from trainfit.tuning.tuned_cache import Interval

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs", ROOT / "benchmarks/ladder_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_what_was_recorded(script: ModuleType):
    ladders = script.recorded()
    text = (ROOT / "docs" / "ladder.md").read_text()
    assert script.page(text, ladders) == text, "run python benchmarks/ladder_docs.py"
    for name, ladder in ladders.items():
        assert (ROOT / "docs" / name).read_text() == ladder_plot(ladder)


def test_a_recorded_ladder_gets_its_place(script: ModuleType, tmp_path: Path):
    speed = Interval(value=2.0, low=1.9, high=2.1)
    step = LadderStep(name="TF32", what="", status="ok", samples_per_second=speed, speedup=speed)
    ladder = Ladder(
        title="nli", device="H200", torch="2.11", taken="x", samples_per_step=64, steps=(step,)
    )
    ladder.save(tmp_path / "2026-11-16-toy-ladder-h200.json")
    several = {"workloads": {"gpt": {"ladder": codec.encode(ladder)}, "other": {}}}
    (tmp_path / "2026-11-17-tune-h200.json").write_text(json.dumps(several))
    made = script.page(f"before\n{script.BEGIN}{script.END}after\n", script.recorded(tmp_path))
    assert made.startswith("before\n")
    assert made.endswith("after\n")
    assert "](2026-11-16-toy-ladder-h200.svg)" in made
    assert "](2026-11-17-tune-h200-gpt-ladder.svg)" in made
    assert "| TF32 | 2.000 (1.900–2.100) | 2.00× (1.90–2.10) | – |" in made
    assert script.page(made, {}).count("None has been recorded") == 1
