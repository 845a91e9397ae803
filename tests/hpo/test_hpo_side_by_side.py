"""Trials side by side on one GPU: how many are planned, what is measured, and nothing is lost."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest
from hpo_toy import run_toy, toy_queue
from optuna.trial import TrialState
from rich.console import Console

from trainfit.cli.pages import study_page
from trainfit.conf import compose
from trainfit.core import codec
from trainfit.core.errors import OutOfMemory
from trainfit.core.records import GpuState
from trainfit.engine.observers import TrainRow
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.hpo import side_by_side
from trainfit.hpo import workers as trials
from trainfit.hpo.objective import BATCH, GpuShare, Objective
from trainfit.hpo.outcome import Best, StudyResult
from trainfit.hpo.side_by_side import Helpers, SideBySide, _run_beside, plan_workers
from trainfit.hpo.studies import read_setting
from trainfit.hpo.trial_queue import WORKER, Claim, Outcome
from trainfit.hpo.workers import work
from trainfit.jobs import job_plan, registry
from trainfit.planning.cuts import target_for
from trainfit.reports.study_sections import _headlines


@pytest.fixture(scope="module")
def h200() -> Any:
    profile = as_if(find("h200"))
    return replace(profile, cpu=replace(profile.cpu, cores=16))


@dataclass(frozen=True, kw_only=True)
class FakePlan:
    """What a study asks of a plan."""

    memory: Any
    time: Any
    workload: Any
    fits: bool = True
    compile: bool = False
    packed: bool = False
    quantization: str = "none"
    advice: tuple[str, ...] = ()


@dataclass(frozen=True)
class FakeWorkload:
    trainings: int


@dataclass(frozen=True)
class FakeQuestion:
    workload: FakeWorkload


def plan_of(peak: float | None, mfu: float | None = 0.01, method: str = "full", **more: Any) -> Any:
    memory = None if peak is None else SimpleNamespace(peak_reserved_gib=peak)
    time, workload = SimpleNamespace(mfu=mfu), SimpleNamespace(method=method)
    return FakePlan(memory=memory, time=time, workload=workload, **more)


# ── planned ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("plan", "workers"),
    [
        (plan_of(10), 4),
        (plan_of(35), 3),  # 4 would have 34.8 GiB each, a context of 0.7 and a margin of 10%
        (plan_of(50), 2),
        (plan_of(70), 1),
        (plan_of(None), 1),
        (plan_of(10, mfu=0.4), 2),  # busy, but building and evaluating leave gaps
        (plan_of(10, mfu=0.2), 3),
        (plan_of(10, mfu=None), 2),
        (plan_of(10, method="frozen"), 1),
        (plan_of(10, fits=False), 1),
    ],
)
def test_as_many_are_planned_as_memory_speed_and_cores_allow(plan: Any, workers: int, h200: Any):
    assert plan_workers(plan, h200, 50)[0] == workers
    assert plan_workers(plan, h200, 2)[0] == min(workers, 2)
    assert plan_workers(plan, replace(h200, gpus=()), 50) == (1, GpuShare())
    for cores, most in ((2, 1), (8, 2), (9, 3)):
        few = replace(h200, cpu=replace(h200.cpu, cores=cores))
        assert plan_workers(plan, few, 50)[0] == min(workers, most)


def test_measured_memory_and_speed_replace_the_planned_ones(h200: Any):
    row = replace(row_at(20, 0.1), memory_gib=10.0, mfu=0.01)
    workers, room = plan_workers(plan_of(80, mfu=0.4), h200, 50, row)  # an upper bound
    assert workers == 4
    assert room == GpuShare(share=0.25, used=pytest.approx(1.15 * 10 / 80), beside=True)
    assert room.holds(plan_of(160), h200.gpu)  # twice the batch: 23 GiB, and a margin
    assert not room.holds(plan_of(300), h200.gpu)
    busy = replace(row, mfu=0.5)
    assert plan_workers(plan_of(80, mfu=0.01), h200, 50, busy)[0] == 2
    more = replace(row, memory_gib=200.0)  # never more than planned
    assert plan_workers(plan_of(10), h200, 50, more)[1].used == 1


def test_memory_that_other_programs_take_is_not_shared(h200: Any):
    gpu = replace(h200.gpu, state=GpuState(memory_used_by_others_gib=h200.gpu.memory_gib / 2))
    whole = h200.gpu.memory_gib
    assert GpuShare(share=0.5).gib(h200.gpu) == pytest.approx(whole / 2 - 0.7)
    assert GpuShare(share=0.5).gib(gpu) == pytest.approx(whole / 4 - 0.7)
    assert plan_workers(plan_of(30), h200, 50)[0] == 4
    assert plan_workers(plan_of(30), replace(h200, gpus=(gpu,)), 50)[0] == 2


def test_a_trial_has_the_plan_of_one_alone_where_it_fits_and_never_another_method(
    h200: Any, monkeypatch: pytest.MonkeyPatch
):
    asked: list[float | None] = []
    peak = [20.0]

    def answer(_c: Any, about: Any, _p: Any, *, memory_gib: float | None = None, here: bool) -> Any:
        assert here
        assert about.workload.trainings == 3 * 12 // 4  # code is compiled once in each process
        asked.append(memory_gib)
        small = memory_gib is not None and memory_gib < 100
        method = "frozen" if small and peak[0] > 100 else "full"
        return plan_of(min(peak[0], memory_gib or 140.0), method=method)

    monkeypatch.setattr(job_plan, "answer", answer)
    monkeypatch.setattr(job_plan, "detect", lambda: h200)
    monkeypatch.setattr(registry, "job_module", lambda _: None)
    question = FakeQuestion(FakeWorkload(trainings=3))
    job = SimpleNamespace(tuned_job=lambda _: SimpleNamespace(question=question))
    monkeypatch.setattr(Objective, "_prepare", lambda *_: SimpleNamespace(typical=lambda: job))
    composed = compose("nli", [])
    objective = Objective(composed, "f1", alike=12)
    assert objective.plan(composed) == objective.latest
    assert asked == [None]
    objective.room = GpuShare(share=0.5)
    assert objective.plan(composed).memory.peak_reserved_gib == 20  # type: ignore[union-attr]
    assert asked[1:] == [pytest.approx(h200.gpu.memory_gib - 0.7)]  # whatever runs beside it
    peak[0] = 80.0
    assert objective.plan(composed).memory.peak_reserved_gib < 60 + 10  # type: ignore[union-attr]
    assert asked[-1] == pytest.approx(h200.gpu.memory_gib / 2 - 0.7)
    peak[0] = 120.0  # the share alone would have the encoder frozen
    found = objective.plan(composed)
    assert not found.fits
    assert found.workload.method == "full"


def test_a_helper_plans_without_the_memory_that_trials_beside_it_hold(
    h200: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A helper finds the first trial's memory in use, which would be another plan: other bits."""
    crowded = replace(h200.gpu, state=GpuState(memory_used_by_others_gib=100.0))
    monkeypatch.setattr(registry, "job_module", lambda _: None)
    objectives = []
    for gpu in (h200.gpu, crowded):
        profile = replace(h200, gpus=(gpu,))
        monkeypatch.setattr(job_plan, "detect", lambda profile=profile: profile)
        objectives.append(Objective(compose("nli", []), "f1"))
    first, helper = objectives
    started: list[list[str]] = []
    monkeypatch.setattr(trials.subprocess, "Popen", lambda words, **_: started.append(words))
    study = SimpleNamespace(get_trials=lambda **_: [])
    setting = SimpleNamespace(
        hpo=SimpleNamespace(trials=9), folder=tmp_path, task="nli", words=(), storage="x"
    )
    first.latest = plan_of(10)
    side_by_side.start_helpers(
        cast(Any, SimpleNamespace(study=study, setting=setting)), first, None
    )
    words = started[0]
    helper.suppose(float(words[words.index("--others") + 1]))
    helper.room = GpuShare(share=float(words[words.index("--share") + 1]), beside=True)
    free = h200.gpu.memory_gib - 0.7
    assert target_for(helper.profile, free).capacity == target_for(first.profile).capacity
    assert helper.room.gib(helper.profile.gpu) == first.room.gib(first.profile.gpu)


@pytest.mark.parametrize(
    ("words", "alike"),
    [
        (["hpo.trials=50"], 2),  # 5 batches, 4 dropouts in the blocks
        (["hpo.trials=50", "model.feed_forward_dropout=0.1"], 10),
        (["hpo.trials=50", "model.feed_forward_dropout=0.1", f"{BATCH}=32"], 50),
        (["hpo.trials=50", "model.lora_dropout=interval(0,0.1)"], 1),
    ],
)
def test_trials_of_the_same_shapes_share_compiled_code(words: list[str], alike: int):
    whole = ["model.name=deberta-v3-base", "model.method=full", "model.weights=random"]
    assert read_setting("nli", [*whole, *words]).alike == alike


# ── measured ──────────────────────────────────────────────────────────────────────────────────


def row_at(step: int, seconds: float, compiling: float = 0.0) -> TrainRow:
    return TrainRow(
        step=step,
        total_steps=1000,
        epoch=0.1,
        loss=1.0,
        learning_rate=1e-3,
        grad_norm=None,
        step_seconds=seconds,
        samples_per_second=1.0,
        tokens_per_second=1.0,
        mfu=None,
        memory_gib=0.0,
        wait_share=0.0,
        compile_seconds=compiling,
        micro_batches=1,
        skipped=0,
    )


class Bench:
    """Helpers that only sleep, with trials that the test gives them."""

    def __init__(self, workers: int) -> None:
        self.study = optuna.create_study()
        self.said: list[str] = []
        self.started: list[subprocess.Popen[bytes]] = []
        self.workers = workers
        self.helpers = Helpers(self.study, self.start, self.said.append)

    def start(self, _row: TrainRow | None) -> list[subprocess.Popen[bytes]]:
        self.started += [subprocess.Popen(["sleep", "600"]) for _ in range(1, self.workers)]
        return self.started

    def fold(self, seconds: float, rows: int = 4, batch: int = 32) -> None:
        """A fold of this process: its first row has the warm-up."""
        self.helpers.begin(batch)
        self.helpers.on_start(0, 1000)
        self.helpers.on_log(row_at(10, 50 * seconds))
        for n in range(2, rows + 1):
            self.helpers.on_log(row_at(10 * n, seconds))

    def claim(self, *helpers: int) -> list[optuna.Trial]:
        made = [self.study.ask() for _ in helpers]
        for trial, at in zip(made, helpers, strict=True):
            trial.set_user_attr(WORKER, {"pid": self.started[at].pid})
        return made

    @property
    def alive(self) -> int:
        return sum(process.poll() is None for process in self.started)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Bench]]:
    monkeypatch.setattr(side_by_side, "_LOOK_EVERY", 0.0)
    made: list[Bench] = []

    def make(workers: int) -> Bench:
        made.append(Bench(workers))
        return made[-1]

    yield make
    for one in made:
        one.helpers.close()


def test_helpers_start_after_steps_alone_and_stay_where_they_gain(bench: Any):
    one = bench(3)
    one.fold(0.02, rows=2)
    assert not one.started  # too few steps to tell how fast one is alone
    one.helpers.on_log(row_at(110, 0.02))
    assert one.alive == 2
    one.fold(0.02)  # they import: still alone
    first = one.claim(0)
    one.fold(9.0)  # one of them warms up: not timed
    second = one.claim(1)
    for trial in (*first, *second):
        trial.report(0.5, 0)
    assert one.helpers.gain(3) is None
    one.fold(0.03, rows=30)
    assert one.helpers.gain(3) == pytest.approx(3 * 0.02 / 0.03)
    assert one.said[1:] == ["3 trials side by side take 2.00 times the steps of one"]
    one.fold(0.5, batch=64)  # of another size, with nothing to compare it with
    assert one.helpers.gain(3) == pytest.approx(2.0)
    assert one.alive == 2
    assert one.helpers.result == SideBySide(planned=3, kept=3, gain=pytest.approx(2.0))
    one.started[0].kill()
    one.started[0].wait()
    one.fold(0.025, rows=40)  # the one that is left counts
    assert one.helpers.gain(2) == pytest.approx(2 * 0.02 / 0.025)
    assert one.helpers.result.kept == 2


def test_helpers_that_gain_too_little_are_stopped_for_good(bench: Any):
    one = bench(2)
    one.fold(0.05, rows=5)
    for trial in one.claim(0):
        trial.report(0.5, 0)
    one.fold(0.095, rows=20)
    assert one.alive == 0
    assert one.said == [
        "up to 2 trials side by side, as many as have room on the GPU",
        "2 trials side by side take 1.05 times the steps of one: one at a time from here",
    ]
    assert one.helpers.result == SideBySide(planned=2, kept=1, gain=pytest.approx(2 * 5 / 9.5))
    one.fold(0.05, rows=50)
    assert len(one.started) == 1


def test_folds_too_short_to_be_timed_start_helpers_with_the_second_trial(bench: Any):
    one = bench(2)
    one.fold(0.01, rows=1)
    assert not one.started
    one.fold(0.01, rows=1)
    assert one.alive == 1
    assert one.helpers.result == SideBySide(planned=2, kept=2, gain=None)


# ── memory ────────────────────────────────────────────────────────────────────────────────────


class Job:
    """An objective that has too little memory beside others."""

    def __init__(self, reason: str) -> None:
        self.room, self.reason = GpuShare(share=0.5, beside=True), reason
        self.tried: list[float] = []

    def plan(self, _composed: Any) -> Any:
        self.tried.append(self.room.share)
        small = self.room.share < 1
        return plan_of(20, fits=not (small and self.reason == "plan"))

    def train(self, *_: Any) -> Any:
        if self.room.share < 1:
            raise OutOfMemory("memory ran out", "take a smaller step")
        raise optuna.TrialPruned("at its end")


@pytest.mark.parametrize("reason", ["plan", "training"])
def test_a_trial_without_room_beside_others_is_run_with_the_whole_gpu(
    reason: str, bench: Any, monkeypatch: pytest.MonkeyPatch
):
    one, job = bench(2), Job(reason)
    one.fold(0.01)
    one.fold(0.01)
    monkeypatch.setattr(trials, "_in_short", lambda _plan: {})
    hpo = SimpleNamespace(metric="f1", pruner="median")
    setting = SimpleNamespace(compose=lambda _p: None, folder=Path("x"), task="nli", hpo=hpo)
    opened: Any = SimpleNamespace(setting=setting, folds=1, steps=1)
    claim = Claim(trial=one.study.ask(), params={BATCH: 8})
    outcome = _run_beside(opened, cast(Any, job), one.helpers, 8, claim)
    assert outcome.kind == "pruned"
    assert outcome.reason == "pruned at its end"
    assert job.tried == [0.5, 1.0]
    assert job.room == GpuShare()
    assert one.alive == 0
    assert "has too little memory beside others" in one.said[-1]
    assert one.helpers.result.kept == 1


def test_a_crowded_trial_goes_back_to_the_queue_and_no_death_is_counted(tmp_path: Path):
    queue = toy_queue(f"sqlite:///{tmp_path / 'x.db'}", trials=2, retries=0)
    seen: list[dict[str, Any]] = []

    def crowded(claim: Claim) -> Outcome:
        seen.append(claim.params)
        return Outcome(kind="crowded", reason="out of memory")

    assert work(queue, crowded) == "stopped"  # a helper ends
    assert work(queue, run_toy) == "done"
    ended = [t for t in queue.study.get_trials() if t.state == TrialState.COMPLETE]
    assert len(ended) == 2
    assert seen[0] in [trial.params for trial in ended]


# ── shown ─────────────────────────────────────────────────────────────────────────────────────


def test_the_page_and_the_report_say_how_many_ran_and_what_it_gained():
    best = Best(trial=1, params={}, value=0.5, test={}, run="runs/x")
    beside = SideBySide(planned=4, kept=3, gain=1.876)
    result = StudyResult(
        study="mine", best=best, trials={"complete": 8}, seconds=9.0, side_by_side=beside
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(study_page(result, "runs/hpo-mine", "trainfit hpo nli"))
    assert "3 of 4 planned, 1.88 times the steps of one" in console.export_text()
    [shown] = [h for h in _headlines((), codec.encode(result), "f1") if "side" in h.label]
    assert shown.value == "3, 1.88× the steps of one"
