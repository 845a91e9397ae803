"""The finder on a real GPU: GPT-2 124M against the truth by bisection, whole and under caps."""

from __future__ import annotations

import time

import pytest
import torch

import trainfit
from trainfit.core.plan_records import TaskSpec
from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory
from trainfit.engine.optimizer import take_workspaces
from trainfit.jobs.job_plan import plan
from trainfit.jobs.tuned_plans import job_of
from trainfit.tuning.finder import BatchSizeJob, find
from trainfit.tuning.trial import Steps, device_for_probes

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

GIB = 1 << 30
WORDS = (
    "model.name=gpt-small",
    "model.vocab_size=50304",
    "data.max_length=1024",
    "device.mixed_precision=bf16",
    "optimization.compile=false",
    "model.use_gradient_checkpointing=false",
    "training.effective_batch_size=512",
)


@pytest.fixture
def cap(request: pytest.FixtureRequest):
    """A GPU of so many GiB, or the whole one, for a test."""
    total = torch.cuda.get_device_properties(0).total_memory
    wanted = request.param
    if wanted is not None and wanted * GIB > 0.9 * total:
        pytest.skip(f"needs more than {wanted} GiB")
    give_back_memory()
    torch.cuda.set_per_process_memory_fraction(1.0 if wanted is None else wanted * GIB / total)
    yield wanted
    torch.cuda.set_per_process_memory_fraction(1.0)
    give_back_memory()


def ooms() -> int:
    """How often memory ran out, as the allocator counted it."""
    return int(torch.cuda.memory_stats().get("num_ooms", 0))


def runs(steps: Steps, rows: int) -> bool:
    give_back_memory()
    try:
        step = steps(rows)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def true_maximum(job: BatchSizeJob) -> int:
    assert job.factory is not None
    with device_for_probes():
        steps = Steps(job.factory, job.arguments)
        low, high = 0, 1
        while runs(steps, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if runs(steps, middle) else (low, middle)
        return low


@pytest.mark.parametrize("cap", [None, 16, 8], indirect=True, ids=str)
def test_gpt2_is_found_without_running_out_of_memory(cap):
    job = job_of(plan("gpt", *WORDS))
    before, random = ooms(), torch.cuda.get_rng_state()
    found = find(job)
    assert ooms() == before
    assert found.ran_out_at_rows is None
    assert len(found.probes) <= 4
    assert max(probe.rows for probe in found.probes) >= found.recommended_rows
    assert found.seconds_after_build is not None
    assert found.seconds_after_build < 16  # 5 s on one H200, 9.6 s on one with a slower host
    assert cap is None or found.capacity_gib <= cap
    assert torch.equal(random, torch.cuda.get_rng_state())
    truth = true_maximum(job)
    assert abs(found.largest_rows - truth) <= 0.05 * truth
    assert found.knee_rows is not None
    assert 1 <= found.knee_rows <= found.recommended_rows <= found.largest_rows
    assert sum(found.cuts) == 512


@pytest.mark.parametrize("cap", [16], indirect=True)
def test_nothing_is_left_behind(cap):
    # The first time, cuBLAS takes a workspace that it keeps.
    trainfit.find_batch_size("gpt", *WORDS, at_most=8)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    trainfit.find_batch_size("gpt", *WORDS, at_most=8)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_workspaces_that_were_taken_are_not_taken_again():
    with torch.device("cuda"):
        take_workspaces()
    give_back_memory()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert before[0] > 0
    weight = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (weight @ weight).sum().backward()
    del weight
    give_back_memory()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.parametrize("cap", [16], indirect=True)
def test_what_this_process_holds_already_is_no_room(cap):
    job = job_of(plan("gpt", *WORDS))
    alone = find(job)
    held = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    beside = find(job)
    del held
    assert beside.capacity_gib == pytest.approx(alone.capacity_gib - 4, abs=0.1)
    fewer = 4 / alone.law.gib_per_row
    assert alone.largest_rows - beside.largest_rows == pytest.approx(fewer, abs=2)


@pytest.mark.parametrize("cap", [8], indirect=True)
def test_a_step_of_ones_own_is_found_without_a_prediction(cap):
    width = 1 << 20

    def probe(rows: int):
        weight = torch.ones(width, device="cuda", requires_grad=True)
        batch = torch.ones(rows, width, device="cuda")

        def step() -> None:
            (batch * weight).exp().sum().backward()
            weight.grad = None

        return step

    before = ooms()
    found = trainfit.find_batch_size(probe, effective_batch_size=1000)
    assert ooms() == before
    assert len(found.probes) <= 4
    assert max(probe.rows for probe in found.probes) >= found.recommended_rows
    assert 0.5 * 8 * GIB < found.largest_rows * found.law.gib_per_row * GIB <= 8 * GIB
    step = probe(found.recommended_rows)
    step()
    assert ooms() == before


def test_a_compiled_step_is_compiled_for_each_probe():
    spec = TaskSpec(
        factory="trainfit.jobs.probes:gpt_step",
        arguments={
            "name": "gpt-tiny",
            "width": 128,
            "micro_batches": 1,
            "precision": "bf16",
            "checkpointing": "none",
            "compile": True,
        },
    )
    began = time.perf_counter()
    found = trainfit.find_batch_size(spec, max_length=128, at_most=64)
    assert found.largest_rows == 64
    assert time.perf_counter() - began < 120
