"""Pairs of texts: tokenised as the model reads them, trained, and answered for."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics as reference

import trainfit
from job_tiny import be_quick, words, write_pairs
from trainfit.cli.main import run as run_command
from trainfit.conf.composition import compose, layer, options
from trainfit.core.errors import BadInput
from trainfit.data.synthetic import make_pairs
from trainfit.data.text_files import Columns
from trainfit.data.token_cache import tokenize_file
from trainfit.data.tokenizers import learn_tokenizer
from trainfit.data.tokens import encode_pairs, tokenize_texts
from trainfit.hpo.studies import read_setting
from trainfit.jobs import textclass
from trainfit.jobs.configuration import configure
from trainfit.jobs.registry import job_module


def test_a_pair_is_what_transformers_makes_of_it():
    tokenizer = learn_tokenizer(["alder birch cedar dogwood"] * 9, vocabulary=300)
    pairs = [("alder birch cedar dogwood alder birch", "cedar"), ("alder", "birch cedar " * 5)]
    types = "token_type_ids" in tokenizer.model_input_names
    for length in (8, 30):
        ids, kinds = encode_pairs(tokenizer, pairs, length)
        for at, (first, second) in enumerate(pairs):
            wanted = tokenizer(first, second, truncation="longest_first", max_length=length)
            assert ids[at] == wanted["input_ids"]
            assert kinds is None or kinds[at] == wanted["token_type_ids"]
    assert types == (kinds is not None)
    with pytest.raises(BadInput, match=r"data\.max_length is 3"):
        encode_pairs(tokenizer, pairs, 3)


def test_the_cache_holds_both_texts_and_their_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    path = write_pairs(tmp_path / "a.csv", 20)
    tokenizer = learn_tokenizer(["alder birch cedar juniper kapok maple"] * 9, vocabulary=300)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    columns = Columns(text="premise", second="hypothesis")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    firsts, seconds = ([row[name] for row in rows] for name in ("premise", "hypothesis"))
    wanted = tokenize_texts(tokenizer, firsts, np.zeros(20), seconds=seconds, max_length=12)
    assert wanted.types is not None
    for _ in range(2):
        found = tokenize_file(path, tokenizer, max_length=12, columns=columns).tokens
        np.testing.assert_array_equal(found.ids, wanted.ids)
        assert found.types is not None
        np.testing.assert_array_equal(found.types, wanted.types)
    alone = tokenize_file(path, tokenizer, max_length=12, columns=Columns(text="premise"))
    assert alone.tokens.types is None
    assert alone.tokens.lengths.sum() < found.lengths.sum()


def test_the_job_from_file_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    be_quick(monkeypatch)
    parts = {"train": 300, "validation": 60, "test": 60}
    files = [
        f"data.{name}={write_pairs(tmp_path / f'{name}.csv', rows, seed)}"
        for seed, (name, rows) in enumerate(parts.items())
    ]
    more = ("data.max_length=24", "training.num_epochs=2", "baselines=true")
    composed = configure("pairs", words(tmp_path, *files, *more))
    assert "the texts are the columns premise and hypothesis, the labels label" in composed.notes
    result = job_module("pairs").train(composed)
    folder = Path(result.run)
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    truth = np.array([int(row["label"]) for row in rows])
    scores = np.array([float(row["score"]) for row in rows])
    assert result.task == "pairs"
    assert result.metrics["f1"] == pytest.approx(reference.f1_score(truth, scores >= 0.5))
    figures = ("f1", "macro_f1", "accuracy")
    named = {f"{name}_{figure}" for name in ("majority", "bag_of_words") for figure in figures}
    assert set(result.baselines) == named
    assert run_command(["predict", str(folder), "--file", str(tmp_path / "test.csv")]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [row["p(same)"] for row in answers] == pytest.approx(scores, abs=1e-6)
    with (tmp_path / "test.csv").open() as file:
        held = list(csv.DictReader(file))
    first = held[0]
    words_of = ["--text", first["premise"], "--second", first["hypothesis"]]
    assert run_command(["predict", str(folder), *words_of]) == 0
    assert json.loads(capsys.readouterr().out)[0]["p(same)"] == pytest.approx(scores[0], abs=1e-6)
    api = trainfit.predict(folder, [(row["premise"], row["hypothesis"]) for row in held])
    assert [row["p(same)"] for row in api] == pytest.approx(scores, abs=1e-6)
    assert run_command(["predict", str(folder), *words_of[:2]]) == 2
    assert "takes pairs of texts" in capsys.readouterr().err
    assert run_command(["predict", str(folder), *words_of, "--text", "alder"]) == 2
    assert "2 of --text and 1 of --second; give as many of each" in capsys.readouterr().err


def test_made_up_pairs_are_about_what_both_texts_tell():
    several = make_pairs(seed=3, target="multi")
    assert several.seconds is not None
    for first, second, row in zip(several.texts, several.seconds, several.labels, strict=True):
        told = [{cue for cue in several.classes if cue in text} for text in (first, second)]
        shared = {cue for cue, there in zip(several.classes, row, strict=True) if there}
        assert shared <= told[0] & told[1]
    numbers = make_pairs(seed=3, target="regression")
    assert numbers.texts == several.texts
    np.testing.assert_allclose(numbers.labels, several.labels @ np.array([1.0, 2.5, 4.0]))
    classes = make_pairs(seed=3)
    assert 0.4 < classes.labels.mean() < 0.6


@pytest.mark.soak
@pytest.mark.timeout(480)
def test_made_up_pairs_are_learned(tmp_path: Path):
    result = textclass.train(configure("pairs", [f"runs_dir={tmp_path}", "tune=off"]))
    assert result.metrics["f1"] > 0.9 > result.baselines["bag_of_words_f1"]


def test_a_model_that_nobody_named_is_told_in_a_note(tmp_path: Path):
    path = write_pairs(tmp_path / "a.csv", 6)
    for task in ("pairs", "textclass"):
        more = ["data.text_column=premise"] if task == "textclass" else []
        composed = configure(task, [f"data.train={path}", *more])
        assert composed.config.model.name == "multilingual-e5-small"
        assert "no model is named: multilingual-e5-small" in " ".join(composed.notes)


def test_presets_and_studies_are_those_of_textclass():
    assert options("pairs", "hardware") == options("textclass", "hardware")
    assert options("pairs", "experiment") == ("pairs_embedded",)
    assert layer("pairs", "hardware", "t4") == layer("textclass", "hardware", "t4")
    composed = compose("pairs", ["hardware=t4"])
    assert composed.config.training.batch_size == 16
    assert composed.origins["training.batch_size"] == "preset t4"
    assert read_setting("pairs", []).hpo.metric == "macro_f1"


def test_a_pair_needs_two_columns(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\nalder,1\nbirch,0\n")
    with pytest.raises(BadInput, match="recognised as second"):
        configure("pairs", words(tmp_path, f"data.train={path}"))
    write_pairs(path, 6)
    twice = ("data.first_column=premise", "data.second_column=premise")
    with pytest.raises(BadInput, match="both the column premise"):
        textclass.prepare(configure("pairs", words(tmp_path, f"data.train={path}", *twice)))
