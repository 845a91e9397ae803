"""The memory estimator against what was measured on a GPU, and its parts against real tensors."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from trainfit.core import codec
from trainfit.core.errors import BadInput, RunFailed, TrainfitWarning
from trainfit.core.plan_records import TaskSpec
from trainfit.hardware.catalogue import find
from trainfit.planning.estimator.estimate import (
    Request,
    Target,
    ask,
    estimate,
    estimate_all,
    recorded_error,
)
from trainfit.planning.estimator.step_time import calibration, recorded_time_error
from truth import recorded

ROOT = Path(__file__).parent.parent.parent
RECORDED = ROOT / "benchmarks" / "results"
# Known misses of what is reserved, in percent; all else is held to the limits below.
MISSES = {
    "deberta-v3-base 16x512 bf16 full ckpt": 9,
    "modernbert-base 32x512 bf16 full ckpt": 6,
    "gpt-small 16x1024": 13,
}
LIMITS = {False: (0.02, 0.05), True: (0.01, 0.05)}
"""Allocated and reserved, eager and compiled."""
H200 = find("h200")


TRUTH = recorded()
FAMILIES = sorted({(row.family, row.compiled) for row in TRUTH})
SOME = [("gpt", False), ("deberta-v3-base", True)]
LONG = {"gemma packed 4096 x2 full", "gemma packed 8192 lora", "gemma packed 8192 lora compiled"}
"""Too long for every day; `make soak` compares all, of all families eager and compiled."""


def test_enough_was_recorded():
    assert len(TRUTH) >= 30
    assert len({row.family for row in TRUTH}) >= 6
    assert {row.precision for row in TRUTH} == {"bf16", "fp16", "fp32"}
    methods = {row.task.arguments.get("method") for row in TRUTH}
    assert methods >= {"full", "dora", "lora", "frozen"}
    assert {row.compiled for row in TRUTH} == {False, True}
    assert any(row.task.arguments.get("slots") for row in TRUTH)  # packed
    assert {row.name for row in TRUTH} >= LONG | MISSES.keys()


@pytest.mark.parametrize(("family", "compiled"), SOME)
def test_predicted_on_a_cpu_against_measured_on_the_gpu(family: str, compiled: bool):
    rows = [
        row
        for row in TRUTH
        if (row.family, row.compiled) == (family, compiled) and row.name not in LONG
    ]
    _compare(rows if len(rows) < 3 else [rows[0], rows[-1]], compiled)


@pytest.mark.soak
@pytest.mark.parametrize(("family", "compiled"), FAMILIES)
def test_predicted_against_measured_for_all_that_was_recorded(family: str, compiled: bool):
    _compare([row for row in TRUTH if (row.family, row.compiled) == (family, compiled)], compiled)


def _compare(rows: list[Any], compiled: bool) -> None:
    for row, predicted in zip(rows, estimate_all([r.task for r in rows], H200), strict=True):
        allocated = predicted.peak_allocated_gib * 2**30 / row.peak_allocated - 1
        most, most_reserved = LIMITS[compiled]
        assert abs(allocated) < most, row.name
        if row.peak_reserved is not None:
            reserved = predicted.peak_reserved_gib * 2**30 / row.peak_reserved - 1
            assert abs(reserved) < max(most_reserved, MISSES.get(row.name, 0) / 100), row.name
        assert predicted.error_percent is not None
        assert abs(allocated) * 100 <= predicted.error_percent


def test_step_times_are_within_a_fifth_for_nine_in_ten():
    """As judged by fits that had not seen the model family; the calibration is the fit to all."""
    judged = json.loads((RECORDED / "2026-11-15-time-h200.json").read_text())
    assert judged["calibration"] == codec.encode(calibration())
    assert {row["case"] for row in judged["results"]} == {row.name for row in TRUTH}
    errors = sorted(abs(row["error_percent"]) for row in judged["results"])
    assert sum(error <= 20 for error in errors) >= 0.9 * len(errors)
    assert recorded_time_error("9.0", "bert") == errors[math.ceil(0.9 * len(errors)) - 1]
    assert recorded_time_error("7.5", "bert") is None


def test_a_gpu_or_a_model_without_records_has_no_error_bar():
    assert recorded_error("9.0", False, "bert") is not None
    assert recorded_error("7.5", False, "bert") is None
    assert recorded_error("9.0", False, "resnet") is None
    assert recorded_time_error("9.0", "") is None


# ── a step of one's own, whose memory can be worked out by hand ─────────────────────────────────

WIDTH, ROWS = 1024, 4096


def linear(layers: int = 3, frozen: bool = False) -> tuple[Any, Any]:
    """Square layers in fp32: every size is a multiple of 512 and known."""
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    if frozen:
        model[:-1].requires_grad_(False)

    def make_step(built: torch.nn.Module) -> Any:
        trained = [p for p in built.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        x = torch.ones(ROWS, WIDTH)

        def step() -> None:
            built(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return model, make_step


def broken() -> tuple[Any, Any]:
    import torch

    model = torch.nn.Linear(2, 2)

    def make_step(built: torch.nn.Module) -> Any:
        return lambda: torch.unique(built(torch.ones(2, 2)))

    return model, make_step


def curious() -> tuple[Any, Any]:
    """A step that looks at its own loss."""
    model, make = linear(layers=1)

    def make_step(built: Any) -> Any:
        import torch

        inner = make(built)

        def step() -> None:
            built(torch.ones(2, WIDTH)).sum().item()
            inner()

        return step

    return model, make_step


def ask_own(function: str, capacity: int = 1 << 40, **arguments: Any) -> Any:
    name = Path(__file__).stem
    task = TaskSpec(factory=f"{name}:{function}", arguments=arguments)
    hopper = Target(sm_count=132, compute_capability="9.0", capacity=capacity)
    return ask([Request(task=task, targets=(hopper,))])[0]


def test_the_parts_are_what_arithmetic_says():
    matrix, activation, steps = 4 * WIDTH**2, 4 * ROWS * WIDTH, 3 * 4
    answer = ask_own("linear", layers=3)
    assert answer.error is None
    assert answer.weights == answer.gradients == 3 * matrix
    assert answer.optimizer == 2 * 3 * matrix + steps
    assert answer.inputs == activation
    room = answer.rooms[0]
    assert room.workspace == 2 * (32 << 20)
    held = answer.weights + answer.optimizer + answer.inputs + room.workspace
    # In the backward pass of the last layer: two saved inputs and two gradients of activations.
    assert room.peak_allocated >= held + 3 * activation
    assert room.peak_allocated <= held + answer.gradients + 5 * activation
    assert answer.unknown == {}


def test_a_frozen_part_keeps_nothing():
    free, frozen = ask_own("linear", layers=4), ask_own("linear", layers=4, frozen=True)
    assert frozen.gradients == 4 * WIDTH**2
    assert frozen.rooms[0].activations < free.rooms[0].activations


def test_the_same_step_needs_less_workspace_on_a_small_gpu():
    here = f"{Path(__file__).stem}:linear"
    big, small = estimate(here, "h200", layers=2), estimate(here, "t4", layers=2)
    assert big.weights_gib == small.weights_gib
    assert small.workspace_gib < big.workspace_gib
    assert (big.capacity_gib, small.capacity_gib) == (139.8, 14.74)
    assert big.fits
    assert small.fits
    assert big.error_percent is None  # no layers of this kind were recorded


def test_what_fits_is_answered_directly():
    needed = ask_own("linear").rooms[0].peak_reserved
    assert ask_own("linear", capacity=needed).rooms[0].fits
    assert not ask_own("linear", capacity=needed // 2).rooms[0].fits


def test_an_operation_without_a_shape_is_named_and_no_number_given():
    answer = ask_own("broken")
    assert "unique" in answer.error
    with pytest.raises(RunFailed, match=r"cannot estimate: .*unique"):
        estimate(f"{Path(__file__).stem}:broken", "h200")


@pytest.mark.parametrize("factory", ["nowhere:f", "json:nothing", "json"])
def test_a_task_that_cannot_be_loaded_is_named(factory: str):
    with pytest.raises((BadInput, RunFailed), match=f"cannot load '{factory}'"):
        estimate(TaskSpec(factory=factory, arguments={}), H200)


def test_a_file_is_answered_with_its_module():
    with pytest.raises(BadInput) as caught:
        estimate("my_step.py:build", "t4")
    assert caught.value.fix == "write my_step:build"


def test_arguments_beside_a_task_are_not_ignored_in_silence():
    with pytest.raises(BadInput, match="batch beside a TaskSpec"):
        estimate(TaskSpec(factory="a:b", arguments={}), H200, batch=3)


def test_a_value_that_had_to_be_made_up_is_told():
    with pytest.warns(TrainfitWarning, match="zero was taken: aten._local_scalar_dense"):
        estimate(f"{Path(__file__).stem}:curious", "h200")


@pytest.mark.parametrize("capacity", [0.0, -1.0, float("nan")])
def test_a_capacity_that_cannot_be_is_refused(capacity: float):
    with pytest.raises(BadInput, match="capacity_gib is"):
        estimate(TaskSpec(factory="a:b", arguments={}), H200, capacity)


def test_this_process_is_left_alone():
    import torch

    before = set(sys.modules)
    ask_own("linear")
    assert "trainfit.planning.estimator.fake_cuda" not in set(sys.modules) - before
    assert not isinstance(torch.ones(1), torch._subclasses.FakeTensor)


@pytest.mark.soak
def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs" / "estimate.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "my_step.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    need = estimate("my_step:build", "t4", batch=4096)
    assert need.fits
    assert need.weights_gib * 2**30 == 4 * (1024 * 1024 + 1024 + 1024 * 2 + 2)
    assert not estimate("my_step:build", "t4", capacity_gib=0.05, batch=4096).fits
