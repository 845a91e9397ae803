"""One class, several labels or a number per text: losses, metrics and whole jobs."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs_tiny import tiny
from sklearn import metrics as reference
from torch.nn import functional

from job_tiny import be_quick, words
from trainfit.core.errors import BadInput
from trainfit.data.labels import LabelKind
from trainfit.data.tokens import Tokens
from trainfit.hpo.studies import read_setting
from trainfit.jobs import textclass
from trainfit.jobs.classification import ClassifierTask
from trainfit.jobs.configuration import configure
from trainfit.jobs.metrics import best_thresholds, label_metrics, number_metrics
from trainfit.jobs.predict import answer
from trainfit.jobs.registry import less_is_better
from trainfit.jobs.scores import FoldScores, JobResult
from trainfit.jobs.targets import OneClass, RealNumber, SeveralLabels, target_of
from trainfit.reports.run_report import report
from trainfit.reports.writers import markdown
from trainfit.runs.run_folder import exports_of

RANDOM = np.random.default_rng(0)


def test_the_losses_are_torchs_in_any_cut():
    logits = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor(RANDOM.integers(0, 2, (6, 3)), dtype=torch.float64)
    wanted = functional.binary_cross_entropy_with_logits(logits, labels)
    torch.testing.assert_close(SeveralLabels().loss(logits, labels) / 6, wanted)
    numbers = torch.tensor(RANDOM.normal(size=6))
    wanted = functional.mse_loss(logits[:, 0], numbers)
    torch.testing.assert_close(RealNumber(0.0, 1.0).loss(logits[:, :1], numbers) / 6, wanted)
    for target, values in ((SeveralLabels(), labels), (RealNumber(0.0, 1.0), numbers)):
        shown = logits[:, :1] if values.ndim == 1 else logits
        parts = [target.loss(shown[cut], values[cut]) for cut in (slice(0, 2), slice(2, 6))]
        torch.testing.assert_close(parts[0] + parts[1], target.loss(shown, values))
        filled = values.clone()
        filled[2:] = math.nan
        given = shown.clone().requires_grad_()
        loss = target.loss(given, filled)
        loss.backward()
        torch.testing.assert_close(loss.detach(), parts[0])
        assert given.grad is not None
        assert given.grad[2:].abs().max() == 0


def test_the_problem_types_are_those_of_transformers():
    from transformers import PretrainedConfig

    facts = [OneClass().facts(), SeveralLabels().facts(), RealNumber(2.0, 3.0).facts()]
    for one in facts:
        PretrainedConfig(problem_type=one["problem_type"])  # raises for another word
        assert type(target_of(one)) is type(target_of(json.loads(json.dumps(one))))
    assert target_of(facts[2]).outputs(torch.tensor([1.0])).item() == 5.0
    assert [less_is_better(target_of(one).metric) for one in facts] == [False, False, True]
    assert not target_of(facts[2]).greater_is_better


@given(st.integers(0, 10**6))
@settings(max_examples=10)
def test_metrics_of_labels_are_scikit_learns(seed: int):
    random = np.random.default_rng(seed)
    truth = (random.random((20, 3)) < 0.4).astype(np.uint8)
    scores = random.random((20, 3)).round(1)
    found = label_metrics(truth, scores, [0.5, 0.3, 0.6])
    said = scores >= [0.5, 0.3, 0.6]
    options: dict[str, Any] = {"zero_division": 0}
    assert found.f1 == pytest.approx(reference.f1_score(truth, said, average="micro", **options))
    assert found.accuracy == pytest.approx(reference.accuracy_score(truth, said))
    micro = reference.precision_recall_fscore_support(truth, said, average="micro", **options)
    assert (found.precision, found.recall) == pytest.approx(micro[:2])
    if (truth.any(0) | said.any(0)).all():
        macro = reference.f1_score(truth, said, average="macro", **options)
        assert found.macro_f1 == pytest.approx(macro)
    if truth.any(0).all() and not truth.all(0).any():
        assert found.auc == pytest.approx(reference.roc_auc_score(truth, scores))


@given(st.integers(0, 10**6))
@settings(max_examples=10)
def test_no_threshold_has_a_better_f1(seed: int):
    random = np.random.default_rng(seed)
    truth = (random.random((15, 2)) < 0.4).astype(np.uint8)
    scores = random.random((15, 2)).round(1)
    for k, threshold in enumerate(best_thresholds(truth, scores)):
        if not truth[:, k].any():
            assert threshold == 0.5
            continue
        f1 = [
            reference.f1_score(truth[:, k], scores[:, k] >= one)
            for one in [threshold, *np.unique(scores[:, k])]
        ]
        assert f1[0] == pytest.approx(max(f1))


def test_metrics_of_numbers_are_scipys_and_scikit_learns():
    truth, found = RANDOM.normal(3, 2, 50), RANDOM.normal(3, 2, 50)
    scored = number_metrics(truth, found)
    assert scored.mse == pytest.approx(reference.mean_squared_error(truth, found))
    assert scored.rmse == pytest.approx(math.sqrt(scored.mse))
    assert scored.mae == pytest.approx(reference.mean_absolute_error(truth, found))
    assert scored.pearson == pytest.approx(scipy.stats.pearsonr(truth, found).statistic)
    assert scored.spearman == pytest.approx(scipy.stats.spearmanr(truth, found).statistic)
    same = number_metrics(truth, np.full(50, 3.0))
    assert same.pearson is None
    assert same.spearman is None
    evaluated = RealNumber(3.0, 2.0).evaluate(truth, np.full((50, 1), 3.0))
    assert math.isnan(evaluated["spearman"])
    assert evaluated["loss"] == pytest.approx(same.mse / 4)


@pytest.mark.parametrize("target", [SeveralLabels(), RealNumber(2.0, 3.0)])
def test_packed_rows_padded_rows_and_any_cut_have_one_loss(target: OneClass):
    lengths = np.array([7, 3, 12, 5])
    labels: Any = RANDOM.integers(0, 2, (4, 3)).astype(np.uint8)
    if isinstance(target, RealNumber):
        labels = RANDOM.normal(2, 3, 4)
    tokens = Tokens(
        ids=RANDOM.integers(5, 60, lengths.sum()).astype(np.int32),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        labels=labels,
    )
    outputs = 3 if labels.ndim == 2 else 1
    model = tiny("bert-base", classes=outputs).double().eval().requires_grad_(False)
    task = ClassifierTask(lambda: model, tokens, tokens, effective_batch=4, target=target)
    whole = task.loss(model, task.collate((0, 1, 2, 3), 5, 12, None))
    packed = task.loss(model, task.collate((0, 1, 2, 3), 1, 32, 6))
    halves = [task.loss(model, task.collate(part, 3, 12, None)) for part in ((0, 3), (1, 2))]
    assert float(packed) == pytest.approx(float(whole), rel=1e-6)
    assert float(sum(halves)) == pytest.approx(float(whole), rel=1e-6)
    found = task.evaluate(model, 2)
    assert found["loss"] == pytest.approx(float(whole) / task.weight((0, 1, 2, 3)), rel=1e-5)
    assert set(found) <= set(target.metrics)


# ── whole jobs ────────────────────────────────────────────────────────────────────────────────

NAMES = ("alder", "birch", "cedar")
OTHERS = ["juniper", "kapok", "larch", "maple", "hazel", "fir"]


def write_labels(path: Path, rows: int, seed: int, kind: str) -> Path:
    """Texts whose labels are the trees that they name; the number is the sum of their weights."""
    random = np.random.default_rng(seed)
    there = random.random((rows, 3)) < 0.45
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        for row in there:
            told = [name for name, is_there in zip(NAMES, row, strict=True) if is_there]
            text = " ".join(random.permutation([*told, *random.choice(OTHERS, 3)]))
            value = round(float(row @ [1.0, 2.0, 4.0]) * 10.1 + 100, 2)
            writer.writerow((text, "|".join(told) if kind == "multi" else value))
    return path


def run(tmp_path: Path, kind: str, *more: str) -> JobResult:
    parts = {"train": 160, "validation": 60, "test": 60}
    files = [
        f"data.{name}={write_labels(tmp_path / f'{name}.csv', rows, seed, kind)}"
        for seed, (name, rows) in enumerate(parts.items())
    ]
    own = words(
        tmp_path,
        "data.max_length=32",
        "training.num_epochs=12",
        "training.learning_rate=0.01",
        *files,
        *more,
    )
    composed = configure("textclass", own)
    assert f"data.target={kind}" in " ".join(composed.notes)
    return textclass.train(composed)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


def rows_of(result: JobResult) -> list[dict[str, str]]:
    with (Path(result.run) / "predictions.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("_quick")
def test_several_labels_from_file_to_answer(tmp_path: Path):
    result = run(tmp_path, "multi", "baselines=true", "model.pooling=max")
    folder = Path(result.run)
    rows = rows_of(result)
    truth = np.array([[int(row[f"label_{k}"]) for k in range(3)] for row in rows])
    chances = np.array([[float(row[f"score_{k}"]) for k in range(3)] for row in rows])
    scored = FoldScores.load(folder / "scores.json")
    said = chances >= np.array(scored.thresholds)
    assert result.metrics["f1"] == pytest.approx(reference.f1_score(truth, said, average="micro"))
    assert result.metrics["accuracy"] == pytest.approx(reference.accuracy_score(truth, said))
    assert result.metrics["f1"] > 0.9 > result.baselines["majority_f1"]
    assert result.baselines["bag_of_words_f1"] > 0.9
    assert "confusion" not in result.metrics
    assert list(result.by_label) == list(NAMES)
    each = reference.f1_score(truth, said, average=None)
    assert [one.f1 for one in result.by_label.values()] == pytest.approx(each)
    head = json.loads((folder / "export" / "head.json").read_text())
    assert head["problem_type"] == "multi_label_classification"
    assert head["thresholds"] == list(scored.thresholds)
    with (tmp_path / "test.csv").open() as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    answers = answer(exports_of(folder), texts)
    for found, told, chance in zip(answers, said, chances, strict=True):
        assert found["labels"] == [n for n, yes in zip(NAMES, told, strict=True) if yes]
        assert [found[f"p({name})"] for name in NAMES] == pytest.approx(chance)
    page = markdown(report(folder))
    assert "subset accuracy" in page
    assert "By label" in page
    assert "Confusion" not in page


@pytest.mark.usefixtures("_quick")
def test_numbers_in_folds_from_file_to_answer(tmp_path: Path):
    train = write_labels(tmp_path / "all.csv", 240, 3, "regression")
    more = [f"data.train={train}", "data.max_length=32", "training.num_epochs=10", "cv.folds=2"]
    more.append("training.learning_rate=0.006")
    composed = configure("textclass", words(tmp_path, *more, "baselines=true"))
    assert "data.target=regression" in " ".join(composed.notes)
    result = textclass.train(composed)
    rows = rows_of(result)
    assert len({row["id"] for row in rows}) == len(rows) == 192
    for fold, figures in enumerate(result.metrics["folds"], 1):
        truth, found = (
            np.array([float(row[name]) for row in rows if row["fold"] == str(fold)])
            for name in ("label", "prediction")
        )
        assert truth.min() >= 100  # in the labels' own units
        mse = reference.mean_squared_error(truth, found)
        assert figures["mse"] == pytest.approx(mse)
        assert figures["spearman"] == pytest.approx(scipy.stats.spearmanr(truth, found).statistic)
    assert result.metrics["rmse"] < 0.7 * result.baselines["mean_rmse"]
    assert result.baselines["bag_of_words_rmse"] < result.baselines["mean_rmse"]
    folder = Path(result.run)
    head = json.loads((folder / "fold-1" / "export" / "trainfit.json").read_text())
    assert head["problem_type"] == "regression"
    assert head["classes"] == ["value"]
    [little, much] = answer(exports_of(folder), ["juniper kapok larch", "cedar birch alder"])
    assert list(little) == ["row", "value"]
    assert 90 < little["value"] < much["value"] < 190
    page = markdown(report(folder))
    assert "Spearman" in page
    assert "mean of the labels" in page
    assert "Confusion" not in page


@pytest.mark.usefixtures("_quick")
def test_a_head_alone_learns_numbers_of_a_frozen_encoder(tmp_path: Path):
    train = write_labels(tmp_path / "all.csv", 120, 5, "regression")
    frozen = ("model.freeze_encoder=true", "data.max_length=32", "training.num_epochs=6")
    result = textclass.train(
        configure("textclass", words(tmp_path, f"data.train={train}", *frozen))
    )
    rows = rows_of(result)
    truth, found = ([float(row[name]) for row in rows] for name in ("label", "prediction"))
    assert result.metrics["mae"] == pytest.approx(reference.mean_absolute_error(truth, found))
    assert result.metrics["rmse"] < 40  # of labels from 100 to 170


def test_the_epoch_is_not_chosen_by_the_class_that_comes_last(tmp_path: Path):
    path = tmp_path / "mail.csv"
    labels = ["bad" if at % 10 == 0 else "ok" for at in range(60)]
    path.write_text(
        "text,label\n" + "".join(f"alder {at},{one}\n" for at, one in enumerate(labels))
    )
    own = words(tmp_path, f"data.train={path}")
    target = target_of(textclass.prepare(configure("textclass", own)).datasets[0].metadata)
    assert target.metric == read_setting("textclass", own).hpo.metric == "macro_f1"
    truth = np.array([0] * 2 + [1] * 18)
    everything_ok = np.tile([0.1, 0.9], (20, 1))
    finds_bad = np.where(np.arange(20)[:, None] < 5, [0.9, 0.1], [0.1, 0.9])  # and 3 that are ok
    scored = [target.evaluate(truth, one) for one in (everything_ok, finds_bad)]
    assert scored[0]["f1"] > scored[1]["f1"]
    assert scored[0][target.metric] < scored[1][target.metric]


def test_a_study_goes_by_the_metric_of_the_labels(tmp_path: Path):
    for kind, metric in (("multi", "f1"), ("regression", "rmse")):
        train = write_labels(tmp_path / f"{kind}.csv", 60, 0, kind)
        setting = read_setting("textclass", words(tmp_path, f"data.train={train}"))
        assert setting.hpo.metric == metric
    asked = read_setting("textclass", words(tmp_path, f"data.train={train}", "hpo.metric=mae"))
    assert asked.hpo.metric == "mae"


@pytest.mark.parametrize("target", ["single", "multi", "regression"])
def test_every_target_has_synthetic_data(tmp_path: Path, target: str):
    own = words(tmp_path, f"data.target={target}", "data.max_length=32")
    prepared = textclass.prepare(configure("textclass", own))
    data = prepared.datasets[0]
    assert target_of(data.metadata).metric in prepared.metrics
    assert len(data.train) + len(data.validation) + len(data.test) == 1200
    assert data.train.labels.ndim == (2 if target == "multi" else 1)


def test_labels_that_are_no_numbers_are_refused_by_row(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,1.5\nb,2.5\nc,much\n")
    own = words(tmp_path, f"data.train={path}", "data.target=regression")
    with pytest.raises(BadInput, match="row 3") as caught:
        textclass.prepare(configure("textclass", own))
    assert "much" not in str(caught.value)
    assert LabelKind().target == "single"
