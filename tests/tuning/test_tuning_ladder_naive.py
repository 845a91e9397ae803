"""The baseline of the ladder is naive by evidence, and computes the same."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.profiler import profile

from job_tiny import quick_plan, tiny_model
from trainfit.conf import compose
from trainfit.core import codec
from trainfit.core.plan_records import Plan, TaskSpec
from trainfit.engine.loop import train
from trainfit.hardware import detect
from trainfit.jobs.job_plan import question
from trainfit.measuring.evidence import count_workers
from trainfit.measuring.trace import Evidence
from trainfit.packing import cut_step
from trainfit.runtime import applied
from trainfit.tuning.naive import NaiveTask, ShuffledCut, attend, eager_attention
from trainfit.tuning.rungs import THOUGHTFUL, LadderRow, Naive, rungs_for, setting
from trainfit.tuning.trial import build

LENGTHS = np.random.default_rng(0).integers(4, 60, 200)
BATCH = 24


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, TaskSpec]:
    model = tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    words = [f"model.name={model}", "model.weights=random", "model.method=full"]
    words += ["model.attention_dropout=0.0"]  # with it torch has no kernel on a CPU
    words += ["data.max_length=64", f"training.effective_batch_size={BATCH}"]
    composed = compose("nli", words)
    plan = quick_plan(question(composed, LENGTHS.tolist()), detect())
    arguments = {
        "task": "nli",
        "config": codec.encode(composed.config),
        "lengths": LENGTHS.tolist(),
    }
    return plan, TaskSpec(factory="trainfit.jobs.probes:encoder_trial", arguments=arguments)


def looked_at(job: tuple[Plan, TaskSpec], row: LadderRow, folder: Path) -> Evidence:
    """What a step by the row's setting shows, profiled in the engine's own loop."""
    best, spec = job
    setup = build(row.candidate(spec, best))
    settings = replace(setup.settings, max_steps=4, keep_checkpoints=0, profile_step=True)
    settings = replace(settings, metric=None, early_stopping_patience=None)
    with applied(setup.runtime), setup.around():
        train(setup.task, settings, folder)
    return Evidence.load(folder / "evidence.json")


def row_of(job: tuple[Plan, TaskSpec], *names: str) -> LadderRow:
    rungs, _ = rungs_for(job[0], detect())
    chosen = [rung for rung in rungs if rung.name in names]
    assert len(chosen) == len(names)
    plan, naive = setting(job[0], chosen)
    return LadderRow(name="", what="", plan=plan, naive=naive)


def test_the_baseline_is_naive_by_evidence(job: tuple[Plan, TaskSpec], tmp_path: Path):
    others = count_workers()  # of other tests, that have not ended yet
    seen = looked_at(job, row_of(job), tmp_path)
    assert seen.products.dtype == "fp32"
    assert seen.attention.kernel is None
    assert seen.attention.softmaxes > 0
    assert seen.updates.keys() == {"single"}
    assert seen.batches.workers == others
    assert seen.batches.micro_batches == BATCH // 8
    assert not seen.batches.packed
    assert not seen.compiler.regions
    # Of eight lengths from 4 to 59, the longest is about twice the mean.
    assert seen.batches.padding_share is not None
    assert 0.3 < seen.batches.padding_share < 0.6


@pytest.mark.gpu
def test_the_baseline_is_naive_on_a_gpu(job: tuple[Plan, TaskSpec], tmp_path: Path):
    best = replace(
        job[0],
        precision="bf16",
        runtime=replace(job[0].runtime, tf32=True),
        pin_memory=True,
        num_workers=2,
        prefetch_factor=2,
    )
    spec = replace(job[1], arguments=job[1].arguments | {"device": "cuda"})
    gc.collect()  # with loader processes of earlier tests
    seen = looked_at((best, spec), row_of((best, spec)), tmp_path)
    assert (seen.device, seen.products.dtype, seen.products.tf32_kernels) == ("cuda", "fp32", 0)
    assert seen.switches.tf32 is False
    assert (seen.attention.kernel, seen.batches.pinned, seen.batches.workers) == (None, 0, 0)
    assert seen.updates.keys() == {"single"}


@pytest.mark.soak
def test_each_rung_ends_its_habit_by_evidence(job: tuple[Plan, TaskSpec], tmp_path: Path):
    fused = looked_at(job, row_of(job, "fused AdamW"), tmp_path / "1")
    assert fused.updates.keys() == {"fused"}
    assert fused.attention.kernel is None
    kernel = looked_at(job, row_of(job, "attention kernel"), tmp_path / "2")
    assert kernel.attention.kernel == "cpu"
    assert kernel.updates.keys() == {"single"}
    batch = looked_at(job, row_of(job, "batch size"), tmp_path / "3")
    assert batch.batches.micro_batches == 1
    grouped = looked_at(job, row_of(job, "grouping by length"), tmp_path / "4")
    assert grouped.batches.padding_share is not None
    assert fused.batches.padding_share is not None
    assert grouped.batches.padding_share < fused.batches.padding_share - 0.05


def test_all_rungs_together_are_the_plan_itself(job: tuple[Plan, TaskSpec]):
    best, spec = job
    rungs, _ = rungs_for(best, detect())
    plan, naive = setting(best, [r for r in rungs if not r.trades and r.name != "torch.compile"])
    assert naive == THOUGHTFUL
    row = LadderRow(name="", what="", plan=plan, naive=naive)
    assert row.candidate(spec, best).task == spec
    off = {"tf32", "cudnn_benchmark"}  # what a CPU has no use for was not set, and is off now
    assert row.settings(best).keys() <= off


def test_blocks_of_one_length_have_no_order_to_be_naive_about(job: tuple[Plan, TaskSpec]):
    best = replace(job[0], workload=replace(job[0].workload, lengths=(64,) * 100))
    rungs, unfit = rungs_for(best, detect())
    assert "grouping by length" in {one.name for one in unfit}
    assert not setting(best, ())[1].shuffled
    assert setting(best, [rung for rung in rungs if not rung.trades])[1] == THOUGHTFUL


@pytest.mark.soak
def test_gradients_that_are_kept_are_zeroed_once_a_step(job: tuple[Plan, TaskSpec], tmp_path: Path):
    def zeroings(naive: bool, folder: Path) -> int:
        row = row_of(job) if naive else row_of(job, "set_to_none")
        setup = build(row.candidate(job[1], job[0]))
        settings = replace(setup.settings, max_steps=3, keep_checkpoints=0, profile_step=False)
        with profile() as seen:
            train(setup.task, settings, folder)
        return sum(event.count for event in seen.key_averages() if "_foreach_zero_" in event.key)

    assert zeroings(True, tmp_path / "1") == 2  # the first step makes them
    assert zeroings(False, tmp_path / "2") == 0


@pytest.mark.soak
def test_the_naive_loop_computes_the_same(job: tuple[Plan, TaskSpec]):
    """The loss and the gradient of a step do not depend on how it is done."""

    def gradient(row: LadderRow) -> tuple[float, torch.Tensor]:
        setup = build(row.candidate(job[1], job[0]))
        torch.manual_seed(0)
        model = setup.task.build_model().eval()
        step, cut = np.arange(BATCH), setup.settings.cuts[0]
        total = 0.0
        with setup.around():
            for batch in cut_step(LENGTHS, step, cut)[0]:
                given = setup.task.collate(batch.sequences, batch.rows, batch.width, None)
                loss = setup.task.loss(model, given) / BATCH
                loss.backward()
                total += float(loss.detach())
        return total, torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        )

    names = ("set_to_none", "attention kernel", "batch size", "grouping by length")
    naive, best = gradient(row_of(job)), gradient(row_of(job, *names))
    assert naive[0] == pytest.approx(best[0], rel=1e-5)
    torch.testing.assert_close(naive[1], best[1], rtol=1e-3, atol=1e-6)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    batch=st.integers(1, 12),
)
def test_a_shuffled_cut_loses_no_sequence_and_pads_to_the_longest(lengths: list[int], batch: int):
    sizes = np.array(lengths)
    cut = ShuffledCut.of(len(lengths), batch, max(lengths))
    [parts] = cut_step(sizes, np.arange(len(lengths)), cut)
    assert sorted(at for part in parts for at in part.sequences) == list(range(len(lengths)))
    assert [part.rows for part in parts] == list(cut.rows)
    for part in parts:
        assert part.rows <= batch
        assert part.width == max(lengths[at] for at in part.sequences)
        assert part.tokens == sum(lengths[at] for at in part.sequences)


def test_shuffled_batches_pad_as_random_ones_do():
    """Neighbours in the data are of one length, which must not help."""
    sizes = np.sort(np.random.default_rng(1).integers(1, 500, 4096))
    cut = ShuffledCut.of(4096, 8, 500)
    [parts] = cut_step(sizes, np.arange(4096), cut)
    random = sizes[np.random.default_rng(2).permutation(4096)].reshape(-1, 8)
    share = sum(part.width * part.rows for part in parts) / sizes.sum()
    expected = random.max(axis=1).sum() * 8 / sizes.sum()
    assert share == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("causal", "masked"), [(True, False), (False, True), (False, False)])
def test_eager_attention_is_attention(causal: bool, masked: bool):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 7, 8) for heads in (4, 2, 2))
    mask = torch.rand(2, 1, 7, 7) < 0.6 if masked else None
    if mask is not None:
        mask[..., 0] = True
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "enable_gqa": True}
    expected = functional.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(attend(query, key, value, **options), expected)


def test_the_kernel_is_put_back():
    fused = functional.scaled_dot_product_attention
    with eager_attention():
        assert functional.scaled_dot_product_attention is attend
    assert functional.scaled_dot_product_attention is fused


def test_short_epochs_take_turns(job: tuple[Plan, TaskSpec]):
    inner = build(row_of(job).candidate(job[1], job[0])).task
    task = NaiveTask(inner, Naive(shuffled=False, epoch_steps=1))
    whole = inner.steps(0)
    assert [len(task.steps(epoch)) for epoch in range(9)] == [1] * 9
    assert {tuple(task.steps(epoch)[0]) for epoch in range(50)} == {tuple(step) for step in whole}
