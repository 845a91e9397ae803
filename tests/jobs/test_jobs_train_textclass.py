"""The text-classification job on files of its own."""

import ast
import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
from sklearn import metrics as reference

from job_tiny import be_quick, words, write_texts
from trainfit.jobs import textclass
from trainfit.jobs.configuration import configure
from trainfit.jobs.model_card import intervals
from trainfit.jobs.models import backbone
from trainfit.jobs.predict import answer
from trainfit.jobs.scores import JobResult
from trainfit.kernels.unpadded_rows import without_padding
from trainfit.runs.run_folder import exports_of


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


def run(tmp_path: Path, *more: str) -> JobResult:
    quick = ("training.num_epochs=4", "training.learning_rate=0.01")
    own = words(tmp_path, "data.max_length=32", *quick, *more)
    return textclass.train(configure("textclass", own))


def files(tmp_path: Path) -> list[str]:
    parts = {"train": 160, "validation": 40, "test": 50}
    return [
        f"data.{name}={write_texts(tmp_path / f'{name}.csv', rows, seed)}"
        for seed, (name, rows) in enumerate(parts.items())
    ]


def test_files_of_its_own(tmp_path: Path):
    result = run(tmp_path, *files(tmp_path), "baselines=true")
    with (Path(result.run) / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    with (tmp_path / "test.csv").open() as file:
        labels = {str(n): row["label"] for n, row in enumerate(csv.DictReader(file), 1)}
    assert {row["id"]: row["label"] for row in rows} == labels
    scores = np.array([float(row["score"]) for row in rows])
    truth = np.array([int(row["label"]) for row in rows])
    assert result.metrics["f1"] == pytest.approx(reference.f1_score(truth, scores >= 0.5))
    assert result.metrics["f1"] > 0.9  # its first word decides
    assert result.baselines["bag_of_words_f1"] > 0.9
    counts = json.loads((Path(result.run) / "data.json").read_text())["folds"][0]
    assert [counts[part]["texts"] for part in ("train", "validation", "test")] == [160, 40, 50]


def test_a_run_on_a_cpu_computes_no_padding_outside_of_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[bool] = []

    def spied(*given: Any, **more: Any) -> Any:
        seen.append((found := without_padding(*given, **more)) is not None)
        return found

    monkeypatch.setattr(backbone, "without_padding", spied)
    path = tmp_path / "all.csv"
    rows = [
        f"{'good' if n % 2 else 'bad'}{' word' * (20 if n % 8 == 0 else 2)},{n % 2}"
        for n in range(96)
    ]
    path.write_text("text,label\n" + "\n".join(rows) + "\n")
    result = run(tmp_path, f"data.train={path}", "training.num_epochs=1", "training.batch_size=16")
    assert sum(seen) > len(seen) / 2
    log = (Path(result.run) / "train.log").read_text()
    assert "the rest is computed without padding" in log
    assert "Steps of 1 padded micro-batch " in log


def test_folds_and_three_classes(tmp_path: Path):
    path = write_texts(tmp_path / "all.csv", 150, classes=3)
    result = run(tmp_path, f"data.train={path}", "cv.folds=3", "baselines=true")
    with (Path(result.run) / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["id"] for row in rows}) == len(rows) == 120
    for fold, figures in enumerate(result.metrics["folds"], 1):
        mine = [row for row in rows if row["fold"] == str(fold)]
        truth = [int(row["label"]) for row in mine]
        chances = np.array([[float(row[f"score_{k}"]) for k in range(3)] for row in mine])
        expected = reference.f1_score(truth, chances.argmax(1), average="macro")
        assert figures["f1"] == pytest.approx(expected)


def test_class_weights_are_what_the_loss_counts_with(tmp_path: Path):
    prepared = textclass.prepare(configure("textclass", words(tmp_path, *files(tmp_path))))
    labels = prepared.datasets[0].train.labels
    weights = np.array(prepared.datasets[0].metadata["class_weights"])
    assert weights[labels].sum() == pytest.approx(len(labels))
    assert weights[0] * (labels == 0).sum() == pytest.approx(weights[1] * (labels == 1).sum())


def test_an_export_answers_for_new_texts(tmp_path: Path):
    result = run(tmp_path, *files(tmp_path))
    rows = answer(exports_of(Path(result.run)), ["alder juniper kapok", "birch juniper kapok"])
    assert [row["class"] for row in rows] == ["0", "1"]
    assert rows[0]["p(0)"] + rows[0]["p(1)"] == pytest.approx(1)


def test_the_page_on_prediction_and_the_card_show_how_to_use_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    result = run(tmp_path, *files(tmp_path), "model.method=lora")
    page = (Path(__file__).parents[2] / "docs" / "predict.md").read_text()
    block, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    texts = ["alder juniper kapok", "birch juniper kapok"]
    found = names["classify"](str(Path(result.run) / "export"), texts)
    for told, row in zip(found, answer(exports_of(Path(result.run)), texts), strict=True):
        for one in told:
            assert one["score"] == pytest.approx(row[f"p({one['label']})"], abs=1e-5)
    monkeypatch.chdir(Path(result.run) / "export")
    card = Path("README.md").read_text()
    [block] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    capsys.readouterr()
    exec(block.replace("a text", texts[0]), {})
    [told] = ast.literal_eval(capsys.readouterr().out)
    shown = {one["label"]: one["score"] for one in told}
    assert shown == {one["label"]: pytest.approx(one["score"]) for one in found[0]}
    assert "| train | 160 | 7 |" in card
    f1 = result.metrics["f1"]
    assert f"| f1 | {f1:.4f} |" in card


def test_intervals_of_a_card_are_those_of_drawn_items():
    truth = np.repeat([0, 0, 1, 1], [50, 10, 15, 25])
    said = np.repeat([0, 1, 0, 1], [50, 10, 15, 25])
    found = intervals([[50, 10], [15, 25]])
    exact = scipy.stats.binom.ppf([0.025, 0.975], 100, 0.75) / 100
    assert found["accuracy"] == pytest.approx(exact, abs=0.015)
    draws = np.random.default_rng(1).integers(100, size=(400, 100))
    scores = [reference.f1_score(truth[draw], said[draw]) for draw in draws]
    assert found["f1"] == pytest.approx(np.quantile(scores, [0.025, 0.975]), abs=0.03)
    assert intervals([[5, 0], [0, 7]]) == {"accuracy": (1, 1), "f1": (1, 1)}
    # A class that is neither there nor predicted has no F1 to average, as in the scores.
    assert intervals([[5, 0, 0], [0, 7, 0], [0, 0, 0]]) == {"accuracy": (1, 1), "f1": (1, 1)}
