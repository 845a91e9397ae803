"""Predicted memory of optimizers, by closed formulas and by real tensors; and their bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plan_example import make_plan
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import TaskSpec, Workload
from trainfit.engine.host_moments import BUCKET
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.hardware.model_shapes import model_shape, sizes_of
from trainfit.planning import decide
from trainfit.planning.bounds import Load, bound
from trainfit.planning.estimator.estimate import Answer, Request, Target, ask
from trainfit.planning.estimator.step_time import host_link, rates, seconds
from trainfit.planning.question import Pin, Question
from trainfit.planning.sharding import sharded

GPT = {"name": "gpt-mini", "rows": 2, "width": 64, "micro_batches": 1, "precision": "bf16"}
TARGET = Target(sm_count=132, compute_capability="9.0", capacity=64 * 2**30)
KINDS = ("adamw_fused", "adamw_bf16", "adamw_8bit", "adafactor", "muon")


def asked(**arguments: Any) -> Request:
    task = TaskSpec(
        factory="trainfit.jobs.probes:gpt_step",
        arguments=GPT | {"checkpointing": "none"} | arguments,
    )
    return Request(task=task, targets=(TARGET,))


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    named = {kind: asked(optimizer=kind) for kind in KINDS}
    named |= {
        f"{kind} offloaded": asked(optimizer=kind, offload_optimizer=True)
        for kind in ("adamw_fused", "adamw_bf16")
    }
    found = dict(zip(named, ask(list(named.values())), strict=True))
    assert not any(answer.error for answer in found.values()), found
    return found


def weights() -> list[tuple[bool, torch.Size]]:
    """Whether each weight is a hidden matrix, and its shape."""
    from trainfit.jobs.models.gpt_model import build_gpt

    with torch.device("meta"):
        model = build_gpt("gpt-mini", block_size=64)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    return [(p.dim() == 2 and id(p) not in tables, p.shape) for p in model.parameters()]


def closed_formula(kind: str) -> int:
    total = 0
    for hidden, shape in weights():
        count = shape.numel()
        match kind:
            case "adamw_fused":
                total += 8 * count
            case "adamw_bf16":
                total += 4 * count
            case "adamw_8bit":
                total += 8 * count if count < 4096 else 2 * count + 8 * -(-count // 256)
            case "muon":
                total += 4 * count if hidden else 8 * count
            case "adafactor":
                total += 4 * (sum(shape) if len(shape) == 2 else count)
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_predicted_by_a_closed_formula(kind: str, answers: dict[str, Answer]) -> None:
    counts = 4 * len(weights())  # one step count for each weight
    assert abs(answers[kind].optimizer - closed_formula(kind)) <= counts


def test_norms_that_an_update_scales_by_are_no_guesses(answers: dict[str, Answer]) -> None:
    """Adafactor reads two of each weight; no size depends on them."""
    assert not any(answer.unknown for answer in answers.values())


@pytest.mark.parametrize("kind", ["adamw_fused", "adamw_bf16"])
def test_offloaded_moments_take_two_slots(kind: str, answers: dict[str, Answer]) -> None:
    held = answers[f"{kind} offloaded"].optimizer
    total = sum(shape.numel() for _, shape in weights())
    slot = min(BUCKET, -(-total // 8)) * (2 if kind == "adamw_bf16" else 4) * 2
    assert abs(held - 2 * slot) <= 0.01 * held + 4 * len(weights())
    there, here = (answers[name].rooms[0] for name in (f"{kind} offloaded", kind))
    saved = here.peak_allocated - there.peak_allocated
    assert saved >= 0.99 * (answers[kind].optimizer - held) - 2**20


def test_updates_that_take_no_memory_are_predicted_to(answers: dict[str, Answer]) -> None:
    plain = answers["adamw_fused"]
    for kind in ("adamw_bf16", "adamw_8bit"):
        saved = plain.optimizer - answers[kind].optimizer
        less = plain.rooms[0].peak_allocated - answers[kind].rooms[0].peak_allocated
        assert abs(less - saved) < 2**20


def test_the_link_takes_the_time_of_its_bytes(answers: dict[str, Answer]) -> None:
    found = rates(find("a100-pcie-40gb"), "bf16")
    assert found is not None
    assert found.link == 24e9
    spent = {name: seconds(answer.done, found).update_kernels for name, answer in answers.items()}
    total = sum(shape.numel() for _, shape in weights())
    for kind, each in (("adamw_fused", 8), ("adamw_bf16", 4)):
        more = spent[f"{kind} offloaded"] - spent[kind]
        assert more == pytest.approx(each * total / 24e9, rel=0.25)
    assert spent["adamw_8bit"] < 1.6 * spent["adamw_fused"]


@pytest.mark.parametrize(
    ("gpu", "rate", "said"),
    [
        ("t4", 12e9, "PCIe 3.0 x16 (12 GB/s)"),
        ("h100-pcie-80gb", 48e9, "PCIe 5.0 x16 (48 GB/s)"),
        ("h200", 48e9, "PCIe 5.0 x16 (assumed, 48 GB/s)"),
    ],
)
def test_the_link_to_the_host_is_the_catalogues_or_assumed(
    gpu: str, rate: float, said: str
) -> None:
    assert host_link(find(gpu)) == (rate, said)


def test_bounds_are_not_below_the_predictions(answers: dict[str, Answer]) -> None:
    sizes = sizes_of(model_shape("gpt-mini").config | {"max_position_embeddings": 64})
    assert sizes is not None
    load = Load(tokens=128, longest=64, attention="sdpa", evaluated=0, captured=False)
    for name, answer in answers.items():
        kind, _, offloaded = name.partition(" ")
        arguments = GPT | {"optimizer": kind, "offload_optimizer": bool(offloaded)}
        taken = bound(sizes, arguments, "full", load)
        assert taken.optimizer >= answer.optimizer
        assert taken.peak_allocated >= answer.rooms[0].peak_allocated


def test_adapters_too_small_for_codes_are_bounded_by_float32() -> None:
    sizes = sizes_of(model_shape("bert-base").config)
    assert sizes is not None
    load = Load(tokens=128, longest=64, attention="sdpa", evaluated=0)
    arguments = {"precision": "bf16", "lora_rank": 2, "optimizer": "adamw_8bit"}
    taken = bound(sizes, arguments, "lora", load)
    assert taken.optimizer >= 8 * taken.gradients / 4


def question(**pins: Any) -> Question:
    work = Workload(lengths=(10,), sequences=1, max_length=10, effective_batch_size=1, epochs=1)
    made = {name: Pin(value=value, origin="override") for name, value in pins.items()}
    return Question(task="nli", factory="a:b", arguments={}, layers=1, workload=work, pins=made)


def test_offloading_needs_a_gpu_and_an_adamw_that_can() -> None:
    gpu = as_if(find("t4")).gpu
    assert decide.offload(question(), gpu).value is False
    found = decide.offload(question(offload_optimizer=True), gpu)
    assert found.value is True
    assert "PCIe 3.0 x16" in found.why
    elsewhere = decide.offload(question(offload_optimizer=True), None)
    assert elsewhere.value is False
    assert "asked for" in elsewhere.why
    with pytest.raises(BadInput, match="not adamw_8bit"):
        decide.offload(question(offload_optimizer=True, optimizer="adamw_8bit"), gpu)


@pytest.mark.parametrize(
    "changes", [{"optimizer": "adamw_8bit"}, {"optimizer": "muon"}, {"offload_optimizer": True}]
)
def test_what_is_not_sharded_is_refused_in_one_line(changes: dict[str, Any]) -> None:
    plan = replace(make_plan(), ranks=2, **changes)
    with pytest.raises(BadInput, match="sharding is fsdp, which does not go with") as refused:
        sharded(question(sharding="fsdp"), plan, 1, None)
    assert "\n" not in str(refused.value)
    short = replace(plan, fits=False)
    assert sharded(question(), short, 1, lambda _: short) == short
