"""What is tried: complete plans, one setting away, within pins and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tuning_toy as toy
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.core.plan_records import Plan, TimeEstimate, Workload
from trainfit.core.records import CompileSupport, HardwareProfile, Scalar
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.kernels import supported
from trainfit.packing import cut_step, deal_steps, ladder
from trainfit.planning.question import Pin, Question
from trainfit.tuning.candidates import (
    Space,
    Variant,
    differences,
    neighbours,
    predicted_gib,
    promising,
    with_budget,
)

LENGTHS = tuple(int(n) for n in np.random.default_rng(0).integers(20, 512, 192))
TIME = TimeEstimate(
    tokens_per_second=None,
    samples_per_second=None,
    mfu=0.4,
    step_seconds=0.2,
    epoch_seconds=None,
    total_seconds=None,
    error_percent=None,
)


def space(
    *,
    gpu: str | None = "rtx-4090",
    pins: Mapping[str, Scalar] | None = None,
    origin: str = "override",
    accumulation: int = 4,
    causal: bool = False,
    capacity: float = 24.0,
    asked: list[Mapping[str, Scalar]] | None = None,
    **changes: Any,
) -> Space:
    """A job of 64 sequences a step around a plan that cuts them into so many."""
    workload = Workload(
        lengths=LENGTHS, sequences=192, max_length=512, effective_batch_size=64, epochs=3
    )
    packed = gpu is not None and not causal
    cuts = ladder(LENGTHS, 64, 64 * 512, padded=not packed, at_least=accumulation)
    base = toy.plan(
        workload=workload,
        packed=packed,
        attention="varlen" if packed else "sdpa",
        precision="fp32" if gpu is None else "bf16",
        effective_batch_size=64,
        micro_batch_tokens=cuts[0].tokens,
        batch_size=-(-cuts[0].tokens // 512),
        gradient_accumulation_steps=cuts[0].micro_batches,
        cuts=tuple(cut.micro_batches for cut in cuts),
        memory=replace(toy.MEMORY, capacity_gib=capacity),
        time=TIME,
        compile=gpu is not None,
        num_workers=0 if gpu is None else 6,
        pin_memory=gpu is not None,
        gpu=gpu,
    )
    base = replace(base, **changes)
    question = Question(
        task="nli",
        factory="tuning_toy:trial",
        arguments={},
        layers=2,
        workload=workload,
        pins={name: Pin(value=value, origin=origin) for name, value in (pins or {}).items()},
        causal=causal,
    )

    def ask(more: Mapping[str, Scalar]) -> Plan:
        if asked is not None:
            asked.append(more)
        padded = replace(base, packed=False, attention="sdpa")
        return replace(padded if "flash" in more else base, fits=more.get("batch_size", 0) <= 64)

    return Space(question=question, profile=profile(gpu), base=base, ask=ask)


def profile(gpu: str | None) -> HardwareProfile:
    support = CompileSupport(c_compiler="cc", python_headers=True, triton="3.5")
    made = replace(as_if(find(gpu or "rtx-4090")), compile=support, simulated=False)
    return made if gpu else replace(made, gpus=())


def tried(variants: Iterable[Variant], base: Plan) -> list[dict[str, Scalar]]:
    return [differences(base, v.plan) for v in variants if not v.skipped]


def test_each_neighbour_is_one_decision_away() -> None:
    here = space()
    found = tried(neighbours(here, here.base), here.base)
    assert all(found)
    names = [set(one) for one in found]
    for expected in (
        {"compile"},
        {"micro_batch_tokens"},
        {"num_workers"},
        {"compile_mode"},
        {"packed", "attention"},
        {"optimizer"},
        {"gradient_checkpointing", "micro_batch_tokens"},
        {"precision"},
        {"pin_memory"},
    ):
        assert expected in names, expected
    assert [one["num_workers"] for one in found if "num_workers" in one] == [0, 3]


def test_fp32_never_wins_where_there_is_bf16() -> None:
    here = space()
    [skipped] = [v for v in neighbours(here, here.base) if v.plan.precision == "fp32"]
    assert "half precision" in skipped.skipped


def test_tf32_is_tried_where_it_is_off_and_never_taken_away() -> None:
    here = space()
    for on in (True, False):
        plan = replace(here.base, runtime=replace(here.base.runtime, tf32=on))
        found = [v for v in neighbours(here, plan) if set(differences(plan, v.plan)) == {"tf32"}]
        assert [bool(v.skipped) for v in found] == [on]
    old = space(gpu="t4")
    others = [differences(old.base, v.plan) for v in neighbours(old, old.base)]
    assert others
    assert {"tf32"} not in [set(one) for one in others]


@pytest.mark.parametrize(
    ("pin", "gone"),
    [
        ("compile", {"compile", "compile_mode"}),
        ("optimizer", {"optimizer"}),
        ("num_workers", {"num_workers"}),
        ("precision", {"precision"}),
        ("flash", {"packed"}),
        ("gradient_checkpointing", {"gradient_checkpointing"}),
        ("pin_memory", {"pin_memory"}),
        ("gradient_accumulation_steps", {"micro_batch_tokens"}),
    ],
)
def test_what_is_pinned_is_not_varied(pin: str, gone: set[str]) -> None:
    pinned = space(pins={pin: 1})
    kept = {name for one in tried(neighbours(pinned, pinned.base), pinned.base) for name in one}
    if pin == "gradient_accumulation_steps":  # with checkpointing it may still grow
        kept -= {"gradient_checkpointing", "micro_batch_tokens"}
    assert not kept & gone
    shipped = space(pins={pin: 1}, origin="default")
    free = {name for one in tried(neighbours(shipped, shipped.base), shipped.base) for name in one}
    assert free & gone


def test_a_pinned_batch_size_is_a_cap() -> None:
    here = space(pins={"batch_size": 8})
    sizes = [v.plan.micro_batch_tokens for v in promising(here) if not v.skipped]
    assert sizes
    assert max(sizes) <= here.base.micro_batch_tokens


@given(st.sampled_from([0.25, 0.5, 2.0]), st.integers(1, 8), st.booleans())
@settings(max_examples=10)
def test_another_budget_cuts_the_same_steps(factor: float, count: int, packed: bool) -> None:
    here = space(gpu="rtx-4090" if packed else None, accumulation=count)
    plan = with_budget(here, here.base, factor)
    assert plan.effective_batch_size == 64
    assert plan.gradient_accumulation_steps == plan.cuts[0]
    cap = plan.batch_size * 512
    assert plan.micro_batch_tokens <= cap
    lengths = np.array(LENGTHS)
    cut = ladder(
        lengths,
        64,
        max(512, plan.micro_batch_tokens),
        padded=not packed,
        at_least=plan.gradient_accumulation_steps if packed else 1,
    )[0]
    step = deal_steps(LENGTHS, 64, 0)[0]
    [batches] = cut_step(lengths, step, cut)
    assert sorted(s for b in batches for s in b.sequences) == sorted(step.tolist())
    assert max(b.rows * b.width for b in batches) <= plan.micro_batch_tokens
    if factor < 1:
        assert plan.micro_batch_tokens <= here.base.micro_batch_tokens
    else:
        assert plan.micro_batch_tokens >= here.base.micro_batch_tokens


def test_memory_is_reckoned_by_the_tokens() -> None:
    here = space()
    double = with_budget(here, here.base, 2.0)
    ratio = double.micro_batch_tokens / here.base.micro_batch_tokens
    assert predicted_gib(here.base, double) == pytest.approx(13 + 8 * (ratio - 1))
    assert double.memory is not None
    assert double.memory.activations_gib == pytest.approx(8 * ratio)


def test_what_is_too_large_is_skipped_with_the_reason() -> None:
    asked: list[Mapping[str, Scalar]] = []
    here = space(capacity=14.0, asked=asked)
    # The planner is asked where the bound says no, and this one agrees to all that is small.
    assert not [v for v in promising(here) if v.skipped]
    assert {k: v for k, v in asked[0].items() if k == "compile"} == {"compile": False}
    strict = replace(here, ask=lambda _pins: replace(here.base, fits=False))
    skipped = [v for v in promising(strict) if v.skipped]
    assert {tuple(differences(here.base, v.plan)) for v in skipped} == {
        ("compile",),
        ("micro_batch_tokens",),
    }
    assert all("GiB of 13.6" in v.skipped for v in skipped)


def test_recomputing_without_room_to_grow_is_skipped() -> None:
    here = space(accumulation=1)
    skipped = {
        v.plan.gradient_checkpointing: v.skipped
        for v in neighbours(here, here.base)
        if v.plan.gradient_checkpointing != "none"
    }
    assert set(skipped) == {"selective", "full"}
    assert all("only compute more" in why for why in skipped.values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"ranks": 2}, "ranks agree on each step"),
        ({"gradient_checkpointing": "full"}, "recomputation reads the random state"),
    ],
)
def test_steps_are_captured_in_trials_only_where_the_run_captures_them(
    changes: dict[str, Any], reason: str
) -> None:
    """A trial is one rank's share of a step, which could be captured where the run's cannot."""
    here = space(cuda_graph=False, **changes)
    here = replace(here, question=replace(here.question, uncapturable=None))
    found = [v for v in neighbours(here, here.base) if v.plan.cuda_graph]
    assert [differences(here.base, v.plan) for v in found] == [{"cuda_graph": True}]
    assert reason in found[0].skipped
    assert bool(reason) == bool(found[0].skipped)


def test_cuda_graphs_need_one_shape() -> None:
    here = space(packed=False, attention="sdpa")
    modes = {
        v.plan.compile_mode: v.skipped
        for v in neighbours(here, here.base)
        if v.plan.compile_mode != "default"
    }
    assert "one shape" in modes["reduce-overhead"]
    assert modes["max-autotune-no-cudagraphs"] == ""


def test_a_gpt_has_a_kernel_to_choose_and_nothing_to_pack() -> None:
    here = space(causal=True)
    found = tried(neighbours(here, here.base), here.base)
    kernels = [one["attention_kernel"] for one in found if set(one) == {"attention_kernel"}]
    assert kernels == ["flash", "efficient"]
    masked = space(packed=False, attention="sdpa")
    found_masked = tried(neighbours(masked, masked.base), masked.base)
    assert [one["attention_kernel"] for one in found_masked if "attention_kernel" in one] == [
        "efficient"
    ]
    assert not any("packed" in one for one in found)


@pytest.mark.parametrize(
    ("installed", "reason", "offered"),
    [(True, None, True), (False, None, False), (True, "", False)],
)
def test_liger_is_tried_where_it_is_installed_and_has_the_layers(
    installed: bool, reason: str | None, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supported, "is_installed", lambda: installed)
    here = space()
    here = replace(here, question=replace(here.question, no_liger=reason))
    found = tried(neighbours(here, here.base), here.base)
    assert ({"liger": True} in found) == offered


def test_a_cpu_has_fewer_axes_and_never_another_precision() -> None:
    here = space(gpu=None)
    found = tried([*promising(here), *neighbours(here, here.base)], here.base)
    names = {name for one in found for name in one}
    assert {"micro_batch_tokens", "optimizer", "compile"} <= names
    assert not names & {"precision", "tf32", "packed", "pin_memory", "compile_mode"}


def test_the_task_that_is_estimated_follows_the_plan() -> None:
    here = space()
    [eager] = [v.plan for v in promising(here) if not v.plan.compile]
    assert eager.task.arguments["compile"] is False
    half = with_budget(here, here.base, 0.5)
    width, before = half.task.arguments["width"], here.base.micro_batch_tokens
    assert 0.9 * half.micro_batch_tokens <= width <= half.micro_batch_tokens < before
