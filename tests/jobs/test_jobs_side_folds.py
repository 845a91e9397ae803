"""Folds in processes beside: the same files as one after another, also when such a process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from job_tiny import be_quick, detect_once, nli_words
from trainfit.jobs import job_plan, nli, side_folds
from trainfit.jobs.configuration import configure
from trainfit.jobs.run import Show
from trainfit.jobs.scores import JobResult
from trainfit.planning import cpu_choice
from trainfit.planning.cpu_choice import time_steps
from trainfit.planning.estimator import estimate
from trainfit.runtime import environment


def trained(tmp_path: Path, name: str, **options: Any) -> JobResult:
    words = ("cv.folds=3", "device.num_threads=1", f"runs_dir={tmp_path / name}")
    composed = configure("nli", nli_words(tmp_path, *words))
    return nli.train(composed, **options)


def several_cores(patch: pytest.MonkeyPatch, count: int) -> None:
    be_quick(patch)
    profile = detect_once()
    changed = replace(profile, cpu=replace(profile.cpu, cores=count))
    patch.setattr(job_plan, "detect", lambda: changed)


def files(result: JobResult) -> dict[str, bytes]:
    folder = Path(result.run)
    paths = [*folder.rglob("predictions.csv"), *folder.rglob("*.safetensors")]
    found = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    assert len([name for name in found if name.endswith("head.safetensors")]) == 3
    return found


def rows(result: JobResult) -> list[int]:
    lines = (Path(result.run) / "metrics.jsonl").read_text().splitlines()
    read = [json.loads(line) for line in lines]
    return [row["step"] for row in read if row.get("kind") == "fold"]


@pytest.mark.parametrize("dies", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_folds_beside_have_the_bits_of_folds_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    several_cores(monkeypatch, 1)
    expected = trained(tmp_path, "in_turn")
    several_cores(monkeypatch, 2)
    monkeypatch.setattr(side_folds, "START", 0.0)
    started: list[subprocess.Popen[bytes]] = []
    really = side_folds._start

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        started.append(really(*arguments))
        if dies:
            os.kill(started[-1].pid, signal.SIGKILL)
        return started[-1]

    monkeypatch.setattr(side_folds, "_start", start)
    said: list[str] = []
    found = trained(tmp_path, "beside", show=Show(note=said.append))
    ended = -signal.SIGKILL if dies else 0
    assert [process.poll() for process in started] == [ended, ended]  # the odd fold has its own
    assert said == ["on idle cores meanwhile: fold 2 and fold 3"]
    assert files(found) == files(expected)
    assert rows(found) == rows(expected) == [1, 2, 3]


@pytest.mark.soak
def test_the_process_that_timed_steps_trains_folds_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several_cores(monkeypatch, 1)
    expected = trained(tmp_path, "in_turn")
    several_cores(monkeypatch, 2)
    monkeypatch.setattr(side_folds, "START", 0.0)
    monkeypatch.setattr(estimate._child(0), "_process", None)  # it serves other tests
    really, started = side_folds._start, list[subprocess.Popen[Any]]()
    composed = configure("nli", nli_words(tmp_path, "cv.folds=3"))
    asked = cpu_choice._request(job_plan.question(composed, [8] * 32), 1, 1, fewer=False)
    times = time_steps(asked.to_json(indent=None))
    assert {time.precision for time in times.times} == {"fp32", "bf16"}
    [timed] = cpu_choice._SERVING

    def start(*arguments: Any) -> subprocess.Popen[Any]:
        started.append(really(*arguments))
        return started[-1]

    monkeypatch.setattr(side_folds, "_start", start)
    found = trained(tmp_path, "beside")
    assert started[0] is timed
    assert [process.poll() for process in started] == [0, 0]
    assert files(found) == files(expected)


@pytest.mark.soak
def test_folds_on_other_gpus_start_at_once_and_have_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several_cores(monkeypatch, 1)
    expected = trained(tmp_path, "in_turn")
    for name in ("CUDA_VISIBLE_DEVICES", "TRAINFIT_FOLD_GPUS"):
        monkeypatch.setenv(name, "")
    environment.give_folds(["4", "6", "7"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
    places: list[Any] = []
    really = side_folds._start

    def start(run: Any, folds: Any, variables: Any) -> subprocess.Popen[bytes]:
        places.append((list(folds), variables["CUDA_VISIBLE_DEVICES"]))
        return really(run, folds, variables)

    monkeypatch.setattr(side_folds, "_start", start)
    said: list[str] = []
    found = trained(tmp_path, "beside", show=Show(note=said.append))
    assert places == [([1], "6"), ([2], "7")]
    assert said == ["on other GPUs meanwhile: fold 2 and fold 3"]
    assert files(found) == files(expected)


@pytest.mark.parametrize(
    ("cores", "least"), [(2, 15.0), pytest.param(1, 0.0, marks=pytest.mark.soak)]
)
def test_cores_in_use_and_short_folds_start_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, least: float
) -> None:
    monkeypatch.setattr(side_folds, "_start", lambda *_: pytest.fail("a process was started"))
    several_cores(monkeypatch, cores)
    monkeypatch.setattr(side_folds, "START", least)
    assert trained(tmp_path, "alone").status == "finished"


@pytest.mark.parametrize(
    ("seconds", "room", "given"),
    [
        (30.0, (2, 3), [[2, 3], [4]]),  # 2.5 rounds
        (30.0, (2, 2), [[3, 4]]),  # the memory has no room for a third
        (2.0, (2, 3), []),  # 10 s alone, 7.5 with the start of a process: not worth it
        (30.0, (1, 1), []),
    ],
)
def test_a_process_starts_for_what_the_whole_job_saves(
    monkeypatch: pytest.MonkeyPatch, seconds: float, room: tuple[int, int], given: list[Any]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(side_folds, "other_gpus", list)
    monkeypatch.setattr(side_folds, "_room", lambda _run: room)
    monkeypatch.setattr(
        side_folds, "_start", lambda _run, folds, _variables: started.append([*folds])
    )
    beside = side_folds.SideFolds(SimpleNamespace(show=Show()))  # type: ignore[arg-type]
    beside.consider(seconds, range(5))
    assert started == given


def test_the_first_steps_tell_the_seconds_of_a_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], list[float]()
    monkeypatch.setattr(side_folds.time, "monotonic", lambda: now[0])
    clock = side_folds._FoldClock(told.append)
    clock.on_start(0, 500)
    for step in range(1, 100):
        now[0] += 3.0 if step <= 10 else 0.1  # the first steps are slow
        clock.on_step(step)
    assert told == [pytest.approx(50.0)]
