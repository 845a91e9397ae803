"""No text of the data reaches a message, a cache or a model's vocabulary."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from job_tiny import be_quick, words
from trainfit.cli.main import run
from trainfit.core.errors import BadInput
from trainfit.data.labels import check_classes
from trainfit.jobs import textclass
from trainfit.jobs.configuration import configure

PLANTED = "quabberword"
"""Stands in cells of the data alone."""


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))


def table(path: Path, rows: list[dict[str, str]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def posts(rows: int) -> list[dict[str, str]]:
    """A long and a short text, an id and a label in each row."""
    return [
        {
            "text": f"i {PLANTED} and number {n} of the words that nobody may read",
            "title": f"my {PLANTED} {n}",
            "essay": f"{PLANTED} " * 30,
            "post_id": f"{PLANTED}_{n}",
            "label": "yes" if n % 2 else "no",
        }
        for n in range(rows)
    ]


def kept(tmp_path: Path, data: Path) -> list[Path]:
    return [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path.parent != data and PLANTED.encode() in path.read_bytes()
    ]


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("column", "says"),
    [
        ("text", "40 different labels in 40 rows"),
        ("title", "40 different labels in 40 rows"),
        ("essay", "characters"),
        ("post_id", "40 different labels in 40 rows"),
    ],
)
def test_a_column_of_texts_is_refused_and_not_shown(
    column: str, says: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = tmp_path / "data"
    data.mkdir()
    path = table(data / f"posts.{ending}", posts(40))
    own = words(tmp_path, f"data.train={path}", f"data.label_column={column}")
    assert run(["train", "textclass", *own]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert [line for line in said.err.splitlines() if " note: " not in line] == [
        said.err.splitlines()[-1]
    ]
    assert PLANTED not in said.err + said.out
    assert not kept(tmp_path, data)


def test_texts_as_labels_of_a_test_file_are_not_shown_or_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = tmp_path / "data"
    data.mkdir()
    train = table(data / "train.csv", posts(40))
    other = [row | {"label": row["title"]} for row in posts(30)]
    own = [f"data.train={train}", f"data.test={table(data / 'test.csv', other)}"]
    assert run(["train", "textclass", *words(tmp_path, *own)]) == 2
    said = capsys.readouterr().err
    assert "30 labels that the training data has not" in said
    assert PLANTED not in said
    assert not kept(tmp_path, data)


def test_a_learned_tokenizer_has_no_rare_word(tmp_path: Path):
    rows = [
        {"text": "a common word " + PLANTED * (n < 49), "label": str(n % 2)} for n in range(120)
    ]
    data = tmp_path / "data"
    data.mkdir()
    path = table(data / "train.csv", rows)
    prepared = textclass.prepare(configure("textclass", words(tmp_path, f"data.train={path}")))
    vocabulary = prepared.chosen.tokenizer.get_vocab()
    assert "Ġcommon" in vocabulary
    assert not [token for token in vocabulary if "quab" in token]
    assert not kept(tmp_path, data)


@given(st.integers(2, 200), st.integers(3, 6), st.booleans())
def test_many_classes_of_a_few_rows_are_classes(classes: int, each: int, spaced: bool):
    names = [f"ask about {n}" if spaced else f"intent_{n}" for n in range(classes)]
    check_classes(names, classes * each, "x")


def test_a_class_may_have_few_rows_where_there_are_few():
    check_classes(["yes", "no", "maybe"], 3, "x")
    check_classes(["very good", "very bad"], 4, "x")
    check_classes(["a refund for an order that came too late"] * 1 + ["other"], 10, "x")


@example([str(n) for n in range(20)] + ["0\x1f"])
@given(st.lists(st.text(min_size=1, max_size=40), min_size=21, max_size=60, unique=True))
def test_as_many_labels_as_rows_are_no_classes(names: list[str]):
    with pytest.raises(
        BadInput, match=rf"{len(names)} different labels in {len(names)} rows|words"
    ):
        check_classes(names, len(names), "x")
