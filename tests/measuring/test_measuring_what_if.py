"""Estimated gains follow from the parts of a profiled step, and name the exact change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import trainfit
from trainfit.measuring.trace import (
    AttentionSeen,
    BatchesSeen,
    CompilerSeen,
    Evidence,
    ProductsSeen,
    read,
)
from trainfit.measuring.what_if import CHECKS, NAMES, recorded_errors, what_if

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

PARTS = {"products": 0.06, "attention": 0.01, "update": 0.012, "other": 0.018}
STEP = Evidence(
    step=5,
    device="cuda",
    device_name="NVIDIA H200",
    products=ProductsSeen(shares={"fp32": 1.0}),
    attention=AttentionSeen(calls={"efficient": 12}),
    batches=BatchesSeen(tokens=600, capacity=1000, packed=False),
    optimizers={"AdamW": "foreach"},
    parts=PARTS,
    launches={"products": 400, "update": 100, "attention": 50, "other": 450},
)


LOOSELY = {"rel": 5e-3}
"""The host, which has little to do here, adds a bit."""


def gains(seen: Evidence, **more: Any) -> dict[str, float]:
    return {one.name: one.percent for one in what_if(seen, **{"step_seconds": 0.1} | more)}


def saved(after: float, before: float = 0.1) -> float:
    return 100 * (1 - after / before)


def test_a_busy_gpu_gains_by_less_work() -> None:
    found = gains(STEP, rates={"matmul_fp32": 50.0, "matmul_tf32": 300.0, "matmul_bf16": 600.0})
    assert found["tf32"] == pytest.approx(saved(0.04 + 0.01), abs=0.5)
    assert found["fused"] == pytest.approx(saved(0.1 - 0.008), abs=0.2)
    packed = saved(0.012 + 0.6 * 0.078 + 0.6**1.5 * 0.01)
    assert found["unpadded"] == pytest.approx(packed, abs=0.3)
    assert found["bf16"] > found["tf32"]
    assert "graphs" not in found
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_padding_is_that_of_many_batches_where_they_were_seen() -> None:
    assert gains(STEP, padding_share=0.2)["unpadded"] < 0.6 * gains(STEP)["unpadded"]
    assert "unpadded" not in gains(STEP, padding_share=0.0)


def test_scores_of_a_deberta_have_a_kernel_in_half_precision_alone() -> None:
    own = AttentionSeen(softmaxes=12, gathers=27)
    assert "unpadded" not in gains(replace(STEP, attention=own))
    half = {"half_products": 0.06} | {k: v for k, v in PARTS.items() if k != "products"}
    more = gains(replace(STEP, attention=own, parts=half))["unpadded"]
    assert more > gains(replace(STEP, parts=half))["unpadded"]


def test_a_gpu_that_waits_gains_by_graphs_alone() -> None:
    found = gains(STEP, step_seconds=0.4)
    both = ((0.55 * 0.4) ** 6 + 0.1**6) ** (1 / 6)
    assert found["graphs"] == pytest.approx(saved(both, 0.4), **LOOSELY)
    assert found["compile"] == pytest.approx(saved(0.35, 1.0), rel=3e-2)
    assert "unpadded" not in found
    assert "tf32" not in found


def test_the_host_bounds_what_less_work_gives() -> None:
    fast = {"matmul_fp32": 50.0, "matmul_bf16": 600.0, "launch_forward": 10.0}
    few = gains(STEP, rates=fast)["bf16"]
    slow = gains(replace(STEP, launches={"other": 2500}), rates=fast)["bf16"]
    assert slow < 20 < 50 < few
    assert gains(STEP, rates=fast | {"launch_forward": 20.0})["bf16"] < few


def test_changes_that_are_made_are_not_told() -> None:
    made = replace(
        STEP,
        products=ProductsSeen(shares={"bf16": 1.0}),
        batches=BatchesSeen(tokens=1000, capacity=1000),
        optimizers={"AdamW": "fused"},
        compiler=CompilerSeen(graph_launches=2, regions=1),
        parts={"half_products": 0.09, "other": 0.01},
    )
    assert gains(made) == {}
    assert gains(replace(STEP, parts={})) == {}


def test_checkpointing_is_told_where_memory_is_free() -> None:
    again = replace(STEP, recomputed=12)
    assert "checkpointing" not in gains(again, memory_share=0.8)
    found = gains(again, memory_share=0.2)["checkpointing"]
    assert found == pytest.approx(saved(0.75 * 0.088 + 0.012), **LOOSELY)


def test_a_cpu_has_no_recorded_errors_and_pads_attention() -> None:
    batches = replace(STEP.batches, waited_share=0.5)
    seen = replace(STEP, device="cpu", device_name="", batches=batches)
    found = {one.name: one for one in what_if(seen, step_seconds=0.2)}
    assert found["loader"].change == "DataLoader(…, num_workers=4)"
    assert {one.error for one in found.values()} == {None}
    assert found["unpadded"].percent == pytest.approx(saved(0.1 + 0.022 + 0.6 * 0.078, 0.2))


def test_waiting_for_the_loader_and_attention_without_a_kernel() -> None:
    waits = replace(STEP, batches=replace(STEP.batches, waited_share=0.5))
    assert gains(waits, step_seconds=0.2)["loader"] == pytest.approx(50.0, **LOOSELY)
    assert "loader" not in gains(replace(waits, batches=replace(waits.batches, workers=4)))
    eager = replace(STEP, attention=AttentionSeen(softmaxes=12))
    assert gains(eager)["attention"] == pytest.approx(saved(0.09 + 0.62 * 0.01), **LOOSELY)


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("transformers", "TrainingArguments(bf16=True)"),
        ("lightning", "Trainer(precision='bf16-mixed')"),
        ("accelerate", "Accelerator(mixed_precision='bf16')"),
        ("torch", "torch.autocast('cuda', torch.bfloat16)"),
    ],
)
def test_the_change_is_in_the_words_of_the_framework(framework: str, words: str) -> None:
    found = what_if(STEP, step_seconds=0.1, framework=framework)[0]
    assert found.name == "bf16"
    assert words in found.line()


@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate", "torch"])
def test_a_loop_that_run_does_not_know_is_told_of_no_run(framework: str) -> None:
    busy, idle = (what_if(STEP, step_seconds=t, framework=framework) for t in (0.1, 0.4))
    changes = {one.name: one.change for one in (*busy, *idle)}
    for name in ("unpadded", "graphs"):
        assert ("trainfit run" in changes[name]) is (framework != "torch")


def test_a_loop_of_accelerate_is_known() -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = torch.nn.Linear(8, 8)
    made = torch.optim.AdamW(model.parameters(), foreach=True)
    model, optimizer = accelerator.prepare(model, made)
    with trainfit.observe(warm_up=1) as seen:
        for _ in range(3):
            accelerator.backward(model(torch.randn(4, 8)).sum())
            optimizer.step()
    assert seen.result().framework == "accelerate"


def test_arguments_of_transformers_exist() -> None:
    from transformers import TrainingArguments

    fields = TrainingArguments.__dataclass_fields__
    told = what_if(
        replace(STEP, recomputed=1, batches=replace(STEP.batches, waited_share=0.1)),
        step_seconds=0.4,
        framework="transformers",
        memory_share=0.1,
    ) + what_if(STEP, step_seconds=0.1, framework="transformers")
    names = {one.change[18:].split("=")[0] for one in told if "TrainingArg" in one.change}
    assert len(names) >= 5
    assert names <= fields.keys()


def test_recorded_checks_are_within_five_points() -> None:
    record = json.loads(max(RESULTS.glob("*-what-if-*.json")).read_text())
    measured = [row for one in record["records"] for row in one["rows"] if "measured" in row]
    assert len({row["model"] for row in measured}) == 6
    assert record["median_error_left_out"] < 5
    told = json.loads(CHECKS.read_text())["checks"]
    assert [one["measured"] for one in told] == [row["measured"] for row in measured]
    errors = [abs(one["predicted"] - one["measured"]) for one in told]
    assert median(errors) == pytest.approx(record["median_error"])
    assert median(errors) < 5


def test_errors_are_those_of_recorded_checks(tmp_path: Path) -> None:
    assert set(recorded_errors()) <= set(NAMES)
    path = tmp_path / "checks.json"
    rows = [("fused", 3.0, 5.0), ("fused", 3.0, 4.0), ("fused", 9.0, 3.0), ("bf16", 100.0, 60.0)]
    checks = [{"change": name, "predicted": a, "measured": b} for name, a, b in rows]
    path.write_text(json.dumps({"checks": checks}))
    assert recorded_errors(path) == {"fused": 2.0, "bf16": 40.0}


class Event:
    """Stands for an event of the profiler, in microseconds."""

    def __init__(self, name: str, start: int, end: int, key: int = 0, linked: int = 0) -> None:
        self._all = name, start * 1000, end * 1000, key, linked

    def name(self) -> str:
        return self._all[0]

    def start_ns(self) -> int:
        return self._all[1]

    def end_ns(self) -> int:
        return self._all[2]

    def correlation_id(self) -> int:
        return self._all[3]

    def linked_correlation_id(self) -> int:
        return self._all[4]

    def start_thread_id(self) -> int:
        return 1

    def dtypes(self) -> list[str]:
        return ["float", "float"]

    def shapes(self) -> list[list[int]]:
        return [[2, 2], [2, 2]]

    def concrete_inputs(self) -> list[Any]:
        return []

    def device_type(self) -> Any:
        return type("Kind", (), {"name": "CPU" if "aten" in self.name() else "CUDA"})


def test_kernels_belong_to_the_operators_that_started_them() -> None:
    from trainfit.measuring.profiled_step import seconds_by_part

    operators = [
        Event("aten::linear", 0, 20, key=1),
        Event("aten::mm", 2, 10, key=2),
        Event("aten::gelu", 20, 30, key=3),
    ]
    kernels = [Event("gemm", 50, 80, linked=2), Event("gelu", 80, 90, linked=3)]
    kernels.append(Event("unknown", 90, 95, linked=77))
    seconds, launches = seconds_by_part(read([*operators, *kernels]))
    assert seconds == pytest.approx({"products": 30e-6, "other": 15e-6})
    assert launches == {"products": 1, "other": 1}
    seconds, _ = seconds_by_part(read(operators))  # on a CPU: each without what it called
    assert seconds == pytest.approx({"other": 22e-6, "products": 8e-6})


def test_a_step_on_this_machine_has_parts() -> None:
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with trainfit.observe(warm_up=1) as seen:
        for _ in range(3):
            model(torch.randn(4096, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen.evidence is not None
    parts = seen.evidence.parts
    assert parts.keys() >= {"products", "update", "other"}
    # The profiler fits its clock to the system's at its two ends, where a busy core adds a few ms.
    assert 0 < sum(parts.values()) <= 1.2 * seen.evidence.step_seconds
    assert seen.result().framework == "torch"
