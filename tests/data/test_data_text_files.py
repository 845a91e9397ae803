"""Text files in every format, the token cache, and splits of them."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.data import token_cache
from trainfit.data.columnar import choose_columns
from trainfit.data.row_files import column_names
from trainfit.data.synthetic import CLASSES, make_texts
from trainfit.data.text_files import Columns, read_chunks
from trainfit.data.token_cache import tokenize_file
from trainfit.data.tokenizers import learn_tokenizer
from trainfit.data.tokens import tokenize_texts
from trainfit.jobs.textclass import load_text_files, text_datasets

WHO = Columns(group="who")
FORMATS = ["csv", "jsonl", "parquet", "datasets"]
ROWS = [
    {"text": f'word{n % 7}, "quoted"\nline {n}', "label": [10, 2, 2, 1][n % 4], "who": f"w{n // 3}"}
    for n in range(48)
]


def put(folder: Path, kind: str, rows=ROWS, name: str = "data") -> Path:
    path = folder / (name if kind == "datasets" else f"{name}.{kind}")
    if kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=2)
    return path


@pytest.fixture(scope="module")
def tokenizer():
    return learn_tokenizer([row["text"] for row in ROWS])


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, kind: str):
    path = put(tmp_path, kind)
    chunks = list(read_chunks(path, Columns(group="who"), rows=20))
    assert [len(chunk.texts) for chunk in chunks] == [20, 20, 8]
    assert [text for chunk in chunks for text in chunk.texts] == [row["text"] for row in ROWS]
    assert [x for chunk in chunks for x in chunk.labels] == [str(row["label"]) for row in ROWS]
    assert [x for chunk in chunks for x in chunk.groups] == [row["who"] for row in ROWS]
    renamed = list(read_chunks(path, Columns(text="who", label="text")))
    assert renamed[0].texts[0] == "w0"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_tells_the_encoding(tmp_path: Path, encoding: str):
    path = put(tmp_path, "csv")
    path.write_text(path.read_text(), encoding=encoding)
    [chunk] = read_chunks(path, Columns())
    assert chunk.texts == [row["text"] for row in ROWS]


def test_a_field_may_be_as_long_as_a_book(tmp_path: Path):
    book = "word " * 200_000
    [chunk] = read_chunks(put(tmp_path, "csv", [{"text": book, "label": 1}]), Columns())
    assert chunk.texts == [book]


@pytest.mark.parametrize("name", ["a.csv.gz", "a.ZIP", "a.xlsx"])
def test_a_packed_file_or_a_sheet_is_answered_with_what_to_do(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(BadInput, match="save it as CSV" if "xlsx" in name else "unpack it first"):
        column_names(tmp_path / name)


def test_a_missing_file_is_answered_with_one_that_is_spelt_alike(tmp_path: Path):
    put(tmp_path, "csv")
    for name, fix in (("dta.csv", "did you mean data.csv"), ("reviews.csv", "check data.train")):
        with pytest.raises(BadInput, match=f"no file .*{name}; {fix}"):
            column_names(tmp_path / name)


def test_a_file_of_pairs_is_sent_to_its_job():
    found, auto = ["premise", "hypothesis", "label"], {"text": "auto", "label": "auto"}
    keys = {"text": "data.text_column", "label": "data.label_column"}
    with pytest.raises(BadInput, match="or take the job pairs"):
        choose_columns(found, auto, "here", keys)


def test_objects_inside_objects_have_names_with_dots(tmp_path: Path):
    rows = [{"id": n, "data": {"text": f"t{n}"}, "meta": {"by": {"label": n}}} for n in (1, 2)]
    path = put(tmp_path, "jsonl", rows)
    there = column_names(path)
    assert there == ["id", "data.text", "meta.by.label"]
    found = choose_columns(there, {"text": "auto", "label": "auto"}, "here", {})
    [chunk] = read_chunks(path, Columns(**found))
    assert (chunk.texts, chunk.labels) == (["t1", "t2"], ["1", "2"])


def test_rows_of_the_test_that_were_trained_on_are_told(tmp_path: Path, tokenizer):
    rows = [{"text": f'word{n % 7}, "quoted"\nline {n}', "label": n % 2} for n in range(40)]
    train, test = put(tmp_path, "csv", rows), put(tmp_path, "csv", rows[:6], "test")
    with pytest.warns(TrainfitWarning, match="test rows are in the training data too") as told:
        (data,) = load_text_files(train, tokenizer, test=test, max_length=32)
    count = int((data.train.rows <= 6).sum())
    assert str(told[0].message).startswith(f"{count} of 6 test rows")


def test_classes_that_nothing_is_measured_of_are_told(tmp_path: Path, tokenizer):
    rows = [*rows_of(60), {"text": "word x", "label": "rare"}, {"text": "word y", "label": "odd"}]
    with pytest.warns(TrainfitWarning, match="of 4 classes some have no row") as told:
        (data,) = load_text_files(put(tmp_path, "csv", rows), tokenizer, max_length=32)
    assert data.metadata["test"]["by_class"].count(0) == 2
    assert "2 in the test part, 2 in the validation part" in str(told[0].message)


@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_and_labels_of_a_file_are_those_of_its_texts(tmp_path: Path, tokenizer, kind: str):
    read = tokenize_file(put(tmp_path, kind), tokenizer, max_length=9, columns=Columns(group="who"))
    assert read.classes == ["1", "2", "10"]  # as numbers, not as strings
    labels = [read.classes.index(str(row["label"])) for row in ROWS]
    plain = tokenize_texts(tokenizer, [row["text"] for row in ROWS], labels, max_length=9)
    assert read.tokens.labels.tolist() == labels
    assert read.tokens.lengths.tolist() == plain.lengths.tolist()
    assert read.tokens.ids.tolist() == plain.ids.tolist()
    assert isinstance(read.tokens.ids, np.memmap)
    groups = read.tokens.groups
    assert groups is not None
    assert [groups[n] == groups[0] for n in range(5)] == [True, True, True, False, False]


def test_the_cache_is_used_again_and_any_change_makes_a_new_one(
    tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    path = put(tmp_path, "csv")
    made = []
    real = token_cache.read_chunks
    monkeypatch.setattr(
        token_cache,
        "read_chunks",
        lambda path, *how, **more: made.append(path) or real(path, *how, **more),
    )

    def read(path=path, tokenizer=tokenizer, max_length=9, columns=WHO):
        before = len(made)
        result = tokenize_file(path, tokenizer, max_length=max_length, columns=columns)
        return result, len(made) > before

    first, new = read()
    assert new
    again, new = read()
    assert not new
    assert again.tokens.ids.tolist() == first.tokens.ids.tolist()
    moved = path.rename(tmp_path / "elsewhere.csv")
    assert not read(moved)[1]
    assert read(moved, max_length=8)[1]
    assert read(moved, columns=Columns())[1]
    assert read(moved, tokenizer=learn_tokenizer(["other words"]))[1]
    moved.write_text(moved.read_text() + "more,10,w99\n")
    longer, new = read(moved)
    assert new
    assert len(longer.tokens) == 49
    whole = longer.tokens.ids.tolist()
    tokens = max((tmp_path / "cache" / "tokens").glob("*/tokens"), key=lambda p: p.stat().st_mtime)
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.warns(TrainfitWarning, match="is damaged and was thrown away"):
        mended, new = read(moved)
    assert new
    assert mended.tokens.ids.tolist() == whole


def test_classes_that_differ_in_capitals_alone_are_told(tmp_path: Path, tokenizer):
    names = ["pos", "POS", "Pos ", "neg", "so so", "So  so"]
    rows = [{"text": f"word{n} words", "label": names[n % 6]} for n in range(60)]
    path = put(tmp_path, "jsonl", rows)
    with pytest.warns(TrainfitWarning) as told:
        load_text_files(path, tokenizer, columns=Columns(), max_length=9)
    said = "classes of their own: POS and Pos and pos, (a label of several words) and (a label"
    assert any(str(one.message).startswith(said) for one in told)


@pytest.mark.soak
def test_several_processes_make_the_same_tokens_in_the_same_order(
    tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
):
    rows = [{"text": f"word{n % 13} line {n}", "label": n % 2} for n in range(5000)]
    path = put(tmp_path, "jsonl", rows)
    results, heard = [], []
    for processes in (1, 2):
        monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / str(processes)))
        read = tokenize_file(
            path,
            tokenizer,
            max_length=6,
            columns=Columns(),
            processes=processes,
            progress=heard.append,
        )
        results.append(read.tokens)
    assert results[0].ids.tolist() == results[1].ids.tolist()
    assert results[0].labels.tolist() == results[1].labels.tolist() == [n % 2 for n in range(5000)]
    assert heard == [2048, 4096, 5000] * 2


def test_a_failed_run_leaves_nothing_in_the_cache(
    tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    rows = [*ROWS, {"text": 3, "label": 1, "who": "w"}]
    with pytest.raises(BadInput, match="row 49, column text: there is a number and no text"):
        tokenize_file(put(tmp_path, "jsonl", rows), tokenizer, max_length=9, columns=Columns())
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\n", "no rows"),
        ("a.csv", "text,class\nx,1\n", "no column label"),
        ("a.csv", "text,label\nx,\n ,1\n,\n", "has no rows with a text and a label"),
        ("a.csv", 'text,label\n"x,1\n', "row 1 cannot be read"),
        (
            "a.csv",
            "text,label\nx,private\n" + "".join(f"x,{n}.5\n" for n in range(30)),
            "most of them numbers; set data.target=regression",
        ),
        ("a.jsonl", '{"text": "x", "label": 1}\nprivate words\n', "row 2 is not a JSON object"),
        ("a.jsonl", '{"text": "private words"}\n', "no column label"),
        ("a.jsonl", '{"text": "private words", "label": 0.5}\n', "row 1, column label"),
        ("a.jsonl", '{"text": 3, "label": 1}\n', "row 1, column text"),
        ("a.parquet", "private words", "not a Parquet file"),
        ("a.txt", "private words", "ending .txt"),
        ("folder/x", "private words", "no state.json"),
        ("folder/dataset_dict.json", "{}", "several splits"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, tokenizer, name, content, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    path = tmp_path / name.split("/")[0]
    with pytest.raises(BadInput) as caught:
        tokenize_file(path, tokenizer, max_length=9, columns=Columns())
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert "private" not in str(caught.value)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_missing_file_and_a_missing_column_are_named(tmp_path: Path, tokenizer, kind: str):
    with pytest.raises(BadInput, match=r"no file .*nowhere\.csv"):
        load_text_files(tmp_path / "nowhere.csv", tokenizer, max_length=9)
    with pytest.raises(BadInput, match="no column subject"):
        load_text_files(
            put(tmp_path, kind), tokenizer, max_length=9, columns=Columns(text="subject")
        )


def rows_of(count: int, start: int = 0, classes: int = 2) -> list[dict]:
    return [
        {"text": f"word{n} {'abc'[n % classes]}", "label": "abc"[n % classes], "who": f"w{n // 4}"}
        for n in range(start, start + count)
    ]


def test_what_has_no_file_is_split_from_training_by_group(tmp_path: Path, tokenizer):
    train = put(tmp_path, "csv", rows_of(200), "train")
    options = {"max_length": 9, "columns": Columns(group="who"), "seed": 3}
    (only,) = load_text_files(train, tokenizer, **options)
    parts = (only.train, only.validation, only.test)
    assert [len(part) for part in parts] == [128, 32, 40]
    groups = [set(part.groups.tolist()) for part in parts]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 50
    test = put(tmp_path, "jsonl", rows_of(40, 400), "test")
    (tested,) = load_text_files(train, tokenizer, test=test, **options)
    assert [len(p) for p in (tested.train, tested.validation, tested.test)] == [160, 40, 40]
    held = put(tmp_path, "parquet", rows_of(20, 600), "held")
    (all_given,) = load_text_files(train, tokenizer, validation=held, test=test, **options)
    sizes = [len(p) for p in (all_given.train, all_given.validation, all_given.test)]
    assert sizes == [200, 20, 40]
    (held_out,) = load_text_files(train, tokenizer, validation=held, **options)
    assert [len(p) for p in (held_out.train, held_out.test)] == [160, 40]
    folds = load_text_files(train, tokenizer, folds=4, **options)
    assert [len(fold.validation) for fold in folds] == [40] * 4
    assert len({id(fold.test) for fold in folds}) == 1
    with pytest.raises(BadInput, match=r"cv\.folds is 3"):
        load_text_files(train, tokenizer, validation=held, folds=3, **options)


def test_a_group_in_two_files_is_a_leak(tmp_path: Path, tokenizer):
    train, test = (
        put(tmp_path, "csv", rows_of(80, start), name) for name, start in (("train", 0), ("t", 76))
    )
    with pytest.raises(BadInput, match="1 groups are in both"):
        load_text_files(train, tokenizer, test=test, max_length=9, columns=Columns(group="who"))


def test_labels_of_other_files_are_numbered_as_in_training(tmp_path: Path, tokenizer):
    train = put(tmp_path, "csv", rows_of(90, classes=3), "train")
    only_c = [row for row in rows_of(30, 300, 3) if row["label"] == "c"]
    (dataset,) = load_text_files(
        train, tokenizer, test=put(tmp_path, "csv", only_c, "test"), max_length=9
    )
    assert dataset.metadata["classes"] == ["a", "b", "c"]
    assert dataset.test.labels.tolist() == [2] * 10
    assert dataset.metadata["test"]["by_class"] == [0, 0, 10]
    unknown = [{"text": "x", "label": "d"}]
    with pytest.raises(BadInput, match=r"has a label that the training data has not \(d\)"):
        load_text_files(train, tokenizer, test=put(tmp_path, "csv", unknown, "u"), max_length=9)


def test_class_weights_are_balanced_as_in_scikit_learn():
    from sklearn.utils.class_weight import compute_class_weight

    made = make_texts("small", 2)
    tokens = tokenize_texts(learn_tokenizer(made.texts), made.texts, made.labels, max_length=192)
    (dataset,) = text_datasets(tokens, CLASSES, seed=1)
    labels = dataset.train.labels
    expected = compute_class_weight("balanced", classes=np.arange(2), y=labels)
    assert dataset.metadata["class_weights"] == pytest.approx(expected.tolist())
    assert made.labels.mean() == 0.2
    assert tokens.lengths.max() <= 192
    with pytest.raises(BadInput, match="all training rows have the label clean"):
        text_datasets(tokens.subset(np.flatnonzero(tokens.labels == 0)), ["clean"])
