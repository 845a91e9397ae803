"""The measured tables and pictures of README and docs are those of benchmarks/results."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainfit.core import codec
from trainfit.planning.estimator.estimate import recorded_error
from trainfit.tuning.rungs import Ladder, LadderStep
from trainfit.tuning.tuned_cache import Interval

pages = importlib.import_module("docs_tables")
records = importlib.import_module("result_files")
speed_tables = importlib.import_module("speed_tables")
ladder_docs = importlib.import_module("ladder_docs")
loss_curves = importlib.import_module("loss_curves")
RENEW = "run python benchmarks/docs_tables.py"


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_the_records(page: Path):
    text = page.read_text()
    assert pages.with_tables(text) == text, RENEW


def test_every_table_is_on_a_page():
    text = "".join(page.read_text() for page in pages.PAGES)
    assert set(re.findall(r"<!-- table ([\w-]+) -->", text)) == set(pages.TABLES)


def test_pictures_are_drawn_from_the_records():
    for path, drawing in pages.pictures().items():
        assert path.read_text() == drawing, RENEW


@pytest.mark.soak
def test_shown_outputs_are_those_of_the_commands():
    for page in pages.PAGES:
        text = page.read_text()
        assert pages.with_outputs(text) == text, f"{RENEW} --outputs"


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_records_that_a_page_names_exist(page: Path):
    for name in re.findall(r"20\d\d-\d\d-\d\d-[\w-]+\.json", page.read_text()):
        assert (records.RESULTS / name).exists(), name


def test_mfu_of_a_recorded_gpt_follows_from_its_tokens_per_second():
    # 6 N + 12 L H Q T by hand: N has no positions, and the output layer is the embedding.
    weights = 50304 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768
    per_token = 6 * weights + 12 * 12 * 768 * 1024
    for one in (*speed_tables._gpt(0).values(), *speed_tables._gpt(1).values()):
        tokens = one["settings"]["batch"] * 1024
        assert one["tokens_per_second"] == pytest.approx(tokens / one["seconds"])
        assert one["mfu"] == pytest.approx(one["tokens_per_second"] * per_token / 989e12, rel=1e-3)


def test_the_error_that_an_estimate_states_is_the_largest_recorded():
    found = records.recorded("estimator-predicted")
    eager, compiled = (
        found[kind]["largest_allocated_error_percent"] for kind in ("eager", "compiled")
    )
    assert recorded_error("9.0", False, "bert") == pytest.approx(eager, abs=0.05)
    assert recorded_error("9.0", True, "bert") >= compiled


def test_the_recorded_judgement_of_the_curves_follows_from_them():
    record = records.recorded("curves-h200")
    [said] = record["curve_summaries"]
    assert said == {"model": "bert-base", **loss_curves.summary(record["curves"])}


def test_plans_for_a_memory_limit_kept_their_promise():
    for run in records.recorded("capped-h200")["results"]:
        if "error" not in run:
            promised = run["case"]["memory"]["peak_allocated_gib"] * records.GIB
            assert promised == pytest.approx(run["peak_allocated"], rel=0.03), run["name"]


def test_a_recorded_ladder_becomes_a_chapter(tmp_path: Path):
    speed = Interval(value=2.0, low=1.9, high=2.1)
    step = LadderStep(name="TF32", what="", status="ok", samples_per_second=speed, speedup=speed)
    ladder = Ladder(
        title="nli", device="H200", torch="2.11", taken="x", samples_per_step=64, steps=(step,)
    )
    ladder.save(tmp_path / "2026-11-16-toy-ladder-h200.json")
    several: dict[str, Any] = {"workloads": {"gpt": {"ladder": codec.encode(ladder)}, "other": {}}}
    (tmp_path / "2026-11-17-tune-h200.json").write_text(json.dumps(several))
    made = ladder_docs.chapters(ladder_docs.recorded(tmp_path))
    assert "](2026-11-16-toy-ladder-h200.svg)" in made
    assert "](2026-11-17-tune-h200-gpt-ladder.svg)" in made
    assert "| TF32 | 2.000 (1.900–2.100) | 2.00× (1.90–2.10) | – |" in made
