"""Data as people have it: any table, a folder of splits, blank rows; the columns are found."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from job_tiny import be_quick, words
from trainfit.cli.main import run
from trainfit.conf import TextclassConfig
from trainfit.conf.schema import TextclassData
from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.data.text_files import SPLITS, Columns, RowCount, infer_labels, read_chunks
from trainfit.data.tokenizers import learn_tokenizer
from trainfit.jobs.configuration import configure
from trainfit.jobs.known_data import columns_of
from trainfit.jobs.textclass import load_text_files

ROWS = [
    {"review": f"film {n}, seen; twice\nor more", "sentiment": ["bad", "good"][n % 2]}
    for n in range(60)
]


def put(path: Path, **how: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    pd.DataFrame(ROWS).to_csv(path, **{"index": False} | how)
    return path


def settled(*words: str) -> tuple[TextclassData, tuple[str, ...]]:
    composed = configure("textclass", [*words, "model.name=modernbert-tiny"])
    assert isinstance(composed.config, TextclassConfig)
    return composed.config.data, composed.notes


def test_columns_are_found_said_and_kept(tmp_path: Path):
    data, notes = settled(f"data.train={put(tmp_path / 'a.csv', sep=';')}")
    assert (data.text_column, data.label_column) == ("review", "sentiment")
    assert "the texts are the column review, the labels sentiment" in notes
    data, notes = settled(
        f"data.train={tmp_path / 'a.csv'}",
        "data.text_column=review",
        "data.label_column=sentiment",
    )
    assert data.text_column == "review"
    assert not any("the texts are" in note for note in notes)


def test_a_folder_of_files_is_its_splits(tmp_path: Path):
    put(tmp_path / "train.csv")
    put(tmp_path / "dev.tsv", sep="\t")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "test.parquet")
    data, notes = settled(f"data.train={tmp_path}")
    assert [data.train, data.validation, data.test] == [
        str(tmp_path / name) for name in ("train.csv", "dev.tsv", "test.parquet")
    ]
    assert "data.validation is dev.tsv of the same folder" in notes
    data, notes = settled(f"data.train={tmp_path}", "cv.folds=3")
    assert data.validation is None
    assert "dev.tsv is left out: cv.folds takes the validation data" in notes
    (tmp_path / "test.parquet").unlink()
    (tmp_path / "test.csv").write_text("review\nunlabelled\n")
    data, notes = settled(f"data.train={tmp_path}", f"data.validation={tmp_path / 'train.csv'}")
    assert (data.validation, data.test) == (str(tmp_path / "train.csv"), None)
    assert "test.csv is left out: it has no labels in the column sentiment" in notes
    for name in ("validation_matched.csv", "validation_mismatched.csv"):
        put(tmp_path / name)
    (tmp_path / "test.csv").write_text("review,sentiment\nsecret,-1\n")
    data, notes = settled(f"data.train={tmp_path}", f"data.test={tmp_path / 'dev.tsv'}")
    assert "not used: validation_matched.csv, validation_mismatched.csv" in "".join(notes)
    data, notes = settled(f"data.train={tmp_path}")
    assert (data.validation, data.test) == (str(tmp_path / "dev.tsv"), None)
    put(tmp_path / "test.csv").rename(tmp_path / "Test.CSV")
    (tmp_path / ".test.csv").write_text("hidden")
    data, notes = settled(f"data.train={tmp_path}")
    assert data.test == str(tmp_path / "Test.CSV")
    assert "hidden" not in "".join(notes)
    put(tmp_path / "train.json")
    with pytest.raises(BadInput, match=r"holds train.csv and train.json; name one of them"):
        settled(f"data.train={tmp_path}")


def test_a_clone_of_the_hub_is_its_splits(tmp_path: Path):
    (tmp_path / "README.md").write_text("a card")
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        put(folder / f"{split}-00000-of-00001.csv")
    data, _ = settled(f"data.train={tmp_path}")
    assert (data.train, data.test) == (
        str(folder / "train-00000-of-00001.csv"),
        str(folder / "test-00000-of-00001.csv"),
    )
    (folder / "test-00000-of-00001.csv").unlink()
    for part in ("00000", "00001"):
        put(folder / f"test-{part}-of-00002.csv")
    with pytest.raises(BadInput, match="holds test in 2 files; join them"):
        settled(f"data.train={tmp_path}")
    put(tmp_path / "other" / "train.csv")
    with pytest.raises(BadInput, match=r"holds no train\.csv"):
        settled(f"data.train={tmp_path}")


def test_columns_of_0_and_1_are_labels_like_lists_of_their_names(tmp_path: Path):
    names = ("toxic", "obscene", "threat")
    rows = [[n % 2, n % 3 == 0, n % 5 == 0] for n in range(60)]
    lists = [[name for name, bit in zip(names, row, strict=True) if bit] for row in rows]
    texts = [f"comment {n}" for n in range(60)]
    listed = tmp_path / "lists.jsonl"
    pd.DataFrame({"text": texts, "labels": lists}).to_json(listed, orient="records", lines=True)
    columns = columns_of(settled(f"data.train={listed}")[0])
    kind = infer_labels(listed, columns, "auto")
    [wanted] = read_chunks(listed, columns, kind=kind)
    table = pd.DataFrame(
        {"id": range(60), "text": texts} | dict(zip(names, zip(*rows, strict=True), strict=True))
    )
    table.astype({"toxic": float}).to_csv(tmp_path / "a.csv", index=False)
    table.to_json(tmp_path / "a.jsonl", orient="records", lines=True)  # true and false
    for path in (tmp_path / "a.csv", tmp_path / "a.jsonl"):
        _, notes = settled(f"data.train={path}")
        word = "data.label_column='toxic+obscene+threat'"
        assert f"2 other columns hold 0 and 1 too: {word} takes all as labels" in notes
        data, notes = settled(f"data.train={path}", word)
        assert "hold 0 and 1" not in "".join(notes)
        columns = columns_of(data)
        assert infer_labels(path, columns, "auto").target == "multi"
        [found] = read_chunks(path, columns, kind=infer_labels(path, columns, "auto"))
        assert (found.texts, found.labels) == (wanted.texts, wanted.labels)
    with pytest.raises(BadInput, match="has no column insult"):
        settled(f"data.train={tmp_path / 'a.csv'}", "data.label_column=toxic+insult")
    with_plus = table.rename(columns={"toxic": "a+b", "obscene": "a", "threat": "b"})
    with_plus.to_csv(tmp_path / "b.csv", index=False)
    data, _ = settled(f"data.train={tmp_path / 'b.csv'}", "data.label_column='a+b'")
    kind = infer_labels(tmp_path / "b.csv", columns_of(data), "auto")
    [found] = read_chunks(tmp_path / "b.csv", columns_of(data), kind=kind)
    assert found.labels == [str(int("toxic" in labels)) for labels in wanted.labels]
    table.loc[7, "toxic"] = -1
    table.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(BadInput, match="row 8, column toxic: the value is neither 0 nor 1"):
        infer_labels(tmp_path / "a.csv", columns, "auto")


def test_a_column_tells_the_splits(tmp_path: Path):
    names = ["train", "Train", "dev", "test", "test"]
    rows = [{"text": f"words {n}", "label": n % 2, "split": names[n % 5]} for n in range(50)]
    path = tmp_path / "a.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    data, notes = settled(f"data.train={path}")
    assert "the column split says which rows are of train, validation, test" in notes
    tokenizer = learn_tokenizer((row["text"] for row in rows), vocabulary=300, pad_id=0)
    [dataset] = load_text_files(
        path,
        tokenizer,
        validation=data.validation,
        test=data.test,
        columns=columns_of(data),
        max_length=64,
    )
    for part, number in (
        (dataset.train, (0, 1)),
        (dataset.validation, (2,)),
        (dataset.test, (3, 4)),
    ):
        expected = [n + 1 for n in range(50) if n % 5 in number]
        assert part.rows is not None
        assert part.rows.tolist() == expected
    folded, notes = settled(f"data.train={path}", "cv.folds=2")
    assert (folded.validation, folded.test) == (None, str(path))
    assert any("; cv.folds leaves out the 10 of validation" in note for note in notes)
    whole, _ = settled(f"data.train={path}", "data.split_column=null")
    assert (whole.split_column, whole.test) == (None, None)
    values = ["train", "test", "unused", None, "train"]
    table = pd.DataFrame(rows).assign(split=[values[n % 5] for n in range(50)])
    table.to_csv(path, index=False)
    partly, notes = settled(f"data.train={path}")
    said = "the column split says which rows are of train, test"
    assert f"{said}; 20 have other values, and are left out" in notes
    chunks = [read_chunks(path, columns_of(partly).of_part(one, alone=False)) for one in SPLITS]
    read = [[number for chunk in part for number in chunk.numbers] for part in chunks]
    by_split = table.groupby("split").groups
    assert [*map(set, read)] == [{n + 1 for n in by_split.get(one, ())} for one in SPLITS]
    for value in ("a", ["train", "plane"] * 25):
        pd.DataFrame(rows).assign(split=value).to_csv(path, index=False)
        unused, notes = settled(f"data.train={path}")
        assert unused.split_column is None
        assert any("the column split is not used" in note for note in notes)
    pd.DataFrame(rows).assign(split="a").to_csv(path, index=False)
    with pytest.raises(BadInput, match="no row has train in the column split"):
        settled(f"data.train={path}", "data.split_column=split")


def test_sequences_are_no_longer_than_a_model_s_positions(tmp_path: Path):
    path = put(tmp_path / "a.csv")
    short = tmp_path / "model"
    short.mkdir()
    fields = {"model_type": "roberta", "max_position_embeddings": 130, "pad_token_id": 1}
    fields |= {"vocab_size": 99, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    (short / "config.json").write_text(json.dumps(fields | {"intermediate_size": 8}))
    asked = [f"data.train={path}", f"model.name={short}", "model.weights=random"]
    composed = configure("textclass", asked)
    assert composed.config.data.max_length == 128
    assert any("has 128 positions: 128 is taken" in note for note in composed.notes)
    with pytest.raises(BadInput, match="set it to 128 or less"):
        configure("textclass", [*asked, "data.max_length=200"])


def test_a_saved_datasetdict_is_its_splits(tmp_path: Path):
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list(ROWS)
    names = datasets.ClassLabel(names=["bad", "good"])
    rows = rows.cast_column("sentiment", names)  # as numbers, with the names beside them
    hidden = rows.map(lambda _: {"sentiment": -1}, keep_in_memory=True)
    datasets.DatasetDict(train=rows, test=rows, dev=hidden).save_to_disk(tmp_path / "saved")
    data, notes = settled(f"data.train={tmp_path / 'saved'}")
    assert "dev is left out: it has no labels in the column sentiment" in notes
    assert (data.train, data.validation, data.test) == (
        str(tmp_path / "saved" / "train"),
        None,
        str(tmp_path / "saved" / "test"),
    )
    chunk = next(read_chunks(Path(data.train), Columns(text="review", label="sentiment")))
    assert chunk.texts == [row["review"] for row in ROWS]
    assert chunk.labels == [row["sentiment"] for row in ROWS]


def test_a_job_that_was_only_composed_finds_its_columns_too(tmp_path: Path):
    composed = configure(
        "textclass", [f"data.train={put(tmp_path / 'a.csv')}", "model.name=modernbert-tiny"]
    )
    assert isinstance(composed.config, TextclassConfig)
    data = replace(composed.config.data, text_column="auto", label_column="auto")
    assert columns_of(data) == Columns(text="review", label="sentiment")


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_blank_rows_are_skipped_and_counted(tmp_path: Path, ending: str):
    blank = [
        {"text": "", "label": "a"},
        {"text": " \t", "label": "a"},
        {"text": "x", "label": None},
    ]
    good = [{"text": f"words {n}", "label": "ab"[n % 2]} for n in range(37)]
    rows, path = [blank[0], *good[:20], blank[1], *good[20:], blank[2]], tmp_path / f"a.{ending}"
    if ending == "csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    elif ending == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + '\n{"text": "no label"}\n')
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    count = RowCount()
    chunks = list(read_chunks(path, Columns(), 10, count=count))
    assert [text for chunk in chunks for text in chunk.texts] == [row["text"] for row in good]
    assert [name for chunk in chunks for name in chunk.labels] == [row["label"] for row in good]
    skipped = 4 if ending == "jsonl" else 3
    assert count == RowCount(rows=37 + skipped, skipped=skipped)
    tokenizer = learn_tokenizer([row["text"] for row in good])
    for _ in range(2):  # from the cache too
        message = f"skipped {skipped} of {37 + skipped} rows without text or label"
        with pytest.warns(TrainfitWarning, match=message):
            (data,) = load_text_files(path, tokenizer, max_length=9)
        parts = (data.train, data.validation, data.test)
        numbers = sorted(row for part in parts for row in part.rows.tolist())
        assert numbers == [n for n, row in enumerate(rows, 1) if row in good]


def test_one_command_trains_on_a_table_of_reviews_and_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    be_quick(monkeypatch)
    path = put(tmp_path / "reviews.csv", sep="|", index=True)
    own = words(tmp_path, "data.max_length=16", "training.num_epochs=1")
    assert run(["train", "textclass", str(path), *own, "--batch-size", "8", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "note: the texts are the column review, the labels sentiment" in err
    folder = Path(json.loads(out)["run"])
    config = json.loads((folder / "config.json").read_text())
    assert config["config"]["data"]["label_column"] == "sentiment"
    assert config["origins"]["data.label_column"] == "found"
    assert run(["predict", str(folder), str(path)]) == 0
    out, err = capsys.readouterr()
    answers = json.loads(out)
    assert len(answers) == len(ROWS)
    assert "or more" not in err
    pd.read_csv(path, sep="|").assign(text="elm elm").to_json(tmp_path / "a.json", orient="records")
    assert run(["predict", str(folder), str(tmp_path / "a.json")]) == 0  # review, as in training
    assert json.loads(capsys.readouterr().out) == answers
    texts = ["", "fir " * 50, " ", "elm"]
    assert (
        run(["predict", str(folder), *(word for text in texts for word in ("--text", text))]) == 0
    )
    out, err = capsys.readouterr()
    assert [row["row"] for row in json.loads(out)] == [2, 4]
    assert "note: skipped 2 of 4 rows without text" in err
    assert "note: 1 of 2 rows have 16 tokens or more: what is beyond is cut off" in err
    assert run(["predict", str(folder), "--text", ""]) == 2
    assert "there is no text to classify" in capsys.readouterr().err


def test_the_only_row_of_a_class_is_trained_on_in_every_fold(tmp_path: Path):
    rows = [{"text": f"words {n}", "label": "ab"[n % 2]} for n in range(30)]
    rows[7]["label"] = "rare"
    pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    tokenizer = learn_tokenizer(row["text"] for row in rows)
    found = load_text_files(tmp_path / "a.csv", tokenizer, max_length=9, folds=3)
    for data in found:
        assert 8 in data.train.rows
        assert not {8} & {*data.validation.rows, *data.test.rows}
    held = sorted(row for data in found for row in data.validation.rows)
    assert held == sorted({*range(1, 31)} - {8, *found[0].test.rows})


FILES = {
    "header.csv": "text,label\n",
    "chat.jsonl": "".join(f'{{"messages": ["private"], "label": {n}}}\n' for n in range(2)),
    "three.csv": "a,b,c\nx,y,z\n",
    "headless.csv": "what a private film it was to see,1\nprivate again,0\n",
    "empty.csv": "",
    "one.csv": "text\nprivate\n",
    "notes.txt": "private",
    "list.json": "3",
}
MISTAKES = {
    "three.csv": "write data.text_column=a data.label_column=b",
    "three.csv data.text_column=review": "has no column review; its columns are a, b, c",
    "headless.csv": "begin with a line such as text,label",
    "empty.csv": "has no columns; begin with a line such as text,label",
    "header.csv": "has no rows",
    "chat.jsonl": "row 1, column messages: there is a list and no text",
    "one.csv": "no column is recognised as label; its columns are text",
    "notes.txt": "has the ending .txt; name it .csv or .tsv where it is a table",
    "list.json": "is not a list of JSON objects",
    "nowhere.csv": "no file",
    "folder": "holds no train.csv",
}


def test_mistakes_in_data_are_one_line_without_torch(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    script = """
import json, sys
from trainfit.cli.main import run
for line in json.load(sys.stdin):
    print("==", line, file=sys.stderr)
    assert run(["train", "textclass", *line.split()]) == 2
assert not {"torch", "pyarrow", "datasets"} & sys.modules.keys()
"""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(list(MISTAKES)),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert time.monotonic() - begun < 2 * len(MISTAKES)
    _, *answers = done.stderr.split("== ")
    for answer, (line, message) in zip(answers, MISTAKES.items(), strict=True):
        asked, said, *more = answer.splitlines()
        assert (asked, more) == (line, [])
        assert message in said
        assert "private" not in said
