"""The search, on what was measured on an H200, against the truth that bisection found there.

cuBLAS's workspaces are why the steps at 8 GiB were once thought to take a row too many.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainfit.core.plan_records import TaskSpec
from trainfit.planning.estimator.estimate import Request, Target, ask, told
from trainfit.tuning.growth import GIB, Measured, Peak, RowRange, Search, predictor, search

ROOT = Path(__file__).parent.parent.parent
RECORD = json.loads((ROOT / "benchmarks/results/2026-11-15-finder-h200.json").read_text())
CASES = list(zip(RECORD["finder"], RECORD["replayed"]["cases"], strict=True))
WHOLE = RECORD["finder"][0]
MIB = 1 << 20
WORKSPACES = 2 * 32 * MIB
"""Of the H200: they were taken in the first of these searches and stayed for the others."""


def probed() -> dict[int, dict[str, Any]]:
    """What was measured, by rows. A probe that nothing limits takes the same under every cap."""
    return {probe["rows"]: probe for row in RECORD["finder"] for probe in row["finder"]["probes"]}


def replayed(row: dict[str, Any], case: dict[str, Any]) -> tuple[Search, int]:
    """The search of today, with the prediction of today and the probes of then."""
    room = row["finder"]["capacity_gib"] * GIB

    def predict(rows: int) -> Peak:
        allocated, reserved, needed = (size * MIB for size in case["predicted_mib"][str(rows)])
        return Peak(allocated=allocated, reserved=reserved, needed=needed)

    def measure(rows: int) -> Measured:
        probe = probed()[rows]
        assert probe["peak_reserved_gib"] * GIB < room
        return Measured(
            rows=rows,
            held=0,
            allocated=probe["peak_allocated_gib"] * GIB,
            reserved=probe["peak_reserved_gib"] * GIB,
            seconds=probe["seconds"],
        )

    found = Search(room=lambda: room, asked=RowRange(), predict=predict, measure=measure)
    return found, search(found)


@pytest.mark.parametrize(("row", "case"), CASES, ids=[str(row["cap_gib"]) for row, _ in CASES])
def test_the_largest_is_that_of_bisection_on_the_gpu(row, case):
    found, largest = replayed(row, case)
    assert largest == row["truth"]["largest_rows"] == case["largest_rows"]
    assert int(0.9 * largest) <= found.ran
    assert found.ran_out is None
    # The probes were no gamble either: each is of a size that did fit.
    assert all(probe.rows < row["truth"]["largest_rows"] for probe in found.probes)


@pytest.mark.parametrize(("row", "case"), CASES, ids=[str(row["cap_gib"]) for row, _ in CASES])
def test_what_the_allocator_held_was_predicted_to_the_mebibyte(row, case):
    for at, probe in enumerate(row["finder"]["probes"]):
        predicted = case["predicted_mib"].get(str(probe["rows"]))
        if row is WHOLE and at == 0:
            continue  # here the workspaces were taken in the middle of the step
        here = 0 if row is WHOLE else WORKSPACES
        assert predicted[1] == pytest.approx((probe["peak_reserved_gib"] * GIB + here) / MIB, abs=1)


# A step that leaves a hole where the backward pass's first product takes its workspace.


class Hole(torch.autograd.Function):
    """Takes and frees memory on the way back, just before a product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        torch.empty(ctx.size, dtype=torch.uint8)
        return grads[0], None


def holed(rows: int) -> Any:
    """A model of one weight, whose step needs a hole of 100 MiB a row and then a little more."""
    model = torch.nn.Linear(8, 8, bias=False)

    def make_step(model: torch.nn.Module) -> Any:
        batch = torch.ones(4, 8)

        def step() -> None:
            Hole.apply(model(batch), rows * 100 * MIB).sum().backward()
            torch.empty(rows * 110 * MIB, dtype=torch.uint8)
            model.zero_grad(set_to_none=True)

        return step

    return model, make_step


@pytest.mark.soak
def test_a_workspace_that_is_taken_first_pins_no_large_segment():
    factory, rows = f"{__name__}:holed", 10
    one = 110 * rows * MIB  # with the hole given back, this and the workspaces are all
    targets = [
        Target(sm_count=132, compute_capability="9.0", capacity=size)
        for size in (int(1.2 * one), int(2.0 * one))
    ]
    task = TaskSpec(factory=factory, arguments={"rows": rows})
    late = told(ask([Request(task=task, targets=tuple(targets))])[0]).rooms
    assert [room.fits for room in late] == [False, True]
    first = predictor(factory, lambda rows: {"rows": rows}, None, 1.1 * one)(rows)
    assert first.needed <= 1.1 * one
