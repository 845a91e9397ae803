"""The data by position and the options that stand for keys, in every command on a job."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainfit.cli.main import run

KEYS = {
    ("textclass", "data"): "data.train",
    ("nli", "data"): "data.data_dir",
    ("gpt", "data"): "data.data_dir",
    ("textclass", "model"): "model.name",
    ("gpt", "output"): "runs_dir",
    ("nli", "epochs"): "training.num_epochs",
    ("textclass", "batch-size"): "training.effective_batch_size",
    ("gpt", "lr"): "training.learning_rate",
}
VALUES = {"epochs": "2.5", "batch-size": "48", "lr": "3e-4", "data": "my file, 1.csv"}


def values(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert run(["config", *words, "--json"]) == 0
    found: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)["values"]
    return found


@pytest.mark.parametrize(("task", "option"), KEYS)
def test_option_is_its_key(task: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    key, value = KEYS[task, option], VALUES.get(option, "some/name")
    found = values([task, f"--{option}", value], capsys)
    assert found == values(
        [task, f"{key}='{value}'" if option == "data" else f"{key}={value}"], capsys
    )
    assert str(found[key]["value"]) == value or float(str(found[key]["value"])) == float(value)
    assert found[key]["from"] == "override"


def test_the_word_without_an_equals_sign_is_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    found = values(["textclass", "seed=7", "a b.csv", "--lr", "1e-3", "--data", "a b.csv"], capsys)
    assert found["data.train"]["value"] == "a b.csv"
    assert found["seed"]["value"] == 7


REFUSED = {
    "train reviews.csv": "no job before 'reviews.csv'; name one first; the jobs are nli, ",
    "train textclass --batchsize 3": "did you mean --batch-size?",
    "train textclass none.csv": "no file none.csv",
    "plan textclass none.csv --gpu t4": "no file none.csv",
    "tune textclass none.csv": "no file none.csv",
    "hpo textclass none.csv": "no file none.csv",
    "train nli none": "none",
    "train textclass a.csv b.csv": "b.csv and data.train=a.csv set the same key data.train",
    "config nli training.batch_size = 4": "all other words are key=value, without spaces",
    "train textclass a.csv --data b.csv": "a.csv and data.train=b.csv set the same key data.train",
    "train nli --epochs 2 num_epochs=3": "--epochs 2 and num_epochs=3 set the same key",
    "hpo gpt --lr 1 training.learning_rate=2": "set the same key training.learning_rate",
    "config textclass --epochs many": 'training.num_epochs is "many"',
    "train nli --resume x --epochs 2": "--resume with training.num_epochs=2",
    "train textclass --learning-rate 1": "write training.learning_rate=VALUE or --lr VALUE",
    "tune textclass --num_epochs 1": "write training.num_epochs=VALUE or --epochs VALUE",
    "plan nli --batch_size 8": "write --batch-size VALUE",
    "train textclass --max_length=64": "write data.max_length=VALUE",
    "train pairs --per-device-train-batch-size 8": "write training.batch_size=VALUE",
    "plan nli --output x": "write runs_dir=VALUE",
    "hpo gpt --epoch 3": "did you mean --epochs?",
    "train nli --torch_compile": "did you mean optimization.compile=VALUE?",
    "train json:Nowhere a.csv": "json has no trainfit.Job called Nowhere",
}


def test_mistakes_are_one_line_without_torch() -> None:
    """One process for all: each takes no longer than a second after the imports."""
    script = """
import json, sys, time
from trainfit.cli.main import run
codes = []
for line in json.load(sys.stdin):
    print("==", line, file=sys.stderr)
    codes.append(run(line.split()))
assert "torch" not in sys.modules
print(codes)
"""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(list(REFUSED)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert time.monotonic() - begun < 2 * len(REFUSED)
    assert json.loads(done.stdout) == [2] * len(REFUSED)
    _, *answers = done.stderr.split("== ")
    for answer, (line, message) in zip(answers, REFUSED.items(), strict=True):
        asked, said, *more = answer.splitlines()
        assert asked == line
        assert message in said
        assert not more


def test_a_job_of_ones_own_has_no_key_for_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "jobs"))
    assert run(["train", "images:Images", "a.csv"]) == 2
    assert "images:Images has no key for a.csv" in capsys.readouterr().err
    assert (
        values(["images:Images", "--lr", "0.5"], capsys)["training.learning_rate"]["value"] == 0.5
    )
