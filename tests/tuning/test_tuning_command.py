"""`trainfit tune` as a person or a program meets it, and what `train` makes of its result."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from gpt_tiny import gpt_words
from job_tiny import SECRET, be_quick, nli_words
from trainfit.cli.main import run
from trainfit.core.plan_records import Plan
from trainfit.jobs import job_plan
from trainfit.tuning import tuner
from trainfit.tuning.trial import run_trial
from trainfit.tuning.tuned_cache import Interval, Trial, TrialCandidate, TuneResult
from trainfit.tuning.tuner import RATE

EAGER = "optimization.compile=false"


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    be_quick(monkeypatch)
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Here:
    """Stands in for the children: trials are told, or run in this process."""

    speeds: ClassVar[dict[str, float]] = {}
    asked: ClassVar[list[TrialCandidate]] = []
    real = False

    def __init__(self, modules: Sequence[str]) -> None:
        assert modules[0].startswith("trainfit.jobs.")

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, modes: Sequence[str]) -> None:
        assert modes[0] == "eager"

    def run(self, candidate: TrialCandidate, *, limit: float, **how: Any) -> Trial:
        Here.asked.append(candidate)
        if Here.real:
            return run_trial(candidate, **how | {"steps": 3, "warm_up": 1})
        speed = 100.0
        for name in candidate.settings:
            speed *= Here.speeds.get(name, 1.0)
        if speed < 0:
            raise KeyboardInterrupt
        samples = candidate.plan.effective_batch_size
        rate = Interval(value=speed, low=speed * 0.999, high=speed * 1.001)
        return Trial(
            settings=candidate.settings,
            status="ok",
            samples_per_second=rate,
            step_seconds=(samples / speed,) * 5,
            step_samples=(samples,) * 5,
            seconds=1.0,
        )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> type[Here]:
    monkeypatch.setattr(tuner, "Children", Here)
    monkeypatch.setattr(Here, "speeds", {"optimizer": 1.5})
    monkeypatch.setattr(Here, "asked", [])
    return Here


def tune(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["tune", *words, "--json"]) == 0
    captured = capsys.readouterr()
    assert SECRET not in captured.out + captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def trained(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Plan, str]:
    """The plan of a run, and all that it said."""
    assert run(["train", *words, "--json"]) == 0
    captured = capsys.readouterr()
    folder = Path(json.loads(captured.out)["run"])
    return Plan.load(folder / "plan.json"), captured.err + (folder / "train.log").read_text()


def test_json_has_the_best_the_trials_and_the_seconds(
    tmp_path: Path, capsys: Any, here: type[Here]
) -> None:
    found = tune(capsys, "nli", *nli_words(tmp_path), "--output", str(tmp_path / "out.json"))
    assert Plan.from_json(json.dumps(found["best"])).optimizer == "adamw"
    assert found["changes"] == {"optimizer": "adamw"}
    assert found["gain"] == pytest.approx(1.5)
    assert 0 < found["seconds"] < 60
    first = found["trials"][0]
    assert (first["settings"], first["status"]) == ({}, "ok")
    assert set(first["samples_per_second"]) == {"value", "low", "high"}
    assert "peak_memory_gib" in first
    assert json.loads((tmp_path / "out.json").read_text()) == found
    result = TuneResult.from_json(
        json.dumps({name: value for name, value in found.items() if name != "gain"})
    )
    assert result.gain == found["gain"]


def test_no_text_and_no_token_reaches_a_trial(
    tmp_path: Path, capsys: Any, here: type[Here]
) -> None:
    tune(capsys, "nli", *nli_words(tmp_path))
    assert here.asked
    for candidate in here.asked:
        assert SECRET not in candidate.to_json()
        assert set(candidate.task.arguments) == {"task", "config", "lengths", "device"}
    for file in (tmp_path / "cache").rglob("*.json"):
        assert SECRET not in file.read_text()


def test_the_page_names_the_best_and_what_it_gives(
    tmp_path: Path, capsys: Any, here: type[Here]
) -> None:
    assert run(["tune", "nli", *nli_words(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert re.search(r"^optimizer=adamw: 150\.0 \[[\d.]+–[\d.]+\] samples/s", captured.err, re.M)
    assert "Best: optimizer=adamw" in captured.out
    assert "1.50 times the plan's own" in captured.out


def test_train_uses_what_was_tuned_and_says_so(
    tmp_path: Path, capsys: Any, here: type[Here]
) -> None:
    words = ["nli", *nli_words(tmp_path, "training.max_steps=2")]
    plain, said = trained(capsys, *words)
    assert plain.optimizer == "adamw_fused"
    assert "as tuned" not in said
    tune(capsys, *words)
    plan, said = trained(capsys, *words, "seed=7")
    assert (plan.optimizer, plan.runtime.seed) == ("adamw", 7)
    assert [m.value for m in plan.measurements if m.name == RATE] == [150.0]
    assert "Settings as tuned on this machine: 150.0 samples/s" in said
    assert "Using AdamW optimizer" in said
    untuned, said = trained(capsys, *words, "tune=off")
    assert replace(untuned, time=None) == replace(plain, time=None)
    pinned, _ = trained(capsys, *words, "optimization.optimizer=adamw_fused")
    assert pinned.optimizer == "adamw_fused"  # another job: what is set is not tuned away


def test_force_tunes_first(tmp_path: Path, capsys: Any, here: type[Here]) -> None:
    plan, said = trained(capsys, "nli", *nli_words(tmp_path, "training.max_steps=2"), "tune=force")
    assert here.asked
    assert plan.optimizer == "adamw"
    assert "as tuned on this machine" in said


@pytest.mark.parametrize("how", ["damaged", "stale"])
def test_a_cache_that_cannot_be_used_costs_one_line(
    how: str, tmp_path: Path, capsys: Any, here: type[Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["nli", *nli_words(tmp_path, "training.max_steps=2")]
    tune(capsys, *words)
    [path] = (tmp_path / "cache" / "tuned").iterdir()
    if how == "damaged":
        path.write_text(path.read_text()[:200])
    else:
        monkeypatch.setattr("trainfit.core.caches.sources", lambda: "other")
    plan, said = trained(capsys, *words)
    assert plan.optimizer == "adamw_fused"
    assert len(re.findall(rf"trainfit: note: .*{how} and was (?:ignored|thrown away)", said)) == 1


def test_a_short_run_is_not_compiled_for_nothing(here: type[Here]) -> None:
    import tuning_toy as toy

    from trainfit.core.plan_records import TimeEstimate

    def compiled(rate: float) -> Plan:
        told = dict.fromkeys(TimeEstimate.__dataclass_fields__)
        return toy.plan(compile=True, time=TimeEstimate(**told | {"samples_per_second": rate}))

    # 96 sequences in all: at 10 a second they are over before the compiler is.
    assert job_plan.adopt(toy.plan(), compiled(10.0), 7.0) == toy.plan()  # no budget of eager ones
    assert job_plan.adopt(toy.plan(), compiled(2.0), 7.0).compile
    assert job_plan.adopt(toy.plan(), compiled(2.0), 29.0) == toy.plan()  # on two cores
    assert job_plan.adopt(toy.plan(compile=True), compiled(10.0), 7.0).compile


def test_an_interrupt_shows_what_was_measured(
    tmp_path: Path, capsys: Any, here: type[Here]
) -> None:
    here.speeds = {"micro_batch_tokens": 1.2, "optimizer": -1.0}
    assert run(["tune", "nli", *nli_words(tmp_path), "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["ended"] == "interrupted"
    assert found["changes"].keys() == {"micro_batch_tokens"}
    assert len(list((tmp_path / "cache" / "tuned").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nli", "--minutes", "0"], "'--minutes': 0.0 is not in the range"),
        (["nli", "--minutes", "x"], "--minutes"),
        (["nlj"], "unknown job 'nlj'"),
        (["nli", "--ladder", "--batch-size-only"], "give one of them"),
        (["nli", "--batch-size-only", "--minutes", "1"], "leave out --minutes"),
        (["nli", "tune=sometimes"], "tune"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: Any) -> None:
    assert run(["tune", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_frozen_encoder_has_nothing_to_tune(tmp_path: Path, capsys: Any) -> None:
    assert run(["tune", "nli", *nli_words(tmp_path, "model.freeze_encoder=true")]) == 2
    assert "a frozen encoder runs once" in capsys.readouterr().err


@pytest.mark.parametrize(
    "task", ["nli", *(pytest.param(task, marks=pytest.mark.soak) for task in ("textclass", "gpt"))]
)
def test_the_trials_of_every_job_run(
    task: str, tmp_path: Path, capsys: Any, here: type[Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own loop, in this process, on each job's made-up data."""
    monkeypatch.setattr(here, "real", True)
    if task == "gpt":
        words = gpt_words(tmp_path)
    elif task == "nli":
        words = nli_words(tmp_path)
    else:
        from job_tiny import words as common
        from job_tiny import write_texts

        train = write_texts(tmp_path / "texts.csv", 80)
        words = common(tmp_path, f"data.train={train}", "data.max_length=32")
    found = tune(capsys, task, *words, EAGER, "--minutes", "0.2")
    statuses = {trial["status"] for trial in found["trials"]}
    assert statuses <= {"ok", "skipped"}, found["trials"]
    ran = [trial for trial in found["trials"] if trial["status"] == "ok"]
    assert len(ran) >= 2
    assert all(trial["samples_per_second"]["value"] > 0 for trial in ran)


@pytest.mark.soak
def test_ctrl_c_at_the_terminal_keeps_what_children_measured(tmp_path: Path) -> None:
    """For real: children in processes of their own, a signal, and no process left."""
    words = nli_words(tmp_path, EAGER, "training.batch_size=8")
    output = tmp_path / "out.json"
    command = [sys.executable, "-m", "trainfit", "tune", "nli", *words, "--output", str(output)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("as planned"):
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in out
    found = json.loads(output.read_text())
    assert found["ended"] == "interrupted"
    assert found["trials"][0]["status"] == "ok"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _children_of(process.pid):
        time.sleep(0.1)
    assert not _children_of(process.pid)


def _children_of(parent: int) -> list[int]:
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline", "environ", "ppid"]):
        if process.info["ppid"] == parent:
            found.append(process.pid)
    return found
