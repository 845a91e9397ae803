"""Models on the hub: the export arrives byte by byte, and nothing else, by no token in sight."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs_tiny import TINY, tiny

from hub_server import closed, environment
from trainfit.cli.main import run as run_command
from trainfit.data import learn_tokenizer
from trainfit.jobs import exports
from upload_server import TOKEN, Taken, upload_hub

SECRET = "a sentence of the data"
"""Stands in files that are not pushed."""


class Hub(NamedTuple):
    url: str
    taken: Taken
    home: Path

    def run(self, *words: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
        """Run trainfit in a process that knows the hub, with the token in its usual file."""
        self.home.mkdir(exist_ok=True)
        if token is not None:
            (self.home / "token").write_text(token)
        more = {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN_PATH": str(self.home / "token")}
        return subprocess.run(
            [sys.executable, "-m", "trainfit", *words],
            env=environment(self.url, self.home, **more),
            capture_output=True,
            text=True,
            check=False,
            cwd=self.home,
        )

    def line(self, *words: str, token: str | None = TOKEN, code: int = 2) -> str:
        """The last line of a command that fails; no other is an error."""
        done = self.run(*words, token=token)
        assert done.returncode == code, done.stderr
        lines = [line for line in done.stderr.splitlines() if line.startswith("trainfit: ")]
        assert "Traceback" not in done.stderr
        return lines[-1]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with upload_hub() as (url, taken):
        yield Hub(url, taken, tmp_path / "home")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, with files that hold texts."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    sizes = TINY["bert-base"] | {"vocab_size": 320}
    model = tiny("bert-base", method="lora", overrides=sizes).eval()
    facts = {"classes": ["x", "y", "z"], "max_length": 38, "pad_id": 0, "eval_batch_size": 8}
    tokenizer = learn_tokenizer(["some words to learn from"], vocabulary=320)
    exports.write_classifier(folder / "export", model, tokenizer, facts, card="# A card\n")
    (folder / "run.json").write_text('{"id": "0"}')
    for name in ("predictions.csv", "export/notes.md", "export/.hidden"):
        (folder / name).write_text(SECRET)
    return folder


def checksums(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("notes.md", ".hidden")
    }


def check_no_token(folder: Path, *said: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "token":
            assert TOKEN.encode() not in path.read_bytes(), path
    assert not any(TOKEN in text for text in said)


def test_an_export_arrives_and_nothing_else(finished: Path, hub: Hub):
    done = hub.run("export", str(finished), "--push-to-hub", "me/films", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"hub": f"{hub.url}/me/films"}
    assert hub.taken.files == checksums(finished / "export")
    assert {"README.md", "checksums.json", "adapter/adapter_model.safetensors"} <= set(
        hub.taken.files
    )
    assert len(hub.taken.large) == 3
    [created] = hub.taken.created
    assert created.get("private") is True or created.get("visibility") == "private", created
    check_no_token(finished, done.stdout, done.stderr)
    check_no_token(hub.home)


@pytest.mark.soak
def test_a_push_that_fails_says_how_to_push_again(finished: Path, hub: Hub):
    hub.taken.refusing = True
    line = hub.line("export", str(finished), "--push-to-hub", "me/films", code=1)
    assert f"{hub.url} does not allow it to this token; the run is kept" in line
    assert line.endswith(f"trainfit export {finished} --push-to-hub me/films")
    assert not hub.taken.files


@pytest.mark.parametrize(
    ("name", "token", "says"),
    [
        ("me/films", None, "needs a token, and there is none; run `hf auth login`"),
        ("me/films", "hf_another", "refuses the token; run `hf auth login`"),
        pytest.param(
            *("you/films", TOKEN, "is not among your names on the hub; give me/NAME or ours/NAME"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_train_refuses_before_it_begins(name: str, token: str | None, says: str, hub: Hub):
    line = hub.line("train", "textclass", "--push-to-hub", name, token=token)
    assert says in line
    assert not (hub.home / "runs").exists()
    assert token is None or token not in line


@pytest.mark.soak
def test_other_refusals_before_the_work(finished: Path, hub: Hub):
    hub.taken.role = "read"
    line = hub.line("export", str(finished), "--push-to-hub", "ours/films")
    assert "the token may only read" in line
    unheard = hub._replace(url=closed())
    line = unheard.line("export", str(finished), "--push-to-hub", "me/films")
    assert f"{unheard.url} does not answer" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["textclass", "--push-to-hub", "films"], "'films' is no name of a model; give OWNER/NAME"),
        (["textclass", "--push-to-hub", "a/b/c"], "'a/b/c' is no name of a model"),
        (["textclass", "--push-to-hub", ""], "'' is no name of a model"),
        (["textclass", "--push-to-hub", "me/films"], "with HF_HUB_OFFLINE; leave one of them out"),
        (["gpt", "--push-to-hub", "me/films"], "takes classifiers with a model card, not gpt"),
        (["nli", "cv.folds=3", "--push-to-hub", "me/films"], "takes one model, and cv.folds=3"),
    ],
)
def test_words_that_cannot_be_are_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command(["train", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line


def test_folds_and_strangers_are_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    for name in ("fold-1", "fold-2"):
        shutil.copytree(finished / "export", folder / name / "export")
    shutil.copy(finished / "run.json", folder)
    assert run_command(["export", str(folder), "--push-to-hub", "me/films"]) == 2
    assert "has 2 models, one of each fold" in capsys.readouterr().err
    (folder / "fold-1" / "export" / "texts.csv").write_text(SECRET)
    with pytest.raises(exports.BadInput, match=r"texts\.csv is not of this export"):
        exports.files_to_share(folder / "fold-1" / "export")


@pytest.mark.soak
def test_train_pushes_what_it_exported(hub: Hub):
    small = ("model.name=modernbert-tiny", "model.weights=random", "baselines=false")
    words = ("train", "textclass", *small, "training.num_epochs=1")
    done = hub.run(*words, "--push-to-hub", "me/films", "--json")
    assert done.returncode == 0, done.stderr
    assert f"Pushed: {hub.url}/me/films" in done.stderr
    json.loads(done.stdout)
    [run] = (hub.home / "runs").iterdir()
    assert hub.taken.files == checksums(run / "export")
    assert "README.md" in hub.taken.files
    check_no_token(hub.home, done.stdout, done.stderr)
