"""`trainfit hpo` as a person types it: from the first trial to the final model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy.exc import DatabaseError

from job_tiny import be_quick, nli_words
from trainfit.cli.main import run
from trainfit.cli.pages import final_score, short, studies_page
from trainfit.hpo.objective import GpuShare
from trainfit.hpo.studies import find_study
from trainfit.hpo.trial_queue import FINISHED
from trainfit.hpo.workers import check_gpu_room, seats

HERE = Path(__file__).parent
QUICKLY = HERE / "hpo_quickly.py"


def words_of(tmp: Path, *more: str) -> list[str]:
    base = [word for word in nli_words(tmp) if not word.startswith("training.learning_rate")]
    return [
        "nli",
        *base,
        "training.learning_rate=tag(log,interval(1e-4,1e-2))",
        "training.max_steps=3",
        "hpo.heartbeat=1",
        "hpo.grace=5",
        "hpo.study=mine",
        *more,
    ]


def storage(tmp: Path) -> str:
    return f"sqlite:///{tmp / 'runs' / 'hpo.db'}"


def test_help_is_quick_and_needs_neither_torch_nor_optuna():
    code = (
        "import sys; from trainfit.cli.main import run;"
        "codes = [run(['hpo', *w, '--help']) for w in ([], ['nli'], ['status'], ['best'])];"
        "sys.exit(any(codes) or any(n in sys.modules for n in ('torch', 'optuna', 'sqlalchemy')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    for name in ("nli", "textclass", "gpt", "status", "best", "--workers"):
        assert name in found.stdout


def test_words_of_a_study_are_those_of_a_configuration() -> None:
    params = {"model.feed_forward_dropout": None, "x.flag": True, "x.name": "cosine", "x.n": 8}
    assert short(params) == "feed_forward_dropout null, flag true, name cosine, n 8"
    assert [final_score(name) for name in ("f1", "val_loss")] == ["test f1", "val_loss"]


def test_a_storage_without_studies_says_how_one_begins() -> None:
    assert str(studies_page([])) == "No study yet: trainfit hpo TASK begins one"


def test_a_study_from_the_first_trial_to_the_final_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    be_quick(monkeypatch)
    monkeypatch.chdir(tmp_path)
    words = words_of(
        tmp_path, "hpo.trials=2", "cv.folds=2", "hpo.pruner_startup=1", "hpo.pruner_warmup=0"
    )
    (tmp_path / "mine.yaml").write_text("training:\n  weight_decay: 0.03\n")
    words += ["--config", "mine.yaml"]
    assert run(["hpo", *words, "--json"]) == 0
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert set(found) == {"version", "study", "best", "trials", "seconds", "side_by_side"}
    assert found["side_by_side"] is None  # one trial after another, without a GPU
    assert {"params", "value", "test"} <= set(found["best"])
    assert found["study"] == "mine"
    assert sum(found["trials"].values()) == 2
    assert set(found["trials"]) <= {"complete", "pruned"}
    assert 0 <= found["best"]["test"]["f1"] <= 1
    assert out.err.count("trial ") >= 2

    assert run(["hpo", *words, "--json"]) == 0  # again: nothing is left to do
    again = json.loads(capsys.readouterr().out)
    assert again["best"] == found["best"]
    assert again["trials"] == found["trials"]

    url = ["--storage", storage(tmp_path)]
    assert run(["hpo", "status", "mine", *url, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["best"]["number"] == found["best"]["trial"]
    assert len(status["trials"]) == 2
    assert run(["hpo", "status", "mine", *url]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 trials" in shown
    assert "best f1" in shown
    assert run(["hpo", "status"]) == 0  # runs/hpo.db is where it looks
    assert "mine" in capsys.readouterr().out
    assert run(["hpo", "best", "mine", *url, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    assert best["run"] == found["best"]["run"]
    assert (Path(best["run"]) / "export").is_dir()
    text = Path(best["config"]).read_text()
    assert f"learning_rate: {best['params']['training.learning_rate']}" in text

    assert (tmp_path / "runs" / "hpo-mine" / "report.html").is_file()
    # Any program that reads Optuna's storage, such as its dashboard, reads the study.
    study = optuna.load_study(study_name="mine", storage=storage(tmp_path))
    assert study.best_trial.number == found["best"]["trial"]
    assert study.trials[0].params["training.learning_rate"] == 2e-5
    # What the file sets is not searched, and reaches the run.
    assert not any("training.weight_decay" in trial.params for trial in study.trials)
    assert "weight_decay: 0.03" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nli", "training.learning_rat=interval(1,2)"], "unknown parameter"),
        (["nli", "training.learning_rate=interval(2,1)"], "is empty"),
        (["nli", "hpo.storage=postgresql://a@127.0.0.1:9/b?sslmode=require"], "cannot be reached"),
        (["status", "hpo.storage=sqlite:////proc/none/x.db"], "no database sqlite:////proc/none/"),
        (["status", "x", "hpo.storage=journal:/proc/none/x"], "no database journal:/proc/none/x;"),
        (["status", "hpo.storage=journal:"], "give sqlite:///FILE, journal:FILE or"),
        (["status", "one", "other"], "give one study"),
        (["status", "nothing"], "there is no study in runs/hpo.db"),
        (["status", "nothing", "--storage", "sqlite:///x.db"], "there is no database sqlite:///"),
        (["best", "nothing", "--storage", "sqlite:///x.db"], "there is no database sqlite"),
        (["nlu"], "nlu"),
        (["nli", "--workers", "0"], "workers"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert run(["hpo", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_study_with_another_space_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    be_quick(monkeypatch)
    assert run(["hpo", *words_of(tmp_path, "hpo.trials=1", "cv.folds=2"), "--json"]) == 0
    capsys.readouterr()
    words = words_of(tmp_path, "hpo.trials=1", "cv.folds=2", "model.pooling=mean,max")
    assert run(["hpo", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert "another search space, in model.pooling" in said
    assert len(said.splitlines()) == 1


# ── processes ─────────────────────────────────────────────────────────────────────────────────


def start(*words: str, beside: int = 1, pause: float = 0) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, str(QUICKLY), "hpo", *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "BESIDE": str(beside),
            **({"PAUSE": str(pause)} if pause else {}),
        },
    )


def finished(tmp: Path) -> int:
    if not (tmp / "runs" / "hpo.db").is_file():
        return -1
    try:
        study = optuna.load_study(study_name="mine", storage=storage(tmp))
    except (KeyError, optuna.exceptions.StorageInternalError, DatabaseError):
        # The last one: this process made tables that the command was making.
        return -1
    return sum(trial.state in FINISHED for trial in study.trials)


def until(tmp: Path, count: int, command: subprocess.Popen[str], seconds: float = 300) -> None:
    """Wait for so many trials; a command that gets nowhere says where it is."""
    end = time.monotonic() + seconds
    while finished(tmp) < count:
        if time.monotonic() > end:
            command.send_signal(signal.SIGABRT)
        if command.poll() is not None:
            raise AssertionError(f"{finished(tmp)} trials: {command.communicate()[1][-3000:]}")
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_was_killed_goes_on_at_once(by: signal.Signals, tmp_path: Path):
    words = words_of(tmp_path, "hpo.trials=4", "cv.folds=2", "hpo.grace=600", "hpo.pruner=none")
    first = start(*words, pause=0.3)
    until(tmp_path, 1, first)
    first.send_signal(by)
    first.communicate(timeout=60)
    assert first.returncode == (-9 if by == signal.SIGKILL else 130)
    assert finished(tmp_path) < 4
    again = start(*words)  # no heartbeat is waited for: the process is known to be dead
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    found = json.loads(out)
    assert found["trials"]["complete"] == 4
    study = find_study("mine", storage(tmp_path)).study
    ended = [trial for trial in study.trials if trial.state in FINISHED]
    assert len(ended) == 4
    assert len({json.dumps(trial.params, sort_keys=True) for trial in ended}) == 4
    assert not [t for t in study.trials if t.state in (TrialState.RUNNING, TrialState.WAITING)]


@pytest.mark.soak
def test_trials_side_by_side_have_the_values_of_one_after_another(tmp_path: Path):
    words = words_of(tmp_path, "hpo.trials=7", "cv.folds=2", "hpo.sampler_startup=99")
    words = [word for word in words if "max_steps" not in word]
    words += ["hpo.pruner=none", "training.num_epochs=8", "training.logging_steps=1"]
    found = {}
    for name, more in (("one", ()), ("two", ("--workers", "auto"))):
        command = start(*words, f"runs_dir={tmp_path / name}", *more, beside=2 if more else 1)
        out, err = command.communicate(timeout=400)
        assert command.returncode == 0, err
        found[name] = json.loads(out)
        study = find_study("mine", f"sqlite:///{tmp_path / name / 'hpo.db'}").study
        values = {json.dumps(t.params): t.value for t in study.trials if t.state in FINISHED}
        found[f"{name} values"] = values
        workers = {trial.user_attrs["worker"]["pid"] for trial in study.trials}
        assert len(workers) == (2 if more else 1)
    assert found["one values"] == found["two values"]  # to the bit, whoever ran which
    assert found["one"]["side_by_side"] is None
    assert found["two"]["side_by_side"]["planned"] == 2
    assert "side by side" in err


@pytest.mark.soak
def test_several_workers_share_a_study_and_one_is_killed(tmp_path: Path):
    words = words_of(tmp_path, "hpo.trials=8", "cv.folds=2", "hpo.pruner=none")
    command = start(*words, "--workers", "2", pause=0.2)
    try:
        until(tmp_path, 2, command)
        import psutil

        workers = [
            child
            for child in psutil.Process(command.pid).children()
            if "--worker" in child.cmdline()
        ]
        assert len(workers) == 2
        workers[0].kill()
        out, err = command.communicate(timeout=300)
    finally:
        command.kill()
    assert command.returncode == 0, err
    found = json.loads(out)
    assert found["trials"]["complete"] == 8
    assert found["best"]["test"]
    logs = sorted((tmp_path / "runs" / "hpo-mine" / "workers").iterdir())
    assert [path.name for path in logs] == ["worker-1.log", "worker-2.log"]


def test_workers_take_gpus_in_turn_and_share_them_by_their_memory():
    two = seats(3, 2, {"CUDA_VISIBLE_DEVICES": "4,7"})
    assert [seat.variables["CUDA_VISIBLE_DEVICES"] for seat in two] == ["4", "7", "4"]
    assert [seat.share for seat in two] == [0.5, 1.0, 0.5]
    assert [s.variables["CUDA_VISIBLE_DEVICES"] for s in seats(2, 2, {})] == ["0", "1"]
    assert [s.share for s in seats(4, 1, {})] == [0.25] * 4
    others = [s.others for s in seats(3, 2, {}, [5.0, 6.0])]
    assert others == [5.0, None, 5.0]  # the second is alone on its GPU, and looks for itself
    assert all("OMP_NUM_THREADS" in s.variables for s in seats(2, 0, {}))
    assert seats(1, 0, {"OMP_NUM_THREADS": "3"})[0].variables == {}


def test_more_workers_than_a_gpu_has_room_for_are_refused(tmp_path: Path):
    from trainfit.core.errors import BadInput

    asked: list[float] = []

    class Job:
        room = GpuShare()

        def plan(self, _composed: Any) -> Any:
            asked.append(self.room.share)
            return _plan(self.room.share >= 0.5)

    study: Any = type("Study", (), {"setting": type("StudySettings", (), {"composed": None})})
    job: Any = Job()
    check_gpu_room(study, lambda: job, seats(2, 1, {}))
    with pytest.raises(BadInput, match="--workers 3: a worker would have 33% of its GPU"):
        check_gpu_room(study, lambda: job, seats(3, 1, {}))
    assert asked == [0.5, pytest.approx(1 / 3)]
    check_gpu_room(study, lambda: job, seats(4, 4, {}))
    assert len(asked) == 2  # a GPU each: nothing to ask


def _plan(fits: bool) -> Any:
    return type("P", (), {"fits": fits, "memory": None})()
