"""What tune chose on an H200, beside the grid that was declared beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainfit.core import codec
from trainfit.core.plan_records import MemoryEstimate
from trainfit.tuning import candidates
from trainfit.tuning.tuned_cache import TuneResult

ROOT = Path(__file__).parent.parent.parent
RECORD = json.loads((ROOT / "benchmarks/results/2026-11-15-tune-h200.json").read_text())
WORK = RECORD["workloads"]
TUNED = [name for name, work in WORK.items() if "tune" in work]
PAGE = " ".join((ROOT / "docs" / "tune.md").read_text().split())


def measured(name: str) -> list[dict[str, Any]]:
    return [one for one in WORK[name]["grid"] if one["status"] == "ok"]


@pytest.mark.parametrize("name", TUNED)
def test_the_choice_is_within_3_percent_of_the_grids_best(name: str) -> None:
    found = codec.decode(TuneResult, WORK[name]["tune"], "the record")
    assert found.seconds <= 240
    rate = found.samples_per_second
    assert rate is not None
    best = max(measured(name), key=lambda one: one["samples_per_second"]["value"])
    there = best["samples_per_second"]
    assert rate.high >= 0.97 * there["low"]
    assert f"{there['value']:,.1f} [{there['low']:,.1f}–{there['high']:,.1f}]" in PAGE
    assert f"{rate.value:,.1f} [{rate.low:,.1f}–{rate.high:,.1f}]" in PAGE
    assert f"{rate.value / there['value']:.3f} | {found.seconds:.0f} s |" in PAGE


def test_the_choice_and_the_grids_best_took_turns() -> None:
    """Where they had run on two GPUs."""
    rounds = WORK["nli-gemma"]["in_turns"]["rounds"]
    rates = [one["samples_per_second"]["value"] for who in ("tune", "grid") for one in rounds[who]]
    assert max(rates[:2]) >= 0.97 * max(rates[2:])


def step_at_once(name: str, compiled: str) -> dict[str, Any]:
    """The point whose steps are not cut; compiled, it is the one that the planner takes."""
    points = [{"compile": compiled, "micro_batches": 1, "way": way} for way in ("packed", "plain")]
    [found] = [one for one in measured(name) if one["point"] in points]
    return found


def promise(point: dict[str, Any]) -> MemoryEstimate:
    return codec.decode(MemoryEstimate, point["plan"]["memory"], "the record")


@pytest.mark.parametrize("name", WORK)
def test_the_planners_own_takes_the_memory_that_was_promised(name: str) -> None:
    point = step_at_once(name, "default")
    promised = promise(point)
    assert promised.peak_allocated_gib == pytest.approx(point["peak_memory_gib"], rel=1e-3)
    shown = f"{promised.peak_allocated_gib:.2f} | {point['peak_memory_gib']:.2f}"
    assert shown in PAGE


@pytest.mark.parametrize("name", WORK)
def test_an_eager_step_takes_no_more_than_the_bound_says(name: str) -> None:
    """By what is compared with the GPU's memory before a candidate without the compiler runs."""
    promised, eager = promise(step_at_once(name, "default")), step_at_once(name, "off")
    bound = promised.peak_reserved_gib + promised.activations_gib * (candidates._EAGER - 1)
    assert eager["peak_reserved_gib"] < bound


def test_steps_were_predicted_without_a_gpu() -> None:
    both = [
        (one["predicted_gib"], one["peak_memory_gib"])
        for work in WORK.values()
        for one in work["grid"]
        if "predicted_gib" in one
    ]
    errors = [abs(told / seen - 1) for told, seen in both]
    sizes = sorted(seen for _, seen in both)
    assert f"Of the {len(both)} steps" in PAGE
    assert f"from {sizes[0]:.1f} to {sizes[-1]:.1f} GiB" in PAGE
    assert max(errors) < 0.007
    assert f"{sum(error < 1e-3 for error in errors)} within 0.1%" in PAGE
