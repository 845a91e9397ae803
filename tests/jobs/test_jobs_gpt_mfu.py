"""The MFU against a calculation by hand, and what the tuning guide makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_tiny import be_quick, gpt_words, plan_here, rows_of
from trainfit.conf import compose
from trainfit.core.records import Measurement
from trainfit.engine.observers import Progress, TrainRow, Window, make_row
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find, gpus
from trainfit.jobs import gpt as job
from trainfit.jobs import job_plan, pretraining
from trainfit.jobs.models.gpt_model import Gpt, GptShape, gpt_shape
from trainfit.jobs.pretraining import iter_line, read_meter
from trainfit.measuring import flops


def flops_per_token(shape: GptShape) -> float:
    return shape.flops.of_step([shape.block_size]) / shape.block_size


def test_the_operations_are_those_of_the_hand_calculation():
    # GPT-2 124M: 50,304 × 768 + 12 × (12 × 768² + 2 × 768) + 768 = 123,587,328 weights without
    # positions; 6 N + 12 × 12 layers × 12 heads × 64 × 1024 = 854,770,176 per token.
    shape = gpt_shape("gpt-124m")
    assert shape.flops.weights == 123_587_328
    by_hand = 6 * 123_587_328 + 12 * 12 * 12 * 64 * 1024
    assert flops_per_token(shape) == by_hand == 854_770_176
    # 480,000 tokens a second on an H200: 480,000 × 854,770,176 / 989.4e12
    seconds = flops.ideal_seconds(shape.flops, flops.peak_of(["h200"], "bf16"))
    assert seconds is not None
    peak = find("h200").peak_tflops("bf16")
    assert peak == pytest.approx(989, abs=1)
    assert seconds([1024] * 480) == pytest.approx(480 * 1024 * by_hand / (peak * 1e12))


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-small", "gpt-medium"])
def test_the_weights_are_the_models_own(name: str):
    shape = gpt_shape(name)
    with torch.device("meta"):
        model = Gpt(shape)
    whole = sum(p.numel() for p in model.parameters())
    assert shape.parameters == whole
    assert shape.flops.weights == whole - model.position_embedding.weight.numel()


def test_the_peak_is_that_of_the_dtype_on_every_gpu():
    assert flops.peak_of(["a30"], "bf16") == find("a30").bf16_tflops
    assert flops.peak_of(["a30", "a30"], "bf16") == 2 * find("a30").bf16_tflops
    assert flops.peak_of(["a30", "rtx-3090"], "bf16") == pytest.approx(
        find("a30").bf16_tflops + find("rtx-3090").bf16_tflops
    )
    assert flops.dtype_in_use("fp32", True) == "tf32"
    assert flops.dtype_in_use("fp32", False) == "fp32"
    assert flops.dtype_in_use("bf16", True) == "bf16"
    assert flops.peak_of(["a30"], "tf32") == find("a30").tf32_tflops


def test_an_unknown_gpu_has_no_figure():
    assert flops.peak_of([None], "bf16") is None
    assert flops.peak_of(["a30", None], "bf16") is None
    assert flops.peak_of([], "bf16") is None
    assert flops.peak_of(["t4"], "bf16") is None  # which it has not
    assert flops.ideal_seconds(gpt_shape("gpt-tiny").flops, None) is None


def row(**more: Any) -> TrainRow:
    window = Window(losses=(8.5174,), steps=4, tokens=4096, seconds=4.6, **more)
    progress = Progress(step=100, window=window)
    return make_row(
        progress, total_steps=200, steps_per_epoch=50, learning_rate=1e-3, micro_batches=1
    )


def test_waits_and_compiling_are_taken_out_and_shown():
    plain = row(ideal_seconds=0.6)
    assert plain.mfu == pytest.approx(0.6 / 4.6)
    slowed = row(ideal_seconds=0.6, waited=0.5, compiling=0.1)
    assert slowed.mfu == pytest.approx(0.6 / 4.0)
    assert slowed.compute_seconds == pytest.approx(1.0)
    assert slowed.wait_share == pytest.approx(0.5 / 4.6)
    assert slowed.compile_seconds == 0.1
    assert slowed.tokens_per_second == pytest.approx(4096 / 4.6)


def test_the_line_is_the_guides_to_the_letter():
    one = replace(row(), compute_seconds=1.01121, mfu=0.152)
    assert iter_line(one) == "iter 100: loss 8.5174, time 1011.21ms, mfu 15.2%"
    assert iter_line(replace(one, mfu=None)) == "iter 100: loss 8.5174, time 1011.21ms"


def test_more_than_the_peak_is_refused():
    assert row(ideal_seconds=5.0).mfu is None


# ── a run ─────────────────────────────────────────────────────────────────────────────────────


def test_a_run_measures_itself(tmp_path: Path, monkeypatch: Any):
    be_quick(monkeypatch)
    slow = find("t4")
    peak = 1.0  # TFLOP/s
    monkeypatch.setattr(flops, "peak_of", lambda slugs, dtype: peak)
    monkeypatch.setattr(flops, "measured_peak", lambda items, dtype: peak / 2)
    from trainfit.planning import planner

    monkeypatch.setattr(
        planner, "plan", lambda q, p, **more: replace(plan_here(q, p, **more), gpu=slow.slug)
    )
    composed = compose("gpt", gpt_words(tmp_path, "training.max_steps=20"))
    done = job.train(composed)
    run = Path(done.run)
    shape = json.loads((run / "plan.json").read_text())["task"]["arguments"]
    cost = 6 * (320 * 32 + 2 * (12 * 32 * 32 + 64) + 32) + 12 * 2 * 32 * 16
    assert shape["vocab_size"] == 320
    for one in rows_of(run, "train"):
        by_hand = cost * 4 * 16 / (one["compute_seconds"] * peak * 1e12)
        assert one["mfu"] == pytest.approx(by_hand)
        assert f"mfu {one['mfu']:.1%}" in (run / "train.log").read_text()
    settled = rows_of(run, "train")[1:]
    spent = sum(2 * one["compute_seconds"] for one in settled)
    assert done.mfu == pytest.approx(cost * 4 * 16 * 2 * len(settled) / (spent * peak * 1e12))
    assert done.mfu_of_measured == pytest.approx(2 * done.mfu)
    assert done.standing in ("poor", "good", "excellent")
    evaluated = rows_of(run, "evaluation")
    assert done.spent.evaluating == pytest.approx(sum(one["seconds"] for one in evaluated))
    assert read_meter(run).mfu == done.mfu


def test_measured_peaks_are_those_of_the_dtype():
    items = [
        Measurement(name=f"matmul_{kind}", unit="TFLOP/s", value=value, samples=())
        for kind, value in (("bf16", 780.0), ("fp32", 50.0))
    ]
    assert flops.measured_peak(items, "bf16") == 780.0
    assert flops.measured_peak(items, "tf32") is None


# ── the guide's table ─────────────────────────────────────────────────────────────────────────

GUIDE = {
    "a30": ((15, 20), (25, 30), (12, 18)),
    "a40": ((20, 25), (30, 35), (20, 30)),
    "a100-sxm4-40gb": ((25, 30), (35, 40), (16, 24)),
    "a100-sxm4-80gb": ((25, 30), (35, 40), (16, 24)),
    "v100-sxm2-16gb": ((15, 20), (25, 30), (8, 12)),
    "rtx-4090": ((20, 25), (30, 35), (12, 18)),
    "rtx-4080": ((15, 20), (25, 30), (8, 12)),
    "rtx-3090": ((18, 22), (28, 32), (10, 16)),
}


@pytest.mark.parametrize("slug", GUIDE)
def test_the_catalogue_has_the_guides_table(slug: str):
    spec = find(slug)
    assert (spec.mfu_good, spec.mfu_excellent, spec.batch_advice) == GUIDE[slug]
    good, excellent = spec.mfu_good, spec.mfu_excellent
    assert good is not None
    assert excellent is not None
    assert pretraining.standing((good[0] - 1) / 100, spec) == "poor"
    assert pretraining.standing(good[0] / 100, spec) == "good"
    assert pretraining.standing(excellent[0] / 100, spec) == "excellent"


def test_gpus_without_a_row_are_held_to_the_guides_general_targets():
    spec = find("h200")
    assert spec.mfu_good is None
    assert [pretraining.standing(x, spec) for x in (0.1, 0.2, 0.5)] == ["poor", "good", "excellent"]
    assert all(pretraining.targets(one)[0][0] >= 15 for one in gpus())


def advice(tmp: Path, slug: str, *words: str, memory: float = 0.9, wait: float = 0.0) -> list[str]:
    composed = compose("gpt", [*gpt_words(tmp), *words])
    plan = plan_here(job_plan.question(composed), as_if(find(slug)))
    config: Any = composed.config
    return pretraining.next_steps(plan, config, find(slug), memory_share=memory, wait_share=wait)


def test_the_next_steps_come_in_the_guides_order(tmp_path: Path):
    steps = advice(
        tmp_path,
        "a30",
        "device.tf32=false",
        "device.mixed_precision=off",
        memory=0.2,
        wait=0.3,
    )
    assert steps == [
        "training.batch_size=8",
        "data.max_length=1024",
        "device.mixed_precision=auto",
        "optimization.compile=true",
        "device.tf32=true",
        "training.num_workers=8",  # twice those of the plan, and no more than pay
    ]
    compose("gpt", [*gpt_words(tmp_path)[:2], *steps])  # each is an override that works


def test_what_is_done_is_not_advised_again(tmp_path: Path):
    words = ("optimization.compile=true", "data.max_length=1024", "device.mixed_precision=auto")
    assert advice(tmp_path, "a30", *words) == []
    assert advice(tmp_path, "t4", *words) == []  # a T4 has no TF32 to turn on


def test_a_plan_counts_the_operations_that_a_run_does():
    """Each once: not the scores that attention's backward pass computes again."""
    words = ["model.name=gpt-small", "data.max_length=512", "training.effective_batch_size=8"]
    composed = compose("gpt", [*words, "model.n_layer=3", "optimization.compile=false"])
    made = job_plan.answer(composed, job_plan.question(composed), as_if(find("h200")))
    time = made.time
    assert time is not None
    assert time.mfu is not None
    assert time.tokens_per_second is not None
    shape = replace(gpt_shape("gpt-small"), n_layer=3, block_size=512)
    per_token = time.mfu * find("h200").peak_tflops("bf16") * 1e12 / time.tokens_per_second
    # The run counts the norms' weights as if they were matrices.
    assert per_token == pytest.approx(flops_per_token(shape), rel=1e-3)
