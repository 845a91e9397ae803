"""The precision and the threads of a CPU are those that ran a step faster, and stay so."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from job_tiny import tiny_model
from trainfit.conf import compose
from trainfit.core.errors import RunFailed, TrainfitWarning
from trainfit.core.plan_records import TaskSpec
from trainfit.core.records import Cpu, HardwareProfile
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.jobs import job_plan
from trainfit.planning import cpu_choice
from trainfit.planning.cpu_choice import (
    StepRequest,
    StepTime,
    StepTimes,
    choose,
    decide,
    time_steps,
)
from trainfit.planning.estimator import estimate
from trainfit.planning.estimator.estimate import Request
from trainfit.planning.question import Choice, Question

Seconds = dict[tuple[str, int], float]


def machine(*, cores: int = 4, bf16: bool = True) -> HardwareProfile:
    cpu = Cpu(name="a processor", cores=cores, host_cores=cores, native_bf16=bf16)
    return replace(as_if(find("t4")), gpus=(), cpu=cpu, simulated=False)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return f"model.name={tiny_model(tmp_path / 'model')}"


def question(*words: str, lengths: list[int] | None = None) -> Question:
    return job_plan.question(compose("nli", ["model.method=full", *words]), lengths)


def times(seconds: Seconds) -> StepTimes:
    return StepTimes(
        times=tuple(
            StepTime(precision="bf16" if p == "bf16" else "fp32", threads=n, seconds=s)
            for (p, n), s in seconds.items()
        )
    )


class Timer:
    """Answers with these times and counts how often it was asked."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: Seconds | Exception) -> None:
        self.seconds, self.asked = seconds, list[StepRequest]()
        patch.setattr(cpu_choice, "time_steps", self)

    def __call__(self, asked: str) -> StepTimes:
        self.asked.append(StepRequest.from_json(asked))
        if isinstance(self.seconds, Exception):
            raise self.seconds
        return times(self.seconds)


USUAL = Choice(value=4, why="the usable cores")


@given(st.floats(1e-4, 10), st.floats(1e-4, 10))
def test_bf16_wins_only_where_it_is_clearly_faster(fp32: float, bf16: float):
    made = decide(times({("fp32", 4): fp32, ("bf16", 4): bf16}), USUAL)
    assert (made.precision.value == "bf16") == (fp32 > 1.05 * bf16)
    assert (made.threads.value, made.threads.why) == (4, "the usable cores")
    figures = re.search(r"([\d.,]+) against ([\d.,]+) ms$", made.precision.why)
    assert figures is not None
    said = sorted(float(figure.replace(",", "")) for figure in figures.groups())
    assert said == pytest.approx(sorted((1000 * fp32, 1000 * bf16)), rel=0.006)


def test_the_reason_names_both_figures():
    made = decide(times({("fp32", 4): 0.012, ("bf16", 4): 0.0192}), USUAL)
    assert made.precision.why == "fp32 1.6 times as fast as bf16 here: 12 against 19.2 ms"
    assert made.precision.alternatives == ("bf16: 19.2 ms",)


def test_fewer_threads_must_be_clearly_faster_too():
    four: Seconds = {("fp32", 4): 0.010, ("bf16", 4): 0.020}
    near = decide(times(four | {("fp32", 1): 0.0097, ("bf16", 1): 0.02}), USUAL)
    assert near.threads.value == 4
    made = decide(times(four | {("fp32", 1): 0.005, ("bf16", 1): 0.02}), USUAL)
    assert (made.precision.value, made.threads.value) == ("fp32", 1)
    assert made.threads.why == "2 times as fast as 4 threads here: 5 against 10 ms"


def test_a_busy_machine_says_nothing_about_threads():
    made = decide(times({("fp32", 1): 0.03, ("bf16", 1): 0.01}), USUAL)
    assert (made.precision.value, made.threads.value, made.threads.why) == (
        "bf16",
        4,
        "the usable cores",
    )
    assert "one thread of a busy machine" in made.precision.why


def test_a_step_is_timed_once_and_the_answer_kept(model: str, monkeypatch: pytest.MonkeyPatch):
    timer = Timer(monkeypatch, {("fp32", 4): 0.02, ("bf16", 4): 0.01})
    first = choose(question(model), machine(), 1)
    cpu_choice._timed.cache_clear()  # as a new process would
    timer.seconds = {("fp32", 4): 0.01, ("bf16", 4): 0.02}
    assert choose(question(model), machine(), 1) == first
    assert first.precision.value == "bf16"
    # Another epoch count, seed or like lengths are the same step; another model is not.
    alike = question(model, "seed=7", "training.num_epochs=2", lengths=[300, 400, 512])
    assert choose(alike, machine(), 1) == first
    assert len(timer.asked) == 1
    choose(question("model.name=bert-base"), machine(), 1)
    assert len(timer.asked) == 2


def test_another_machine_is_timed_anew(model: str, monkeypatch: pytest.MonkeyPatch):
    seconds: Seconds = {(p, n): 0.01 for p in ("fp32", "bf16") for n in (4, 8)}
    timer = Timer(monkeypatch, seconds)
    choose(question(model), machine(), 1)
    choose(question(model), machine(cores=8), 1)
    assert [asked.threads for asked in timer.asked] == [(4, 2, 1), (8, 4, 2, 1)]


def test_nothing_is_timed_where_the_precision_is_settled(
    model: str, monkeypatch: pytest.MonkeyPatch
):
    timer = Timer(monkeypatch, RunFailed("it must not be asked", ""))
    plain = choose(question(model), machine(bf16=False), 1)
    assert (plain.precision.value, plain.precision.why) == ("fp32", "this CPU has no native bf16")
    choose(question(model, "device.mixed_precision=bf16"), machine(), 1)
    assert timer.asked == []


def test_a_pin_that_the_cpu_cannot_do_leaves_the_precision_free(
    model: str, monkeypatch: pytest.MonkeyPatch
):
    Timer(monkeypatch, {("fp32", 4): 0.02, ("bf16", 4): 0.01})
    asked = question(model, "hardware=conservative")
    assert asked.pinned("precision") == "fp16"
    assert choose(asked, machine(), 1).precision.value == "bf16"


def test_threads_that_were_set_are_taken(model: str, monkeypatch: pytest.MonkeyPatch):
    timer = Timer(monkeypatch, {("fp32", 3): 0.02, ("bf16", 3): 0.03})
    made = choose(question(model, "device.num_threads=3"), machine(), 1)
    assert (made.threads.value, made.threads.why) == (3, "you set it")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert choose(question(model), machine(), 1).threads.value == 3
    assert {asked.threads for asked in timer.asked} == {(3,)}


def test_ranks_share_the_cores(model: str):
    made = choose(question(model), machine(cores=8, bf16=False), 2)
    assert (made.threads.value, made.threads.why) == (4, "the usable cores, shared by 2 ranks")


def test_a_timing_that_fails_means_fp32(model: str, monkeypatch: pytest.MonkeyPatch):
    timer = Timer(monkeypatch, RunFailed("exit code 1", "set it"))
    for _ in range(2):
        made = choose(question(model), machine(), 1)
        assert (made.precision.value, made.threads.value) == ("fp32", 4)
        assert made.precision.why == "no step could be timed: exit code 1"
    assert len(timer.asked) == 1


def test_a_cache_that_cannot_be_written_means_fp32(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "file"))
    timer = Timer(monkeypatch, {("fp32", 4): 0.02, ("bf16", 4): 0.01})
    with pytest.warns(TrainfitWarning, match="nothing is kept"):
        made = choose(question(model), machine(), 1)
    assert made.precision.value == "fp32"
    assert "cache cannot be written" in made.precision.why
    assert timer.asked == []


def request_for(name: str, **changes: Any) -> StepRequest:
    asked = cpu_choice._request(question(name), 1, 1, fewer=False)
    return replace(asked, **changes)


def test_a_real_step_is_timed_and_leaves_torch_as_it_was(model: str):
    from trainfit.measuring import step_times

    before = torch.get_num_threads()
    found = step_times.time_steps(request_for(model, rows=4, width=16))
    assert {(t.precision, t.threads) for t in found.times} == {("fp32", 1), ("bf16", 1)}
    assert all(0 < t.seconds < 5 for t in found.times)
    assert torch.get_num_threads() == before


def test_a_large_step_is_cut_down(model: str):
    from trainfit.measuring.step_times import _cut_down

    small = request_for(model, rows=2, width=32)
    assert _cut_down(small) == (1, 2, 32)  # one layer is all that it has
    large = request_for(model, rows=10_000, width=64)
    depth, rows, width = _cut_down(large)
    assert (depth, width) == (1, 64)
    assert 1 <= rows < 10_000


@pytest.mark.soak
def test_the_child_that_timed_a_step_estimates_like_a_fresh_one(
    model: str, monkeypatch: pytest.MonkeyPatch
):
    asked = request_for(model, rows=4, width=16)
    shape = {"slots": None, "lengths": None, "micro_batches": 1, "precision": "fp32"}
    task = TaskSpec(
        factory=asked.factory,
        arguments=asked.arguments | shape | {"rows": 4, "width": 16, "checkpointing": "none"},
    )
    target = estimate.target(find("t4"), 14.0)
    for child in (0, 1):  # both serve other tests too
        monkeypatch.setattr(estimate._child(child), "_process", None)
    with cpu_choice.dismissed():
        assert len(time_steps(asked.to_json(indent=None)).times) == 2
        [timed] = estimate.SPARE
        after_timing = estimate.ask([Request(task=task, targets=(target,))])
        assert estimate._child(0)._process is timed
    assert not estimate.is_started(0)
    assert after_timing[0].error is None
    assert estimate.ask([Request(task=task, targets=(target,))], child=1) == after_timing


@pytest.mark.soak
def test_a_child_is_handed_over_unless_a_request_changed_its_torch(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(estimate._child(0), "_process", None)  # it serves other tests
    folder = tmp_path / "made"
    task = TaskSpec(factory="os:mkdir", arguments={"path": str(folder)})
    assert cpu_choice.hand_over(task) is None
    asked = request_for(model, rows=4, width=16).to_json(indent=None)
    with cpu_choice.dismissed():
        time_steps(asked)
        process = cpu_choice.hand_over(task)
    assert process is not None
    assert process.wait(60) == 0  # and was not ended
    assert folder.is_dir()
    folder.rmdir()
    ahead = cpu_choice._child()  # which has timed nothing yet
    monkeypatch.setattr(cpu_choice, "AHEAD", [ahead])
    assert cpu_choice.hand_over(task) is ahead
    assert ahead.wait(60) == 0
    assert folder.is_dir()
    with cpu_choice.dismissed():
        time_steps(asked)
        estimate.ask([Request(task=task, targets=())])  # no step, but a request
        assert estimate.is_started(0)
        assert cpu_choice.hand_over(task) is None
