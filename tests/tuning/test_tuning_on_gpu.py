"""Trials on a real GPU: times from its own queue, peaks, memory that runs out, compiled code."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainfit.cli.main import run
from trainfit.conf import compose
from trainfit.core.plan_records import Plan
from trainfit.jobs import job_plan, tuned_plans
from trainfit.jobs.tuned_plans import JobQuestion
from trainfit.tuning.candidates import changed
from trainfit.tuning.children import Children
from trainfit.tuning.trial import run_trial
from trainfit.tuning.tuned_cache import TrialCandidate

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
WORDS = (
    "model.name=bert-base",
    "model.weights=random",
    "model.method=full",
    "training.effective_batch_size=32",
    "optimization.compile=false",
)


@pytest.fixture(scope="module")
def job() -> tuned_plans.JobQuestion:
    composed = compose("nli", WORDS)
    return tuned_plans.JobQuestion(
        composed=composed,
        question=job_plan.question(composed),
        profile=job_plan.machine(composed),
    )


@pytest.fixture(scope="module")
def base(job: JobQuestion) -> Plan:
    return job_plan.answer(job.composed, job.question, job.profile)  # predicted, not bounded


def candidate(job: JobQuestion, plan: Plan) -> TrialCandidate:
    return TrialCandidate(settings={}, plan=plan, task=tuned_plans.trial_task(job))


def test_times_are_the_clocks_and_peaks_are_the_allocators(job: JobQuestion, base: Plan) -> None:
    began = time.perf_counter()
    found = run_trial(candidate(job, base), steps=20, warm_up=4)
    wall = time.perf_counter() - began
    assert found.status == "ok", found.note
    assert 0 < sum(found.step_seconds) < wall
    assert found.peak_memory_gib is not None
    assert found.peak_reserved_gib is not None
    assert found.peak_reserved_gib >= found.peak_memory_gib
    assert base.memory is not None
    assert found.peak_memory_gib == pytest.approx(base.memory.peak_allocated_gib, rel=0.15)
    torch._C._cuda_clearCublasWorkspaces()  # of this thread and the backward's: they stay
    assert torch.cuda.memory_allocated() < 2**26  # nothing else is left for the next one


def test_memory_that_really_runs_out_is_an_outcome(job: JobQuestion, base: Plan) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 1.5 * 2**30 / total))
    try:
        found = run_trial(candidate(job, base), steps=3, warm_up=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (found.status, found.samples_per_second) == ("oom", None)
    assert run_trial(candidate(job, base), steps=3, warm_up=1).status == "ok"


def test_a_second_compiled_trial_is_compiled_too(job: JobQuestion, base: Plan) -> None:
    compiled = changed(base, compile=True)
    for _ in range(2):
        torch._dynamo.utils.counters.clear()
        found = run_trial(candidate(job, compiled), steps=8, warm_up=4)
        assert found.status == "ok", found.note
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_child_measures_what_this_process_does(job: JobQuestion, base: Plan) -> None:
    """It may be quicker: steps this short wait for Python, and a process of tests is full."""
    here = run_trial(candidate(job, base), steps=20, warm_up=4)
    with Children(["trainfit.jobs.probes"]) as children:
        there = children.run(candidate(job, base), steps=20, warm_up=4, limit=120)
    first, second = here.samples_per_second, there.samples_per_second
    assert first is not None
    assert second is not None
    assert second.value > 0.9 * first.value
    assert there.step_samples == here.step_samples
    assert there.peak_memory_gib == pytest.approx(here.peak_memory_gib, rel=0.05)


def test_tune_keeps_its_time_and_its_choice_is_no_slower_than_the_plan(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    words = [word for word in WORDS if "compile" not in word]
    began = time.monotonic()
    assert run(["tune", "nli", *words, "--minutes", "0.5", "--json"]) == 0
    assert time.monotonic() - began < 30 + 45  # the data is prepared before
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] < 30 + 5
    assert found["trials"][0]["status"] == "ok"
    assert found["trials"][0]["peak_memory_gib"] > 0
    assert found["gain"] is None or found["gain"] >= 0.98


def test_a_way_of_compiling_that_does_not_exist_is_a_record(job: JobQuestion, base: Plan) -> None:
    found = run_trial(
        candidate(job, replace(base, compile_mode="?", compile=True)), steps=1, warm_up=0
    )
    assert found.status == "failed"
    assert "compile mode is '?'" in found.note
