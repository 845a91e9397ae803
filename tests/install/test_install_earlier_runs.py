"""Runs of earlier versions are reported, verified, predicted with and resumed."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trainfit.cli.main import run
from trainfit.conf import SCHEMAS, compose
from trainfit.conf.composition import completed, keys
from trainfit.core import codec

EARLIER = Path(__file__).parent / "earlier"
"""A run of 0.1.0, of commit a2855f7, with the data and the model that it names."""


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_an_earlier_run_is_reported_and_verified(earlier: Path, capsys: Any) -> None:
    assert run(["report", "run"]) == 0
    assert "textclass" in (earlier / "report.html").read_text()
    capsys.readouterr()
    assert run(["verify", "run", "--json"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    written = json.loads((EARLIER / "run" / "receipt.json").read_text())["items"]
    assert [item["status"] for item in items] == [item["status"] for item in written]


def test_an_earlier_run_predicts_what_it_did(earlier: Path, capsys: Any) -> None:
    assert run(["predict", "run", "--file", "train.csv"]) == 0
    told = json.loads(capsys.readouterr().out)
    with (earlier / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    for row in rows:  # ids are the numbers of rows, from 1 on
        assert told[int(row["id"]) - 1]["p(good)"] == pytest.approx(float(row["score"]), abs=1e-4)


@pytest.mark.soak
def test_an_earlier_run_is_resumed(earlier: Path, capsys: Any) -> None:
    for name in ("result.json", "results.json", "scores.json"):  # as if it had been killed
        (earlier / name).unlink()
    shutil.rmtree(earlier / "export")
    assert run(["train", "textclass", "--resume", "run", "--json"]) == 0
    ended = json.loads(capsys.readouterr().out)
    assert ended["status"] == "finished"
    assert "resumed" in [event["kind"] for event in ended["events"]]
    assert (earlier / "export").is_dir()


@pytest.mark.parametrize("task", list(SCHEMAS))
def test_keys_that_an_earlier_version_lacked_have_their_defaults(task: str) -> None:
    config = compose(task).config
    for key in keys(task):
        *path, last = key.split(".")
        written = part = codec.encode(config)
        for name in path:
            part = part[name]
        del part[last]
        assert codec.decode(SCHEMAS[task], completed(task, written)) == config, key


def test_a_configuration_of_another_form_is_left_to_its_reader() -> None:
    for damaged in (None, [], {"training": 3}):
        assert completed("nli", damaged) == damaged
