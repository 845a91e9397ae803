"""A study: its password is in no file, no process's words and no page; its name stays a name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from job_tiny import be_quick, nli_words
from trainfit.cli.main import run
from trainfit.core.errors import BadInput
from trainfit.core.files import check_name, check_path
from trainfit.hpo import workers
from trainfit.hpo.storage import open_database
from trainfit.hpo.studies import STORAGE, find_study, read_setting
from trainfit.runs import run_folder

URL = "postgresql://zeno:hiddenword@db.example/study"


def holders(folder: Path, *planted: str) -> list[str]:
    """Files under a folder that hold one of these words."""
    words = [word.encode() for word in planted]
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and any(word in path.read_bytes() for word in words)
    ]


def test_workers_get_the_database_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    show = f"import os, sys; print(sys.argv[1:]); sys.exit(os.environ[{STORAGE!r}] != {URL!r})"
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-c", show))
    setting = read_setting(
        "nli", [f"runs_dir={tmp_path}", f"hpo.storage={URL}", "hpo.trials=3", "hpo.study=one"]
    )
    taken = workers.seats(1, 0, {})
    assert workers.run_fleet(setting, taken, lambda: None) == "done"
    said = (tmp_path / "hpo-one" / "workers" / "worker-1.log").read_text()
    assert "'hpo', 'nli'" in said
    assert "hpo.trials=3" in said
    assert "storage" not in said
    assert not holders(tmp_path, "hiddenword")


def test_the_variable_stands_for_the_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(STORAGE, URL)
    assert read_setting("nli", ["hpo.trials=3"]).storage == URL
    assert read_setting("nli", ["hpo.storage=sqlite:///x.db"]).storage == "sqlite:///x.db"


@pytest.mark.parametrize(
    "name",
    [
        "a/../../x",
        "../x",
        "/tmp/x",
        "..",
        ".",
        "",
        ".hidden",
        "a\\b",
        "a\0b",
        "a\nb",
        "x" * 101,
        "é" * 60,
        "con:1",
        "-rf",
        "a ",
    ],
)
def test_a_name_stays_in_its_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="cannot name a folder") as caught:
        check_name(name, "hpo.study")
    assert len(str(caught.value).splitlines()) == 1
    assert (
        run(["hpo", "nli", f"runs_dir={tmp_path / 'runs'}", f"hpo.study={json.dumps(name)}"]) == 2
    )
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["mine", "redsm5-2.1", "Versuch 3", "größe=7", "a", "x" * 100])
def test_plain_names_are_names(name: str):
    assert check_name(name, "hpo.study") == name


def test_a_study_that_another_program_named_is_not_followed_out_of_the_folder(tmp_path: Path):
    import optuna

    url = f"sqlite:///{tmp_path / 'hpo.db'}"
    study = optuna.create_study(storage=open_database(url).storage, study_name="a/../../x")
    about = {"task": "nli", "words": [f"runs_dir={tmp_path / 'runs'}"], "metric": "f1"}
    about |= {"identity": {}, "space": {}, "notes": [], "folds": 2, "steps": 3}
    study.set_user_attr("trainfit", about)
    with pytest.raises(BadInput, match="cannot name a folder"):
        find_study("a/../../x", url)


@pytest.mark.parametrize("path", ["a\0b", "runs/" + "x" * 300, ""])
def test_runs_dir_is_a_path(path: str):
    with pytest.raises(BadInput, match="runs_dir"):
        run_folder.create(Path(path) if path else path, "nli", config={}, plan=None)  # type: ignore[arg-type]
    assert check_path("runs/a b/ü", "runs_dir") == Path("runs/a b/ü")


def test_a_study_and_its_run_leave_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    be_quick(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ACME_TOKEN", "plantedvalue")
    words = nli_words(tmp_path, "training.max_steps=2")
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "trainfit",
            "train",
            *words,
            f"hpo.storage={URL}",
            "--password",
            "hunter22",
            "plantedvalue",
        ],
    )
    assert run(["train", "nli", *words]) == 0
    [folder] = (tmp_path / "runs").glob("nli-*")
    assert run(["report", str(folder)]) == 0
    assert run(["report", str(folder), "--format", "markdown"]) == 0
    out = capsys.readouterr()
    planted = ("hiddenword", "hunter22", "plantedvalue")
    assert not holders(tmp_path, *planted)
    assert not any(word in out.out + out.err for word in planted)
    command = json.loads((folder / "environment.json").read_text())["command"]
    assert command[-4:] == [
        "hpo.storage=postgresql://***@db.example/study",
        "--password",
        "***",
        "***",
    ]
