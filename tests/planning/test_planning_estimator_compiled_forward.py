"""Compiled blocks that only run forward: what is alive in them, by hand and by a measured run."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainfit.core.plan_records import TaskSpec
from trainfit.planning.estimator.estimate import Request, Target, ask, estimate

HERE = Path(__file__)
RESULTS = HERE.parent.parent.parent / "benchmarks" / "results"
ROWS, WIDTH, INNER = 4096, 1024, 4096


def test_a_frozen_encoder_takes_what_was_measured():
    """128 sequences as long as ReDSM5's, in a packed row of the planned width."""
    variants = json.loads((RESULTS / "2026-11-15-nli-h200.json").read_text())["variants"]
    [measured] = next(each["rounds"] for each in variants if each["method"] == "frozen")
    predicted = estimate(
        "trainfit.jobs.probes:encoder_step",
        "h200",
        name="gemma-3-1b-it",
        weights="random",
        dtype="bfloat16",
        method="frozen",
        attention="varlen",
        classes=2,
        precision="bf16",
        compile=True,
        rows=1,
        width=39040,
        slots=128,
        lengths=[512] * 76 + [128],
        micro_batches=1,
    )
    allocated = predicted.peak_allocated_gib / measured["peak_gib"] - 1
    assert abs(allocated) < 0.01
    assert abs(predicted.peak_reserved_gib / measured["peak_reserved_gib"] - 1) < 0.05
    assert predicted.error_percent is not None
    assert abs(allocated) * 100 <= predicted.error_percent


def gated(form: str) -> tuple[Any, Any]:
    """A gate and what it lets through, in fp32."""
    import torch
    from torch import nn

    from trainfit.planning.estimator.compiled_steps import simulate

    forms: dict[str, Any] = {
        "product": lambda gate, up: gate.tanh() * up,
        "one leaves": lambda gate, up: (gate.tanh() * up, gate),
        "both leave": lambda gate, up: (gate.tanh() * up, gate, up),
        "upside down": lambda gate, up: gate.tanh().flip(0) * up.flip(0),
        "transposed": lambda gate, up: (gate.t() * up.t()).contiguous(),
        "in half": lambda gate, up: (gate.tanh() * up).bfloat16(),
    }

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, INNER, bias=False)
            self.up = nn.Linear(WIDTH, INNER, bias=False)

        def forward(self, x: Any) -> Any:
            return forms[form](self.gate(x), self.up(x))

    def make_step(built: nn.Module) -> Any:
        simulate([built])
        x = torch.ones(ROWS, WIDTH)

        @torch.no_grad()
        def step() -> None:
            built(x)

        return step

    return Block(), make_step


@pytest.mark.parametrize(
    ("form", "wide"),
    [
        ("product", 2.0),
        ("one leaves", 2.0),
        ("both leave", 3.0),
        ("upside down", 3.0),
        ("transposed", 3.0),
        ("in half", 2.5),
    ],
)
def test_a_kernel_writes_over_what_it_is_the_last_to_read(form: str, wide: float):
    """Unless its elements come from other places, or are of another size."""
    task = TaskSpec(factory=f"{HERE.stem}:gated", arguments={"form": form})
    hopper = Target(sm_count=132, compute_capability="9.0", capacity=1 << 40)
    (answer,) = ask([Request(task=task, targets=(hopper,))])
    assert answer.error is None
    [room] = answer.rooms
    held = answer.weights + answer.inputs + room.workspace
    assert answer.weights == 4 * 2 * WIDTH * INNER
    assert room.peak_allocated - held == wide * 4 * ROWS * INNER
