"""Kinds of labels: told by their values, read from every format, spread over a split."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainfit.core.errors import BadInput
from trainfit.data.labels import LabelKind, infer_kind, read_label, strata_of
from trainfit.data.text_files import Columns, RowCount, infer_labels, read_chunks

JOINED = ["a|b", "a", "b|c", "a|c"] * 5


@pytest.mark.parametrize(
    ("values", "target", "separator"),
    [
        (["spam", "ham", "spam"], "single", None),
        ([0, 1, 1, 0], "single", None),
        (["0", "1", "2"] * 9, "single", None),
        ([1.0, 2.0, 1.0], "single", None),
        ([True, False], "single", None),
        (list(range(77)) * 6, "single", None),  # numbers of 77 classes
        ([f"{code:04}" for code in range(100, 160)], "single", None),  # as of trades or places
        (["3.7", "2.0", "4.1"], "regression", None),
        ([0.5, 1.0, 1.5, 1.0], "regression", None),
        (list(range(100, 160)), "regression", None),
        (["-1e3", "2.5e-1"], "regression", None),
        ([["a", "b"], [], ["c"]], "multi", None),
        ([["a"], ["b"], ["a"]], "single", None),  # as annotation tools write a class
        ([["0.5"], [0.25]], "regression", None),
        (["['a' 'b']", "['b' 'c']", "['c']"], "multi", ","),  # as NumPy prints it
        ([[0, 1], [1, 0]], "multi", None),
        (["3.7", "NaN", "2.2", "<NA>"], "regression", None),
        (JOINED, "multi", "|"),
        (["a; b", "b;c", "a"], "multi", ";"),
        (["a,b", "b,c", "c,a"], "multi", ","),
        (["a", "b", "c", "a,b", "a"], "multi", ","),  # few rows have two, and all occur alone
        (["['a', 'b']", "['b', 'c']", "['a', 'b']"], "multi", ","),
        (['["a", "b"]', '["b"]'] * 9, "multi", ","),  # two different lists alone
        (["Arts, leisure", "Law, order", "Arts, leisure"], "single", None),
        (["arts|leisure", *["law"] * 9], "single", None),
        (["A | B", "A | C", *"DEFGEFG"], "multi", "|"),  # few rows, and a part in two of them
        (["x ; y", "y", "z", "z", "z"], "multi", ";"),
        (["3.7", "n/a", "2.2"], "single", None),
        ([], "single", None),
        ([None, ""], "single", None),
    ],
)
def test_the_values_tell_the_kind(values: list[Any], target: str, separator: str | None):
    found = infer_kind(values)
    assert (found.target, found.separator) == (target, separator)


def test_decimal_commas_are_no_lists_where_semicolons_separate(tmp_path: Path):
    for name, values, target in (
        ("numbers", ["3,5", "4", "0,25"], "regression"),
        ("codes", ["3,5", "4,1", "1,3,5"], "multi"),
    ):
        path = tmp_path / f"{name}.csv"
        path.write_text("text;label\n" + "".join(f"words;{value}\n" for value in values))
        kind = infer_labels(path, Columns(), "auto")
        assert kind.target == target
    assert read_label("-3,5", LabelKind(target="regression", comma=True), "here") == -3.5
    assert infer_kind(["3,5", "4,5", "3,25"]).target == "multi"


@pytest.mark.parametrize(
    ("mark", "values", "number"),
    [
        (",", ["1,050.5", "999.25", "12,000"], "1,050.5"),
        (",", ["1,000", "2,000", "5,000"], "1,000"),  # not the labels 1, 2, 5 and 000
        (",", ["1.050,5", "999,25"], "1.050,5"),
        (",", [f"{share}%" for share in range(40)], "0%"),
        (",", [f"${price:,}.50" for price in range(990, 1030)], "$990.50"),
        (";", ["234", "1.050", "12.500"], "1.050"),  # not 234 and 1.05
        (";", ["0,250", "1.050,5"], "1.050,5"),
        (";", ["1,050", "0,250", "3"], None),
        (";", ["1.050", "2.125"], None),
        (",", ["101,204", "305,101", "204"], None),  # labels that are numbers
        (",", ["1,5", "2,7", "5"], None),
        (",", ["10%", "20%"], None),  # two classes
    ],
)
def test_numbers_as_people_write_them_are_refused_with_one_of_them(
    tmp_path: Path, mark: str, values: list[str], number: str | None
):
    rows = [f'{n} words{mark}"{value}"\n' for n, value in enumerate(values * 3)]
    (tmp_path / "a.csv").write_text(f"text{mark}label\n" + "".join(rows))
    if number is None:
        infer_labels(tmp_path / "a.csv", Columns(), "auto")
        return
    with pytest.raises(BadInput, match=re.escape(f"has numbers such as {number}; write each")):
        infer_labels(tmp_path / "a.csv", Columns(), "auto")


def test_what_is_asked_for_decides():
    assert infer_kind([0, 1], "regression").target == "regression"
    assert infer_kind(["1.5", "2.5"], "single").target == "single"
    assert infer_kind(["a", "b", "a;c"], "multi").separator == ";"
    assert infer_kind(["a", "b"], "multi").separator is None
    assert infer_kind([[0, 1], [1, 0]], "multi").by_place
    assert not infer_kind([[0, 1], [1]], "multi").by_place
    assert infer_kind(["1.0", "2", "nan"]).whole
    assert not infer_kind(["1.0", "a"]).whole


@pytest.mark.parametrize(
    ("labels", "left"),
    [
        (["yes", "no", "-", "yes"], ["yes", "no", "yes"]),  # SNLI
        (["+", "-", "0", "+"], ["+", "-", "0", "+"]),
        (["yes", "-", "yes"], ["yes", "-", "yes"]),
        ([0, 1, 2] * 10 + [-1], ["0", "1", "2"] * 10),  # datasets
        (["0", "1", "2"] * 10 + ["-1.0"], ["0", "1", "2"] * 10),
        ([0, 1, 2, -1] * 5, ["0", "1", "2", "-1"] * 5),
        ([0, 1] * 30 + [-1], ["0", "1"] * 30 + ["-1"]),  # a sentiment
        ([0, 1, 2] * 4000 + [-1] * 9, ["0", "1", "2"] * 4000 + ["-1"] * 9),  # sorted by class
        ([-2, -1, 0, 1, 2], ["-2", "-1", "0", "1", "2"]),
    ],
)
def test_a_mark_for_no_label_is_no_class(labels: list[Any], left: list[str], tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": "a", "label": one}) for one in labels))
    count, kind = RowCount(), infer_labels(path, Columns(), "auto")
    [chunk] = read_chunks(path, Columns(), 20_000, kind=kind, count=count)
    assert chunk.labels == left
    assert count.skipped == len(labels) - len(left)


def test_missing_labels_are_skipped_in_every_format(tmp_path: Path):
    labels = [1.0, float("nan"), 0.0, None]
    table = pa.table({"text": list("abcd"), "label": labels})
    pq.write_table(table, tmp_path / "a.parquet")
    rows = zip("abcd", labels, strict=True)
    lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.csv").write_text("text,label\na,1.0\nb,nan\nc,0.0\nd,\n")
    for name in ("a.parquet", "a.jsonl", "a.csv"):
        kind = infer_labels(tmp_path / name, Columns(), "auto")
        [chunk] = read_chunks(tmp_path / name, Columns(), kind=kind)
        assert (chunk.texts, chunk.labels) == (["a", "c"], ["1", "0"])


def test_true_and_false_are_the_same_in_every_format(tmp_path: Path):
    table = pa.table({"text": list("abcd"), "label": [True, False, True, False]})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("text,label\na,TRUE\nb,False\nc,true\nd,FALSE\n")
    for name in ("a.parquet", "a.csv"):
        kind = infer_labels(tmp_path / name, Columns(), "auto")
        [chunk] = read_chunks(tmp_path / name, Columns(), kind=kind)
        assert chunk.labels == ["true", "false", "true", "false"]
    assert read_label("True", infer_kind(["True", "half-true"]), "here") == "True"


@pytest.mark.parametrize(
    ("value", "kind", "label"),
    [
        (" b| a|b|", LabelKind(target="multi", separator="|"), ("a", "b")),
        ("", LabelKind(target="multi", separator="|"), ()),
        (None, LabelKind(target="multi"), ()),
        (["b", 3], LabelKind(target="multi"), ("3", "b")),
        ("['b', \"a\"]", LabelKind(target="multi", separator=","), ("a", "b")),
        ("['b' 'a' \"c, d\"]", LabelKind(target="multi"), ("a", "b", "c, d")),
        ("[0 1 1]", LabelKind(target="multi", by_place=True), ("1", "2")),
        ([0.0, 1.0, True], LabelKind(target="multi", by_place=True), ("1", "2")),
        ("nan", LabelKind(target="multi", separator=","), ()),
        (["a"], LabelKind(), "a"),
        ("1.0", LabelKind(whole=True), "1"),
        ("1.0", LabelKind(), "1.0"),
        ("007", infer_kind(["007", "7", "10"]), "007"),
        (" 3.5 ", LabelKind(target="regression"), 3.5),
        (4, LabelKind(target="regression"), 4.0),
    ],
)
def test_a_label_is_read(value: Any, kind: LabelKind, label: Any):
    assert read_label(value, kind, "here") == label


@pytest.mark.parametrize(
    "value", ["nan", "inf", "1_000", "private words", True, None, 10**400, [1, 2]]
)
def test_what_is_no_number_is_refused_and_not_shown(value: Any):
    with pytest.raises(BadInput, match="row 7: the label is no number") as caught:
        read_label(value, LabelKind(target="regression"), "row 7")
    assert "private" not in str(caught.value)


def test_ids_of_many_digits_are_classes_of_their_own(tmp_path: Path):
    ids = [str(2**53 + n % 3) for n in range(12)]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"words,{one}\n" for one in ids))
    kind = infer_labels(tmp_path / "a.csv", Columns(), "auto")
    [chunk] = read_chunks(tmp_path / "a.csv", Columns(), kind=kind)
    assert chunk.labels == ids


def test_lists_are_the_same_from_jsonl_and_parquet(tmp_path: Path):
    labels = [["a", "b"], [], ["c"]]
    rows = [{"text": f"t {n}", "label": label} for n, label in enumerate(labels)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    bits = pa.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], pa.list_(pa.float32(), 2))
    pq.write_table(pa.table({"text": list("abc"), "label": bits}), tmp_path / "bits.parquet")
    kind = infer_labels(tmp_path / "bits.parquet", Columns(), "auto")
    [chunk] = read_chunks(tmp_path / "bits.parquet", Columns(), kind=kind)
    assert chunk.labels == [("0",), ("1",), ("0", "1")]
    for name in ("a.jsonl", "a.parquet"):
        kind = infer_labels(tmp_path / name, Columns(), "auto")
        assert kind == LabelKind(target="multi")
        [chunk] = read_chunks(tmp_path / name, Columns(), kind=kind)
        assert chunk.labels == [("a", "b"), (), ("c",)]


def test_a_split_spreads_the_rarest_label_and_every_range_of_numbers():
    labels = np.array([[1, 0], [1, 1], [0, 0], [1, 0]], dtype=np.uint8)
    assert strata_of(labels).tolist() == [1, 2, 0, 1]
    numbers = np.random.default_rng(0).normal(size=1000)
    found = strata_of(numbers)
    assert np.bincount(found).tolist() == [100] * 10
    assert numbers[found == 0].max() < numbers[found == 9].min()
