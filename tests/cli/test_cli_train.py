"""`train` and `predict` as a person or a program meets them."""

import csv
import errno
import io
import json
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from job_tiny import (
    SECRET,
    be_quick,
    detect_once,
    nli_words,
    quick_plan,
    tiny_model,
    words,
    write_texts,
)
from trainfit.cli.main import run
from trainfit.conf import options
from trainfit.data.tokenizers import learn_tokenizer
from trainfit.engine.observers import Observer
from trainfit.jobs import exports, job_plan
from trainfit.planning import planner

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def end_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_is_one_object_on_standard_output(tmp_path: Path, capsys: Any):
    assert run(["train", "nli", *nli_words(tmp_path, "baselines=true"), "--json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    data = json.loads(captured.out)
    assert Path(data["run"]).is_dir()
    assert {"f1", "accuracy", "auc", "precision", "recall", "macro_f1"} <= set(data["metrics"])
    assert set(data["baselines"]) == {"majority_f1", "bag_of_words_f1"}
    assert data["events"] == []
    assert SECRET not in captured.out + captured.err


def test_a_run_that_lacks_its_report_alone_is_not_trained_again(tmp_path: Path, capsys: Any):
    given = ["train", "nli", *nli_words(tmp_path, "training.max_steps=2"), "--json"]
    assert run(given) == 0
    first = end_of(capsys)
    [folder] = (tmp_path / "runs").iterdir()
    before = (folder / "train.log").read_text()
    (folder / "report.html").unlink()  # as by a kill after the results
    assert run([*given, "--resume", "auto"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == first
    assert "its report was missing" in captured.err
    assert (folder / "report.html").is_file()
    assert [folder] == list((tmp_path / "runs").iterdir())
    assert (folder / "train.log").read_text() == before


def test_json_of_folds(tmp_path: Path, capsys: Any):
    more = ("cv.folds=2", "training.max_steps=3")
    assert run(["train", "nli", *nli_words(tmp_path, *more), "--json"]) == 0
    metrics = end_of(capsys)["metrics"]
    assert set(metrics["mean"]) == set(metrics["std"]) >= {"f1", "accuracy", "auc"}
    assert len(metrics["folds"]) == 2
    assert metrics["f1"] == metrics["mean"]["f1"]


def test_the_first_lines_say_what_is_set(tmp_path: Path, capsys: Any):
    more = ("optimization.optimizer=adamw", "training.max_steps=2")
    assert run(["train", "nli", *nli_words(tmp_path, *more)]) == 0
    captured = capsys.readouterr()
    for line in (
        "Device: cpu",
        "TF32",
        "SDPA",
        "Using AdamW optimizer (lr=0.003, wd=0.01)",
        "DataLoader settings: num_workers=0, pin_memory=False, prefetch_factor=None",
    ):
        assert line in captured.err
    [folder] = (tmp_path / "runs").iterdir()
    [counts] = json.loads((folder / "data.json").read_text())["folds"]
    parts = [counts[part]["pairs"] for part in ("train", "validation", "test")]
    assert (
        "Data: {:,} rows: {:,} to train on, {:,} for validation, {:,} for the test".format(
            sum(parts), *parts
        )
        in captured.err
    )
    positives = counts["train"]["positives"]
    names = counts["classes"]
    said = f"Classes to train on: {names[0]}: {parts[0] - positives:,}, {names[1]}: {positives:,}"
    assert said in captured.err
    assert "trained, method full" in captured.err
    assert "Using AdamW optimizer" in (folder / "train.log").read_text()
    assert "By criterion" in captured.out
    assert str(folder) in captured.out


def test_dry_run_trains_nothing(tmp_path: Path, capsys: Any):
    assert run(["train", "nli", *nli_words(tmp_path), "--dry-run", "--json"]) == 0
    data = end_of(capsys)
    assert data["config"]["training"]["num_epochs"] == 2
    assert data["plan"]["effective_batch_size"] == 16
    assert run(["train", "nli", *nli_words(tmp_path), "--dry-run"]) == 0
    assert "training.num_epochs" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("task", "experiment"),
    [
        (task, name)
        for task in ("nli", "textclass", "pairs")
        for name in options(task, "experiment")
    ],
)
def test_every_shipped_experiment_trains(task: str, experiment: str, tmp_path: Path, capsys: Any):
    own = nli_words(tmp_path) if task == "nli" else words(tmp_path, "data.max_length=64")
    own += [f"experiment={experiment}", "training.max_steps=2"]
    own += ["device.use_cuda=false", "device.mixed_precision=off"]
    assert run(["train", task, *own, "--json"]) == 0
    data = end_of(capsys)
    assert 0 <= data["metrics"]["accuracy"] <= 1
    result = json.loads(next(Path(data["run"]).rglob("result.json")).read_text())
    assert result["steps"] == 2


def test_resume_goes_on(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    from trainfit.reports import training_lines

    class Stop(Observer):
        def on_step(self, step: int) -> None:
            if step == 2:  # a second one would end it at once
                os.kill(os.getpid(), signal.SIGINT)

    def watch(composed: Any) -> Any:
        return training_lines.Show(watch=lambda _title: (Stop(),))

    with monkeypatch.context() as patch:
        patch.setattr(training_lines, "show", watch)
        assert run(["train", "nli", *nli_words(tmp_path), "--json"]) == 130
    stopped = end_of(capsys)
    assert stopped["status"] == "stopped"
    assert run(["train", "nli", "--resume", stopped["run"], "--json"]) == 0
    data = end_of(capsys)
    assert data["run"] == stopped["run"]
    assert [event["kind"] for event in data["events"]] == ["stopped", "resumed"]
    assert run(["train", "nli", "--resume", stopped["run"], "seed=1"]) == 2
    assert run(["train", "textclass", "--resume", stopped["run"]]) == 2
    assert run(["train", "nli", "--resume", "nowhere"]) == 2


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def missing_column(tmp: Path) -> list[str]:
    found = nli_words(tmp)
    edit(tmp / "data" / "redsm5_posts.csv", "post_id,text", "post_id,body")
    return found


def status_out_of_range(tmp: Path) -> list[str]:
    found = nli_words(tmp)
    edit(tmp / "data" / "redsm5_annotations.csv", ",1,x", ",7,x")
    return found


def post_without_text(tmp: Path) -> list[str]:
    found = nli_words(tmp)
    with (tmp / "data" / "redsm5_posts.csv").open("a") as file:
        file.write("s_900_1,   \n")
    return found


def empty_split(tmp: Path) -> list[str]:
    train = write_texts(tmp / "train.csv", 40)
    (tmp / "test.csv").write_text("text,label\n")
    return words(tmp, f"data.train={train}", f"data.test={tmp / 'test.csv'}")


def label_not_in_training(tmp: Path) -> list[str]:
    train = write_texts(tmp / "train.csv", 40)
    (tmp / "test.csv").write_text(f"text,label\n{SECRET},9\n")
    return words(tmp, f"data.train={train}", f"data.test={tmp / 'test.csv'}")


def broken_weights(tmp: Path) -> list[str]:
    from transformers import AutoConfig, AutoModel

    folder = tiny_model(tmp / "model")
    model = AutoModel.from_config(AutoConfig.from_pretrained(folder))
    model.encoder.layer[0].output.dense.weight.data[0, 0] = float("nan")
    model.save_pretrained(folder)
    learn_tokenizer(["some words of a text"], vocabulary=300, least=1).save_pretrained(folder)
    return [w for w in nli_words(tmp) if w != "model.weights=random"] + ["model.weights=pretrained"]


@pytest.mark.parametrize(
    ("task", "make", "says"),
    [
        ("nli", missing_column, "has no column text"),
        ("nli", status_out_of_range, "status 7"),
        ("nli", post_without_text, "s_900_1 has no text"),
        ("nli", lambda tmp: nli_words(tmp, "cv.folds=100"), "split into 100 parts"),
        ("nli", lambda tmp: nli_words(tmp, "data.max_length=5"), "data.max_length is 5"),
        ("nli", lambda tmp: nli_words(tmp, "data.data_dir=/nowhere"), "no redsm5_posts.csv"),
        ("nli", broken_weights, "output.dense.weight of"),
        ("nli", lambda tmp: nli_words(tmp, "device.use_cuda=true"), "there is no GPU here"),
        ("nli", lambda tmp: nli_words(tmp, "device.mixed_precision=bf16"), "this CPU does not"),
        ("nli", lambda tmp: nli_words(tmp, "tracking=mlflow"), "mlflow, which is not installed"),
        ("textclass", empty_split, "has no rows"),
        ("textclass", label_not_in_training, "a label that the training data has not (9)"),
        ("textclass", lambda tmp: words(tmp, "data.train=no.csv"), "no file no.csv"),
        ("gtp", lambda tmp: [], "did you mean gpt"),
        ("nil", lambda tmp: [], "did you mean nli"),
    ],
)
def test_bad_input_is_one_line(
    task: str, make: Any, says: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    here = detect_once()
    bare = replace(here, gpus=(), cpu=replace(here.cpu, native_bf16=False))
    monkeypatch.setattr(job_plan, "detect", lambda: bare)
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    made = make(tmp_path)
    capsys.readouterr()
    assert run(["train", task, *made]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    errors = [line for line in captured.err.splitlines() if not line.startswith("trainfit: note: ")]
    assert len(errors) == 1 or says == "output.dense.weight of"
    assert SECRET not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("preset", ["gpu_4090", "gpu_3090", "gpu_low_mem"])
def test_a_preset_for_a_gpu_is_refused_without_one(
    preset: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(job_plan, "detect", lambda: replace(detect_once(), gpus=()))
    assert run(["train", "nli", f"hardware={preset}"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"trainfit: hardware={preset}, but there is no GPU here")


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_read(tmp_path: Path, capsys: Any):
    (tmp_path / "runs").write_text("a file")
    assert run(["train", "nli", *nli_words(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'runs'} is a file; name a folder" in said
    assert "preparing" not in said


def test_a_full_disk_fails_the_run_and_nothing_is_lost(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    def full(*_args: Any, **_more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(exports, "_write_encoder", full)
        assert run(["train", "nli", *nli_words(tmp_path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "No space left on device" in lines[-1]
    [left] = (tmp_path / "runs").iterdir()
    assert str(left) in lines[-1]
    assert run(["train", "nli", "--resume", str(left), "--json"]) == 0
    assert end_of(capsys)["metrics"]["count"] > 0


def test_what_does_not_fit_is_not_begun(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    def too_large(*args: Any, **more: Any) -> Any:
        return replace(quick_plan(*args, **more), fits=False, advice=("take bert-base",))

    monkeypatch.setattr(planner, "plan", too_large)
    assert run(["train", "nli", *nli_words(tmp_path)]) == 2
    assert "does not fit this machine; take bert-base" in capsys.readouterr().err


# ── predict ──


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        be_quick(patch)
        found = nli_words(tmp, "cv.folds=2", "training.max_steps=2")
        assert run(["train", "nli", *found]) == 0
    [folder] = (tmp / "runs").iterdir()
    return folder


def test_predict_a_text(trained: Path, capsys: Any):
    assert run(["predict", str(trained), "--text", "alder elm", "--criterion", "A.4"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["criterion"] == "A.4"
    assert row["class"] in ("evidence", "no evidence")
    assert row["p(evidence)"] + row["p(no evidence)"] == pytest.approx(1)
    assert run(["predict", str(trained), "--text", "fir fir", "--text", "alder elm"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert [each["row"] for each in both] == [1] * 9 + [2] * 9
    again = next(each for each in both[9:] if each["criterion"] == "A.4")
    assert again["p(evidence)"] == pytest.approx(row["p(evidence)"], abs=1e-6)


def test_predict_a_file(trained: Path, tmp_path: Path, capsys: Any):
    (tmp_path / "new.csv").write_text("n,text\n1,alder elm\n2,\n3,fir fir\n")
    asked = ["predict", str(trained), "--file", str(tmp_path / "new.csv"), "--criterion", "A.1"]
    for name in ("out.csv", "out.json"):
        assert run([*asked, "--output", str(tmp_path / name)]) == 0
        said = capsys.readouterr()
        assert said.out == f"2 rows in {tmp_path / name}\n"
        assert "note: the texts are of text" in said.err
        assert "note: skipped 1 of 3 rows without text" in said.err
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == ["1", "3"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert [float(row["p(evidence)"]) for row in rows] == [row["p(evidence)"] for row in written]


def test_predict_lines(trained: Path, tmp_path: Path, capsys: Any, monkeypatch: Any):
    asked = ["predict", str(trained), "--criterion", "A.1"]
    assert run([*asked, "--text", "alder elm", "--text", "fir fir"]) == 0
    alone = json.loads(capsys.readouterr().out)
    whole = b"\xef\xbb\xbfalder elm\r\n\nfir fir\n"
    (tmp_path / "lines.txt").write_bytes(whole)
    for place in (str(tmp_path / "lines.txt"), "-"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(whole)))
        assert run([*asked, place]) == 0
        said = capsys.readouterr()
        rows = json.loads(said.out)
        assert [row["row"] for row in rows] == [1, 3]
        for row, other in zip(rows, alone, strict=True):
            assert row["p(evidence)"] == pytest.approx(other["p(evidence)"], abs=1e-6)
        assert "note: skipped 1 of 3 rows without text" in said.err


@pytest.mark.parametrize(
    ("piped", "says"),
    [
        (b'{"text": "alder"}\n', "standard input has objects, not a text per line"),
        (b"\xff\xfe\xfd", "standard input is not UTF-8 text"),
        (b"", "there is no text to classify"),
    ],
)
def test_predict_refuses_what_is_piped(
    trained: Path, piped: bytes, says: str, capsys: Any, monkeypatch: Any
):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped)))
    assert run(["predict", str(trained), "-"]) == 2
    assert says in capsys.readouterr().err


def test_predict_prints_what_was_asked_for(trained: Path, capsys: Any):
    asked = ["predict", str(trained), "--text", "alder elm"]
    said = {}
    for form in ("json", "jsonl", "csv", "table"):
        assert run([*asked, "--format", form]) == 0
        said[form] = capsys.readouterr().out
    rows = json.loads(said["json"])
    assert [json.loads(line) for line in said["jsonl"].splitlines()] == rows
    assert [row["criterion"] for row in csv.DictReader(said["csv"].splitlines())] == [
        row["criterion"] for row in rows
    ]
    head, *lines = said["table"].splitlines()
    assert head.split() == ["criterion", "class", "row", "p(no", "evidence)", "p(evidence)"]
    assert [line.split()[-1] for line in lines] == [f"{row['p(evidence)']:.4f}" for row in rows]
    assert run([*asked, "--json", "--format", "csv"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_predict_gives_the_scores_of_the_job(trained: Path, capsys: Any):
    """A fold's own export, asked for a post that it held out, says what predictions.csv says."""
    from trainfit.jobs.predict import predict_texts

    with (trained.parent.parent / "data" / "redsm5_posts.csv").open() as file:
        texts = {row["post_id"]: row["text"] for row in csv.DictReader(file)}
    with (trained / "fold-1" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))[:20]
    head = json.loads((trained / "fold-1" / "export" / "head.json").read_text())
    found, _ = predict_texts(
        [trained / "fold-1" / "export"],
        [texts[row["id"]] for row in rows],
        [head["criteria"][row["criterion"]] for row in rows],
    )
    assert found[:, 1] == pytest.approx([float(row["score"]) for row in rows], abs=1e-6)


def test_the_card_of_an_export_shows_how_to_load_it(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.chdir(trained / "fold-1" / "export")
    card = Path("README.md").read_text()
    [block] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(block, {})
    assert capsys.readouterr().out.startswith("tensor([[")
    assert "| test |" in card


def test_the_page_on_prediction_shows_how_to_do_it_without_trainfit(trained: Path):
    page = (ROOT / "docs" / "predict.md").read_text()
    *_, block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert "trainfit" not in block
    folder = trained / "fold-1"
    head = json.loads((folder / "export" / "head.json").read_text())
    with (trained.parent.parent / "data" / "redsm5_posts.csv").open() as file:
        texts = {row["post_id"]: row["text"] for row in csv.DictReader(file)}
    with (folder / "predictions.csv").open() as file:
        for row in list(csv.DictReader(file))[:5]:
            criterion = head["criteria"][row["criterion"]]
            logits = names["logits"](str(folder / "export"), texts[row["id"]], criterion)
            score = logits.softmax(-1)[0, 1].item()
            assert score == pytest.approx(float(row["score"]), abs=1e-6)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], "give one of --text and a file"),
        ([__file__, "--text", "a"], "give one of --text and a file"),
        (["nowhere.csv"], "Path 'nowhere.csv' does not exist"),
        (["--text", "a", "--criterion", " "], "the criterion is empty"),
        (["--text", "a", "--output", "x.txt"], "end its name in .csv or .json"),
    ],
)
def test_predict_refuses(trained: Path, more: list[str], says: str, capsys: Any):
    assert run(["predict", str(trained), *more]) == 2
    assert says in capsys.readouterr().err


# ── make ──


@pytest.mark.parametrize(
    ("target", "hardware"),
    [
        ("nli-train-auto", "auto"),
        ("nli-train-4090", "gpu_4090"),
        ("nli-train-3090", "gpu_3090"),
        ("nli-train-low-mem", "gpu_low_mem"),
        ("nli-train-cpu", "cpu"),
    ],
)
def test_the_guides_make_targets_train(target: str, hardware: str):
    done = subprocess.run(
        ["make", "-n", target, "DATA_DIR=some/folder"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = [line for line in done.stdout.splitlines() if "trainfit train nli" in line]
    assert f"hardware={hardware}" in line
    assert "data.data_dir='some/folder'" in line
    assert "--dry-run" not in line
