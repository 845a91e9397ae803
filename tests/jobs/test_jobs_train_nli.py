"""The NLI job: honest scores, folds that end, and a job that survives being killed."""

import csv
import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as reference

from job_tiny import SECRET, be_quick, detect_once, nli_words, quick_plan, write_redsm5
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan, TimeEstimate
from trainfit.engine.observers import Observer
from trainfit.jobs import frozen, nli
from trainfit.jobs.configuration import configure, configured_by
from trainfit.jobs.models.classifier import EncoderClassifier
from trainfit.jobs.run import Show
from trainfit.jobs.scores import JobResult
from trainfit.packing import cut_step, deal_steps
from trainfit.planning import planner


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


def run(tmp_path: Path, *more: str, show: Show | None = None) -> JobResult:
    return nli.train(configure("nli", nli_words(tmp_path, *more)), show)


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def arrays(rows: list[dict[str, str]]) -> tuple[Any, Any]:
    return np.array([int(r["label"]) for r in rows]), np.array([float(r["score"]) for r in rows])


class At(Observer):
    """Does something at the n-th step that it sees."""

    def __init__(self, step: int, what: Callable[[], None]) -> None:
        self.left, self.what = step, what

    def on_step(self, step: int) -> None:
        self.left -= 1
        if self.left == 0:
            self.what()


@pytest.fixture(scope="module")
def folds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, JobResult]:
    tmp = tmp_path_factory.mktemp("folds")
    with pytest.MonkeyPatch.context() as patch:
        be_quick(patch)
        return tmp, run(tmp, "cv.folds=3", "baselines=true", "training.checkpoint_steps=5")


def test_the_score_of_a_split_is_that_of_held_out_pairs(tmp_path: Path):
    result = run(tmp_path)
    labels, scores = arrays(read(Path(result.run) / "predictions.csv"))
    predicted = scores >= 0.5
    found = result.metrics
    assert found["f1"] == pytest.approx(reference.f1_score(labels, predicted, zero_division=0))
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(labels, predicted))
    assert found["auc"] == pytest.approx(reference.roc_auc_score(labels, scores))
    assert found["confusion"] == reference.confusion_matrix(labels, predicted).tolist()
    assert {row["criterion"] for row in read(Path(result.run) / "predictions.csv")} == {
        f"A.{n}" for n in range(1, 10)
    }
    assert set(result.by_criterion) == {f"A.{n}" for n in range(1, 10)}
    assert result.metrics["count"] == len(labels) > 0


def test_the_reported_score_is_not_the_best_validation_epoch(tmp_path: Path):
    """Validation chooses the epoch, so it cannot be the score as well: other posts are."""
    prepared = nli.prepare(configure("nli", nli_words(tmp_path)))
    [data] = prepared.datasets
    assert data.train.groups is not None
    posts = [set(part.groups.tolist()) for part in (data.train, data.validation, data.test)]
    assert all(posts)
    assert not posts[0] & posts[1]
    assert not (posts[0] | posts[1]) & posts[2]


def test_a_fold_is_scored_on_posts_that_neither_trained_nor_chose_its_model(tmp_path: Path):
    composed = configure("nli", nli_words(tmp_path, "cv.folds=3"))
    prepared = nli.prepare(composed)
    scored: list[int] = []
    for data in prepared.datasets:
        posts = [set(part.groups.tolist()) for part in (data.train, data.validation, data.test)]
        assert not posts[0] & posts[1]
        assert not (posts[0] | posts[1]) & posts[2]
        scored += sorted(posts[2])
    corpus = nli.read_corpus(composed.config)
    test = set(corpus.post_of[nli.split_parts(corpus, composed.config)[0]].tolist())
    assert 8 <= len(test) <= 16  # about a fifth of 60, untouched by any fold
    assert sorted([*scored, *test]) == list(range(60))


def test_cross_validation_is_what_the_saved_predictions_say(folds: tuple[Path, JobResult]):
    _, result = folds
    rows = read(Path(result.run) / "predictions.csv")
    assert len({(row["id"], row["criterion"]) for row in rows}) == len(rows) > 40 * 9
    f1s, aucs = [], []
    for fold in ("1", "2", "3"):
        labels, scores = arrays([row for row in rows if row["fold"] == fold])
        f1s.append(reference.f1_score(labels, scores >= 0.5, zero_division=0))
        aucs.append(reference.roc_auc_score(labels, scores))
    found = result.metrics
    assert [fold["f1"] for fold in found["folds"]] == pytest.approx(f1s)
    assert found["mean"]["f1"] == found["f1"] == pytest.approx(np.mean(f1s))
    assert found["mean"]["auc"] == pytest.approx(np.mean(aucs))
    assert found["std"]["f1"] == pytest.approx(np.std(f1s, ddof=1))
    margin = stats.t.ppf(0.975, 2) * np.std(f1s, ddof=1) / math.sqrt(3)
    ends = np.clip([np.mean(f1s) - margin, np.mean(f1s) + margin], 0, 1)
    assert found["ci95"]["f1"] == pytest.approx(ends)
    assert set(result.baselines) == {"majority_f1", "bag_of_words_f1"}


def test_every_fold_is_trained_and_kept(folds: tuple[Path, JobResult]):
    _, result = folds
    for number in (1, 2, 3):
        folder = Path(result.run) / f"fold-{number}"
        for name in ("train.log", "metrics.jsonl", "scores.json", "export/head.json"):
            assert (folder / name).is_file()
        assert not (folder / "checkpoints").exists()
    lines = (Path(result.run) / "train.log").read_text()
    assert lines.count("held-out f1") == 3
    written = JobResult.load(Path(result.run) / "results.json")
    assert written.metrics == json.loads(result.to_json())["metrics"]


def test_no_text_is_written_anywhere(folds: tuple[Path, JobResult]):
    tmp, result = folds
    files = [path for path in Path(result.run).rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET in (tmp / "data" / "redsm5_posts.csv").read_text()


class Killed(BaseException):
    """Nothing on the way may catch it, as nothing catches kill -9."""


def die() -> None:
    raise Killed


def test_a_killed_cross_validation_ends_with_the_same_scores(
    tmp_path: Path, folds: tuple[Path, JobResult]
):
    watcher = At(39, die)  # in the second fold, between two checkpoints
    with pytest.raises(Killed):
        run(
            tmp_path,
            "cv.folds=3",
            "training.checkpoint_steps=5",
            show=Show(watch=lambda _title: (watcher,)),
        )
    [left] = (tmp_path / "runs").iterdir()
    assert (left / "fold-1" / "scores.json").is_file()
    assert (left / "fold-2" / "checkpoints").is_dir()
    assert not (left / "fold-2" / "scores.json").exists()
    result = nli.train(configured_by(left, "nli"), resume=left)
    whole = Path(folds[1].run)
    assert result.metrics == folds[1].metrics
    assert (left / "predictions.csv").read_bytes() == (whole / "predictions.csv").read_bytes()
    assert [event.kind for event in result.events] == ["resumed"]


def test_a_signal_stops_the_job_and_it_goes_on(tmp_path: Path):
    ask = At(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    stopped = run(tmp_path, show=Show(watch=lambda _title: (ask,)))
    assert (stopped.status, stopped.metrics) == ("stopped", {})
    left = Path(stopped.run)
    ended = nli.train(configured_by(left, "nli"), resume=left)
    whole = run(tmp_path)
    assert ended.status == "finished"
    assert ended.metrics == whole.metrics
    assert [event.kind for event in ended.events] == ["stopped", "resumed"]


def test_a_job_does_not_go_on_with_other_data(tmp_path: Path):
    ask = At(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    left = Path(run(tmp_path, show=Show(watch=lambda _title: (ask,))).run)
    write_redsm5(tmp_path / "data", seed=1)
    with pytest.raises(BadInput, match="data is not what"):
        nli.train(configured_by(left, "nli"), resume=left)


@pytest.mark.parametrize("batch", [7, 16])
def test_steps_are_counted_in_whole_batches_and_the_last_one_is_not_dropped(
    tmp_path: Path, batch: int
):
    """Accumulation and the schedule count optimizer steps, and the rest of an epoch is a step."""
    words = nli_words(
        tmp_path,
        f"training.effective_batch_size={batch}",
        "training.batch_size=2",
        "training.logging_steps=1",
        "training.num_epochs=1",
    )
    prepared = nli.prepare(configure("nli", words))
    result = nli.train(configure("nli", words))
    sequences = len(prepared.datasets[0].train)
    lines = (Path(result.run) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    assert len(rows) == math.ceil(sequences / batch)
    assert rows[0]["micro_batches"] > 1
    rates = [row["learning_rate"] for row in rows]
    assert max(rates) <= 0.003
    assert rates[-1] < rates[len(rates) // 2]


def test_negative_ratio_thins_out_training_alone(tmp_path: Path):
    every = nli.prepare(configure("nli", nli_words(tmp_path))).datasets[0]
    few = nli.prepare(configure("nli", nli_words(tmp_path, "data.negative_ratio=1"))).datasets[0]
    positives = int(every.train.labels.sum())
    assert few.train.labels.sum() == positives
    assert len(few.train) == 2 * positives < len(every.train)
    assert len(few.test) == len(every.test)


def test_without_data_or_model_the_small_one_is_trained(tmp_path: Path):
    composed = configure("nli", ["cv.folds=5"])
    assert composed.values()["model.name"] == "modernbert-tiny"
    assert composed.values()["cv.folds"] == 5
    assert composed.origins["model.name"] == "experiment nli_embedded"
    assert any("synthetic data" in note for note in composed.notes)
    named = configure("nli", ["model.name=bert-base"])
    assert named.values()["training.learning_rate"] == 2e-5
    write_redsm5(tmp_path)
    real = configure("nli", [f"data.data_dir={tmp_path}"])
    assert real.values()["model.name"] == "gemma-3-1b-it"
    frozen = configure("nli", ["experiment=nli_full_5fold"])
    assert frozen.values()["model.freeze_encoder"] is False
    kept = configure("nli", ["model.freeze_encoder=true"])
    assert kept.values()["model.freeze_encoder"] is True


def test_a_frozen_encoder_is_left_as_it_was_and_an_adapter_is_all_that_is_saved(tmp_path: Path):
    from safetensors.torch import load_file

    result = run(tmp_path, "model.freeze_encoder=true", "training.max_steps=3")
    [saved] = (Path(result.run) / "checkpoints").glob("*/model.safetensors")
    assert set(load_file(saved)) == {"head.weight", "head.bias"}
    result = run(tmp_path, "model.method=lora", "training.max_steps=3")
    [saved] = (Path(result.run) / "checkpoints").glob("*/model.safetensors")
    names = set(load_file(saved)) - {"head.weight", "head.bias"}
    assert names
    assert all("lora_" in name for name in names)


def test_a_frozen_encoder_runs_once_and_the_scores_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    encode = EncoderClassifier.encode

    def counted(self: Any, input_ids: Any, layout: Any, *more: Any) -> Any:
        seen.append(int((layout.lengths > 1).sum()))  # an empty row has one token
        return encode(self, input_ids, layout, *more)

    monkeypatch.setattr(EncoderClassifier, "encode", counted)
    words = ("model.freeze_encoder=true", "training.num_epochs=3")
    cached = run(tmp_path, *words)
    [data] = nli.prepare(configure("nli", nli_words(tmp_path))).datasets
    assert sum(seen) == len(data.train) + len(data.validation) + len(data.test)
    monkeypatch.setattr(frozen, "_can_be_cached", lambda *_: False)
    plain = run(tmp_path, *words)
    tables = [read(Path(result.run) / "predictions.csv") for result in (cached, plain)]
    a, b = (arrays(table)[1] for table in tables)
    assert a == pytest.approx(b, abs=1e-5)


def test_a_validation_of_so_many_batches(tmp_path: Path):
    result = run(tmp_path, "training.eval_iters=1", "training.eval_batch_size=4")
    assert result.metrics["count"] > 4  # the test is whole
    [row] = [
        json.loads(line)
        for line in (Path(result.run) / "metrics.jsonl").read_text().splitlines()
        if '"evaluation"' in line
    ][:1]
    assert row["accuracy"] * 4 == int(row["accuracy"] * 4)


def test_packed_rows_train_the_same_job_and_the_first_lines_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    padded = run(tmp_path, *NO_DROPOUT)

    def packed(*args: Any, **more: Any) -> Plan:
        return replace(quick_plan(*args, **more), packed=True, gradient_accumulation_steps=1)

    monkeypatch.setattr(planner, "plan", packed)
    result = run(tmp_path, *NO_DROPOUT)
    log = (Path(result.run) / "train.log").read_text()
    assert "packed rows" in log
    assert "attention dropout 0" in log
    tables = [read(Path(done.run) / "predictions.csv") for done in (padded, result)]
    a, b = (arrays(table)[1] for table in tables)
    assert a == pytest.approx(b, abs=1e-4)


@pytest.mark.parametrize("packed", [True, False])
def test_all_folds_share_one_plan_and_its_shapes(tmp_path: Path, packed: bool):
    prepared = nli.prepare(configure("nli", nli_words(tmp_path, "cv.folds=3", "seed=5")))
    # The last fold has the longest steps, and a plan for the first fold's would cut them in two.
    scales = (1, 1, 3)
    datasets = tuple(
        replace(data, train=replace(data.train, lengths=data.train.lengths // 3 * scale + 1))
        for data, scale in zip(prepared.datasets, scales, strict=True)
    )
    prepared = replace(prepared, datasets=datasets)
    job = prepared.tuned_job(detect_once())
    assert [len(fold) for fold in job.question.folds] == [len(data.train) for data in datasets]
    whole = quick_plan(replace(job.question, pins={}), job.profile)
    plan = replace(whole, packed=packed, gradient_accumulation_steps=1)
    first, *others = (prepared.settings(fold, plan, torch.device("cpu"), 1) for fold in range(3))
    assert first.cuts[0].micro_batches == 1
    assert [other.cuts for other in others] == [first.cuts] * 2
    assert [each.seed for each in (first, *others)] == [5, 6, 7]
    for fold, data in enumerate(datasets):
        for step in deal_steps(data.train.lengths, plan.effective_batch_size, 5 + fold, 0):
            assert len(cut_step(data.train.lengths, step, first.cuts[0])[0]) == 1


def test_a_second_shape_is_compiled_where_it_saves_more_than_that_takes(tmp_path: Path):
    prepared = nli.prepare(configure("nli", nli_words(tmp_path)))
    job = prepared.tuned_job(detect_once())
    whole = quick_plan(replace(job.question, pins={}), job.profile)
    plan = replace(whole, packed=True, gradient_accumulation_steps=1, compile=True)

    def shapes(compiling: float) -> int:
        time = TimeEstimate(job_seconds=300.0, stages={"compile": compiling})
        settings = prepared.settings(0, replace(plan, time=time), torch.device("cpu"), 1)
        return len(settings.cuts[0].budgets)

    assert shapes(7.0) == 2  # it saves 3% of 300 s
    assert shapes(29.0) == 1  # on two cores


NO_DROPOUT = (
    "model.head_dropout=0",
    "model.attention_dropout=0",
    "model.feed_forward_dropout=0",
    "training.num_epochs=1",
)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "SDPA attention on padded rows"),
        (("model.freeze_encoder=true",), "Frozen encoder: its outputs were computed once"),
    ],
)
def test_the_first_lines_tell_of_the_model_that_was_built(
    tmp_path: Path, words: tuple[str, ...], line: str
):
    result = run(tmp_path, "training.max_steps=1", *words)
    assert line in (Path(result.run) / "train.log").read_text()
