"""Epochs, steps and learning rates that follow from the rows and the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainfit
from job_tiny import write_pairs, write_texts
from trainfit.jobs.configuration import configure

BASE = "model.name=bert-base"
"""A model whose learning rate is the default."""


def training(task: str, *words: str) -> dict[str, Any]:
    composed = configure(task, words)
    names = ("num_epochs", "early_stopping_patience", "effective_batch_size", "learning_rate")
    return {name: getattr(composed.config.training, name) for name in names}


def chosen(task: str, *words: str) -> tuple[float, int | None, Any]:
    found = training(task, *words)
    return found["num_epochs"], found["early_stopping_patience"], found["effective_batch_size"]


@pytest.mark.parametrize(
    ("rows", "epochs", "batch"),
    [
        (60, 20, 16),  # 38 to train on: never more than 20 epochs, in steps of 16
        (500, 20, "auto"),  # 320 to train on: 200 steps of 32
        (1000, 10, "auto"),
    ],
)
def test_few_rows_take_more_epochs_and_no_early_stopping(
    rows: int, epochs: int, batch: Any, tmp_path: Path
) -> None:
    file = write_texts(tmp_path / "texts.csv", rows)
    assert chosen("textclass", f"data.train={file}", BASE) == (epochs, None, batch)
    plan = trainfit.plan("textclass", f"data.train={file}", BASE, gpu="t4")
    assert plan.workload.epochs == epochs  # the plan is that of the run
    assert plan.effective_batch_size == (32 if batch == "auto" else batch)


def test_rows_that_are_held_out_do_not_count(tmp_path: Path) -> None:
    train = f"data.train={write_texts(tmp_path / 'texts.csv', 1000)}"
    test = f"data.test={write_texts(tmp_path / 'test.csv', 20, seed=1)}"
    validation = f"data.validation={write_texts(tmp_path / 'validation.csv', 20, seed=2)}"
    assert chosen("textclass", train, BASE, test)[0] == 8  # 800 rows
    assert chosen("textclass", train, BASE, test, validation)[0] == 7  # 1,000
    assert chosen("textclass", train, BASE, "cv.folds=2")[0] == 20  # 320


def test_enough_rows_have_the_usual_epochs(tmp_path: Path) -> None:
    train = f"data.train={write_texts(tmp_path / 'texts.csv', 3400)}"  # 2,176 to train on
    assert chosen("textclass", train, BASE) == (3, 2, "auto")


def test_what_somebody_set_stays(tmp_path: Path) -> None:
    train = f"data.train={write_texts(tmp_path / 'texts.csv', 60)}"
    assert chosen("textclass", train, BASE, "training.num_epochs=3") == (3, 2, "auto")
    assert chosen("textclass", train, BASE, "training.max_steps=9") == (3, 2, "auto")
    patience = "training.early_stopping_patience=2"
    assert chosen("textclass", train, BASE, patience) == (20, 2, 16)
    assert chosen("textclass", train, BASE, "training.batch_size=8") == (20, None, "auto")
    assert chosen("textclass", train, "experiment=t4_textclass") == (3, 2, "auto")
    assert chosen("textclass") == (14, 2, "auto")  # made up: the small experiment


def test_pairs_have_the_same_rule(tmp_path: Path) -> None:
    file = write_pairs(tmp_path / "pairs.csv", 60)
    assert chosen("pairs", f"data.train={file}", BASE) == (20, None, 16)


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ((BASE,), 2e-5),
        (("model.name=multilingual-e5-small",), 5e-5),
        ((BASE, "model.method=lora"), 2e-4),
        ((BASE, "model.method=dora"), 2e-4),
        ((BASE, "model.freeze_encoder=true"), 1e-3),
        (("model.name=multilingual-e5-small", "training.learning_rate=1e-5"), 1e-5),
        ((BASE, "model.weights=random", "model.method=lora"), 2e-5),
        (("experiment=t4_textclass", "model.method=lora"), 2e-5),
    ],
)
def test_learning_rate_of_small_models_adapters_and_heads(
    words: tuple[str, ...], rate: float, tmp_path: Path
) -> None:
    train = f"data.train={write_texts(tmp_path / 'texts.csv', 60)}"
    assert training("textclass", train, *words)["learning_rate"] == rate


def test_a_file_without_its_key_is_answered_with_the_key(tmp_path: Path) -> None:
    file = write_texts(tmp_path / "texts.csv", 60)
    with pytest.raises(trainfit.BadInput, match=r"data as data\.train="):
        trainfit.train("textclass", str(file))


def test_a_note_says_what_was_chosen(tmp_path: Path) -> None:
    train = f"data.train={write_texts(tmp_path / 'texts.csv', 60)}"
    composed = configure("textclass", [train, "model.name=multilingual-e5-small"])
    assert any("38 rows to train on: 20 epochs instead of 3" in note for note in composed.notes)
    assert any("a learning rate of 5e-05 instead of 2e-05" in note for note in composed.notes)
    assert composed.origins["training.num_epochs"] == "the rows"
    assert composed.origins["training.learning_rate"] == "the model"
