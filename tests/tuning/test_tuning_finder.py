"""The batch-size finder from the outside: on this machine without a GPU, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainfit
from trainfit.core.errors import BadInput, RunFailed
from trainfit.core.plan_records import TaskSpec
from trainfit.core.records import HardwareProfile
from trainfit.hardware import as_if
from trainfit.jobs import probes as gpt_probe
from trainfit.jobs.job_plan import plan
from trainfit.jobs.tuned_plans import find_batch_size, job_of
from trainfit.planning.estimator.estimate import GIB, Request, Target, ask, told
from trainfit.tuning import finder, trial
from trainfit.tuning.finder import BatchSizeFound, BatchSizeJob, cuts, find, page
from trainfit.tuning.growth import Measured

TINY = ("gpt", "model.name=gpt-tiny", "data.max_length=64", "training.effective_batch_size=32")
TINY += ("device.use_cuda=false",)
ROOM = 0.25
PROBE = "trainfit.jobs.probes:gpt_step"


@cache
def found_here() -> BatchSizeFound:
    """From the task's name to the answer, on a CPU; once, since it is asked for again and again."""
    return trainfit.find_batch_size(*TINY, memory_gib=ROOM)


@cache
def tiny_job(**limits: Any) -> BatchSizeJob:
    return job_of(plan(*TINY, memory_gib=ROOM), memory_gib=ROOM, **limits)


def without_gpu() -> HardwareProfile:
    return replace(trainfit.detect(), gpus=(), memory_available_gib=1.0)


def fits(arguments, capacity_gib):
    """Whether the allocator serves that very step, asked apart from the finder."""
    target = Target(sm_count=1, compute_capability="0.0", capacity=int(capacity_gib * GIB))
    request = Request(task=TaskSpec(factory=PROBE, arguments=arguments), targets=(target,))
    return told(ask([request])[0]).rooms[0].fits


@pytest.mark.soak
def test_the_largest_on_a_cpu_is_the_largest_that_is_predicted_to_fit():
    found, job = found_here(), tiny_job()
    assert found.capacity_gib == ROOM
    low = high = found.largest_rows
    while not fits(job.arguments(low), ROOM):
        low -= 1
    while fits(job.arguments(high + 1), ROOM):
        high += 1
    assert found.largest_rows - low <= 0.05 * low
    assert high - found.largest_rows <= 0.05 * high
    assert found.largest_tokens == 64 * found.largest_rows
    assert found.recommended_rows == int(0.9 * found.largest_rows)
    assert found.probes == ()
    assert found.knee_rows is None
    assert "predicted, not measured" in found.reasons[0]
    assert sum(found.cuts) == found.effective_batch_size == 32
    assert BatchSizeFound.from_json(found.to_json()) == found


@pytest.mark.soak
def test_the_law_tells_the_memory_of_a_step():
    found, job = found_here(), tiny_job()
    rows = found.largest_rows * 3 // 4
    takes = found.law.fixed_gib + found.law.gib_per_row * rows
    assert fits(job.arguments(rows), 1.15 * takes)
    assert not fits(job.arguments(rows), 0.95 * takes)


@pytest.mark.soak
def test_the_range_that_was_asked_holds():
    found = find(tiny_job(at_most=10, at_least=8, margin=0.5), without_gpu())
    assert (found.largest_rows, found.recommended_rows) == (10, 8)
    assert any("more would fit" in reason for reason in found.reasons)


@pytest.mark.soak
def test_a_step_that_does_not_fit_is_one_clear_line():
    with pytest.raises(RunFailed, match="1 row does not fit: it takes") as raised:
        find(replace(tiny_job(), memory_gib=0.01), without_gpu())
    assert "\n" not in str(raised.value)


@pytest.mark.soak
def test_the_page_says_what_was_found():
    found = found_here()
    shown = page(found)
    assert f"{found.largest_rows:,} rows" in shown
    assert f"{found.recommended_tokens:,} tokens" in shown
    assert "room for 0.25 GiB" in shown


@pytest.mark.soak
def test_gradients_of_earlier_micro_batches_count_where_a_step_has_several():
    job = tiny_job()
    assert job.arguments(8)["micro_batches"] == job.micro_batches(8) == 2
    assert job.arguments(32)["micro_batches"] == job.micro_batches(32) == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"margin": 0}, "the margin is 0"),
        ({"margin": 1.2}, "the margin is 1.2"),
        ({"at_least": 9, "at_most": 3}, "at_least 9 is over at_most 3"),
        ({"at_least": 0}, "at_least is 0"),
        ({"memory_gib": -1}, "the memory is -1 GiB"),
        ({"max_length": 64}, "max_length is for a step of your own"),
    ],
)
def test_bad_input_is_said_before_anything_is_planned(given, says):
    with pytest.raises(BadInput, match=says):
        trainfit.find_batch_size(*TINY, **given)


def test_words_beside_a_step_of_ones_own_are_refused():
    with pytest.raises(BadInput, match="beside a step of your own"):
        find_batch_size("my.module:probe", "training.batch_size=3")


def only_a_step(rows: int) -> Any:
    return lambda: rows


def test_a_step_by_its_name_comes_with_its_model():
    with pytest.raises(BadInput, match="returned a function, not a model and a function"):
        find(BatchSizeJob(factory=f"{Path(__file__).stem}:only_a_step"), without_gpu())


def test_a_function_cannot_be_predicted_without_a_gpu():
    with pytest.raises(BadInput, match="there is no GPU"):
        find(BatchSizeJob(make=lambda _rows: lambda: None), without_gpu())


def test_a_gpu_of_the_catalogue_cannot_be_asked():
    with pytest.raises(BadInput, match="not in this machine"):
        find(BatchSizeJob(factory=PROBE), as_if(trainfit.lookup("NVIDIA H200")))


@given(effective=st.integers(1, 300), rows=st.integers(1, 320), packed=st.booleans())
@settings(max_examples=40)
def test_the_effective_batch_is_exact(effective, rows, packed):
    parts = cuts(effective, rows, packed=packed)
    assert sum(parts) == effective
    assert max(parts) <= rows
    assert len(parts) == -(-effective // rows)


def test_64_at_23_is_cut_unevenly():
    assert sorted(cuts(64, 23)) in ([18, 23, 23], [21, 21, 22])


class FakeGpu:
    """Stands for the GPU and its steps: memory and time on a line."""

    index, own = 0, 0

    def __init__(self, capacity: float, fixed: float, each: float) -> None:
        self.capacity, self.fixed, self.each, self.runs = capacity, fixed, each, []

    def room(self) -> float:
        return self.capacity

    def measure(self, rows: int) -> Measured:
        self.runs.append(rows)
        takes = self.fixed + self.each * rows
        assert takes <= self.capacity
        return Measured(
            rows=rows,
            held=self.fixed,
            allocated=takes,
            reserved=takes,
            seconds=0.02 + 0.001 * rows,
        )


def test_a_function_is_probed_and_others_are_told(monkeypatch):
    here = as_if(trainfit.lookup("NVIDIA H200"))
    gpu = replace(here.gpus[0], state=replace(here.gpus[0].state, memory_used_by_others_gib=3.0))
    fake = FakeGpu(8 * GIB, 2 * GIB, 0.05 * GIB)
    monkeypatch.setattr(trial, "measure_on", lambda *_: fake.measure)
    job = BatchSizeJob(make=lambda _rows: lambda: None, width=128, effective_batch_size=250)
    found = finder._on_gpu(job, replace(here, gpus=(gpu,)), fake, 0.0)
    assert abs(found.largest_rows - 120) <= 1
    assert found.recommended_rows == int(0.9 * found.largest_rows)
    assert len(found.probes) == len(fake.runs) <= 4
    assert max(fake.runs[:3]) <= 90
    assert fake.runs[3:] == [found.recommended_rows]
    assert found.law.gib_per_row == pytest.approx(0.05)
    assert found.law.fixed_gib == pytest.approx(2.0)
    assert found.used_by_others_gib == 3.0
    assert sum(found.cuts) == 250
    rate = found.recommended_rows / (0.02 + 0.001 * found.recommended_rows)
    knee = next(r for r in range(1, 200) if r / (0.02 + 0.001 * r) >= 0.98 * rate)
    assert found.knee_rows == knee
    assert found.knee_tokens == 128 * knee
    shown = page(found)
    assert "3.00 GiB that others use" in shown
    assert "no prediction" in shown


def test_a_task_spec_that_cannot_be_predicted_is_probed_all_the_same(monkeypatch):
    here = as_if(trainfit.lookup("NVIDIA H200"))
    fake = FakeGpu(8 * GIB, 2 * GIB, 0.05 * GIB)
    monkeypatch.setattr(trial, "measure_on", lambda *_: fake.measure)
    job = BatchSizeJob(factory="trainfit.core.errors:BadInput")
    found = finder._on_gpu(job, replace(here, gpus=here.gpus), fake, 0.0)
    assert abs(found.largest_rows - 120) <= 1
    assert any(reason.startswith("no prediction") for reason in found.reasons)


def seen_rows(monkeypatch, arguments):
    """The shapes that a step's batches have."""
    seen = []
    plain = gpt_probe.plain_step

    def noting(model, optimizer, loss, batches, weight, **more):
        seen.append((id(model), [tuple(batch["input_ids"].shape) for batch in batches]))
        return plain(model, optimizer, loss, batches, weight, **more)

    monkeypatch.setattr(gpt_probe, "plain_step", noting)
    steps = trial.Steps(PROBE, arguments, device="cpu")
    for rows in (1, 3):
        steps(rows)()
    return steps, seen


def test_steps_of_all_sizes_train_one_model(monkeypatch):
    given = {"name": "gpt-tiny", "precision": "fp32", "checkpointing": "none", "width": 16}
    given |= {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "micro_batches": 2}
    steps, seen = seen_rows(monkeypatch, lambda rows: given | {"rows": rows})
    assert [shapes for _, shapes in seen] == [[(1, 16)] * 2, [(3, 16)] * 2]
    assert len({model for model, _ in seen}) == 1
    model = steps._model
    assert all(not parameter.is_meta for parameter in model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    step = steps(2)
    assert all(parameter.grad is None for parameter in model.parameters())
    step()
    after = list(model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert steps.built is not None
