"""Predicted time of a whole job: by rule at first, then by what a run on the machine took."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainfit.conf import compose
from trainfit.core.plan_records import Plan, RuntimeSettings
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.jobs import job_plan, job_times
from trainfit.jobs.job_times import JobLoad, load_of, with_job_time
from trainfit.planning import planner
from trainfit.runs import timeline

HERE = as_if(find("h200"))
FOLDS = 5
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
LOAD = JobLoad(evaluated=200_000, judged=300_000, baselines=True)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))


def question(*words: str) -> Any:
    composed = compose("nli", ["model.name=bert-base", "training.num_epochs=2", *words])
    lengths = job_plan.assumed_lengths("nli", 512)[:1280].tolist()
    return job_plan.question(composed, lengths, folds=[lengths] * (FOLDS - 1))


def planned(asked: Any) -> Plan:
    made = planner.plan(asked, HERE, here=True)
    return with_job_time(made, asked, HERE, LOAD)


def ended(
    folder: Path,
    plan: Plan,
    seconds: dict[str, float],
    share: float = 1.0,
    here: tuple[int | None, ...] = (None,),
) -> Path:
    """Write a run's folder whose stages took so many seconds, with a share of its steps taken.

    `here` are the folds that this process trained; None: all.
    """
    folder.mkdir(parents=True)
    plan.save(folder / "plan.json")
    HERE.save(folder / "hardware.json")
    rows = [
        {"stage": stage, "fold": fold, "begin": 0.0, "seconds": n / len(here)}
        for stage, n in seconds.items()
        for fold in (here if stage != "start" else (None,))
    ]
    (folder / timeline.FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = 2 * -(-1280 // plan.effective_batch_size)
    for fold in range(FOLDS):
        (folder / f"fold-{fold + 1}").mkdir()
        result = folder / f"fold-{fold + 1}" / "result.json"
        result.write_text(json.dumps({"steps": round(share * steps), "status": "finished"}))
    return folder


def test_all_folds_evaluations_and_files_are_in_the_time_of_a_job() -> None:
    asked = question()
    plan = planned(asked)
    assert plan.time is not None
    stages = plan.time.stages
    assert plan.time.job_seconds == pytest.approx(sum(stages.values()))
    assert plan.time.total_seconds is not None
    assert stages["steps"] == pytest.approx(FOLDS * plan.time.total_seconds)
    assert set(stages) <= set(timeline.STAGES)
    assert {"start", "build", "capture", "evaluation", "export"} <= set(stages)
    assert "baselines" not in stages  # a GPU trains meanwhile
    alone = with_job_time(planner.plan(asked, HERE, here=True), asked, HERE, JobLoad())
    assert alone.time is not None
    assert "evaluation" not in alone.time.stages


def test_the_second_run_predicts_what_the_first_one_took(tmp_path: Path) -> None:
    first = planned(question())
    assert first.time is not None
    took = {stage: 1.7 * seconds for stage, seconds in first.time.stages.items()}
    folder = ended(tmp_path / "run", first, took)
    for _ in range(2):  # once more when the page is written
        job_times.learn(folder)
    found = json.loads((folder / "times.json").read_text())
    assert found["predicted_seconds"] == pytest.approx(first.time.job_seconds)
    assert found["measured_seconds"] == pytest.approx(sum(took.values()))
    second = planned(question())
    assert second.time is not None
    later = [stage for stage in took if stage not in ("start", "data", "plan")]
    assert [second.time.stages[stage] for stage in later] == pytest.approx(
        [took[stage] for stage in later]
    )
    assert second.time.step_seconds == pytest.approx(1.7 * first.time.step_seconds)
    assert second.time.by_rule == first.time.by_rule
    # Another model has steps of its own, and the machine's stages in common.
    other = planned(question("model.name=deberta-v3-base"))
    assert other.time is not None
    assert other.time.stages["steps"] == pytest.approx(other.time.by_rule["steps"])
    assert other.time.stages["export"] == pytest.approx(1.7 * other.time.by_rule["export"])


def test_a_training_that_stopped_early_teaches_the_time_of_a_step(tmp_path: Path) -> None:
    plan = planned(question())
    assert plan.time is not None
    half = plan.time.stages | {"steps": plan.time.stages["steps"] / 2}
    job_times.learn(ended(tmp_path / "run", plan, half, share=0.5))
    again = planned(question())
    assert again.time is not None
    assert again.time.step_seconds == pytest.approx(plan.time.step_seconds)


def test_accidents_and_resumed_runs_teach_nothing(tmp_path: Path) -> None:
    plan = planned(question())
    assert plan.time is not None
    slow = plan.time.stages | {"export": 1e4}
    job_times.learn(ended(tmp_path / "slow", plan, slow))
    twice = ended(tmp_path / "twice", plan, plan.time.stages | {"build": 99.0})
    with (twice / timeline.FILE).open("a") as file:
        file.write(json.dumps({"stage": "start", "fold": None, "begin": 0, "seconds": 1}) + "\n")
    job_times.learn(twice)
    again = planned(question())
    assert again.time is not None
    assert again.time.stages == pytest.approx(plan.time.stages)


def test_where_no_rule_tells_a_step_the_first_run_does(tmp_path: Path) -> None:
    asked = question()
    made = replace(planner.plan(asked, HERE, here=True), time=None)
    first = with_job_time(made, asked, HERE, LOAD)
    assert first.time is not None
    assert first.time.job_seconds is None
    assert first.time.step_seconds is None
    steps = FOLDS * 2 * -(-1280 // first.effective_batch_size)
    took = dict.fromkeys(first.time.by_rule, 1.0) | {"steps": steps * 0.25}
    job_times.learn(ended(tmp_path / "run", first, took))
    second = with_job_time(made, asked, HERE, LOAD)
    assert second.time is not None
    assert second.time.step_seconds == pytest.approx(0.25)
    assert second.time.stages["evaluation"] == pytest.approx(1.0)
    assert second.time.samples_per_second == pytest.approx(second.effective_batch_size / 0.25)


def test_evaluations_are_those_of_the_configuration() -> None:
    asked = question("training.eval_steps=10", "training.eval_iters=2")
    config = compose("nli", ["training.eval_steps=10", "training.eval_iters=2"]).config
    load = load_of(config, asked, 1e9, 5.0)
    steps = 2 * -(-1280 // asked.workload.effective_batch_size)
    assert load.evaluations == pytest.approx(steps / 10)
    assert load.evaluated < 1e6
    assert load.judged == 5


@pytest.mark.parametrize("tracked", [False, True])
def test_folds_beside_on_idle_cores_are_left_out(tmp_path: Path, tracked: bool) -> None:
    asked = question("device.num_threads=1")
    cores = replace(HERE, cpu=replace(HERE.cpu, cores=2))
    made = replace(
        planner.plan(asked, cores, here=True),
        time=None,
        device="cpu",
        runtime=RuntimeSettings(num_threads=1),
    )
    load = replace(LOAD, tracked=tracked)
    first = with_job_time(made, asked, cores, load)
    assert first.time is not None
    steps = 2 * -(-1280 // made.effective_batch_size)  # of a fold
    # Two of five folds were trained here: 20 s each in steps, and 10 s in evaluations.
    took = dict.fromkeys(first.time.by_rule, 1.0) | {"steps": 2 * 20.0, "evaluation": 2 * 10.0}
    job_times.learn(ended(tmp_path / "run", first, took, here=(1, 2)))
    second = with_job_time(made, asked, cores, load)
    assert second.time is not None
    assert second.time.step_seconds == pytest.approx(20.0 / steps)
    folds = 5 if tracked else 2  # a tracker sees one process
    assert second.time.stages["steps"] == pytest.approx(folds * 20.0)
    assert second.time.stages["evaluation"] == pytest.approx(folds * 10.0)
    assert second.time.stages["export"] == pytest.approx(1.0)


def recorded_jobs() -> list[Any]:
    """Cross-validated jobs on an H200 whose caches were empty, of the last day that each ran."""
    files = sorted(RESULTS.glob("*-time-to-result-h200.json"))
    records = [record for file in files for record in json.loads(file.read_text())["records"]]
    days = {record["job"]: record["date"] for record in records}
    return [
        pytest.param(record, run, id=f"{record['id']} {run['round']}")
        for record in records
        for run in record["runs"]
        if run["who"] == "trainfit" and run["cache"] == "cold"
        if record["trainfit_words"][1] == "nli" and record["date"] == days[record["job"]]
    ]


@pytest.mark.parametrize(("record", "run"), recorded_jobs())
def test_recorded_jobs_took_what_the_rules_say(
    record: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [w for w in record["trainfit_words"][2:] if not w.startswith(("runs_dir", "data.data"))]
    composed = compose("nli", [w.replace("models/", "") for w in words])
    told = run["plan_time"]
    steps = round(told["epoch_seconds"] / told["step_seconds"])
    trained = steps * composed.config.training.effective_batch_size
    lengths = np.resize(job_plan.assumed_lengths("nli", 512), trained)
    asked = job_plan.question(composed, lengths.tolist(), folds=[lengths.tolist()] * (FOLDS - 1))
    held_out = int(lengths.sum()) // (FOLDS - 1)
    here = replace(HERE, cpu=replace(HERE.cpu, cores=record["cores"]))
    monkeypatch.setattr(timeline, "elapsed", lambda: told["by_rule"]["start"])
    plan = planner.plan(asked, here, here=True)
    made = with_job_time(plan, asked, here, JobLoad(evaluated=held_out, judged=held_out))
    assert made.time is not None
    assert made.time.job_seconds == pytest.approx(run["seconds"], rel=0.1)
    assert made.time.stages["compile"] == pytest.approx(run["stages"]["compile"], rel=0.41)


def wall_seconds(deal: list[int], cores: int, seconds: float, start: float) -> float:
    """Let the cores take turns at the processes, a tenth of a second at a time."""
    waiting = deque(round(10 * (seconds * n + start * (at > 0))) for at, n in enumerate(deal))
    turns = 0
    while waiting:
        turns += 1
        running = [waiting.popleft() for _ in range(min(cores, len(waiting)))]
        waiting += [left - 1 for left in running if left > 1]
    return turns / 10


@pytest.mark.parametrize(("folds", "cores"), [(3, 2), (5, 2), (7, 2), (10, 2), (5, 4), (10, 4)])
def test_odd_folds_leave_no_core_without_work(folds: int, cores: int) -> None:
    long, start = 60.0, 3.0
    deal = job_times.deal_folds(folds, cores, 2 * cores, long, start)
    assert sum(deal) == folds
    assert wall_seconds(deal, cores, long, start) < long * folds / cores + 3 * start
    alone = job_times.deal_folds(folds, cores, cores, long, start)  # no room for more processes
    assert (len(alone), max(alone)) == (cores, -(-folds // cores))
    assert job_times.deal_folds(folds, cores, 2 * cores, 0.5, start) == [folds]
