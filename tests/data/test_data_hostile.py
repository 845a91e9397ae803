"""Data files that are damaged, hostile or of another kind: one line each, and no text of theirs."""

import json
import os
import random
import re
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from trainfit.core.errors import BadInput
from trainfit.data import columnar
from trainfit.data.corpus import find_files
from trainfit.data.row_files import check_file, read_lines
from trainfit.data.text_files import Columns, read_chunks, read_texts
from trainfit.data.token_files import open_tokens

GOOD = '{"text": "private words", "label": "a"}\n'
BAD_JSONL = {
    "row 1 is not a JSON object": "[" * 100_000 + "\n",
    "row 2 is not a JSON object": GOOD + '{"text": "private", "label": nan}\n',
    "row 1 is not a JSON": '{"text": "private", "label": ' + "9" * 5000 + "}\n",
    "same key twice": '{"text": "private", "text": "private", "label": 1}\n',
    "surrogate pair": '{"text": "private \\ud83d", "label": "a"}\n',
    "row 1, column label: half of": '{"text": "private", "label": "\\udfff"}\n',
    "label is a number, but text in row 1": GOOD + '{"text": "private", "label": 1}\n',
    "label is true or false": '{"text": "x", "label": 1}\n{"text": "x", "label": true}\n',
    "label has 300 characters": '{"text": "x", "label": "' + "private " * 37 + 'four"}\n',
    "line 1 has a NUL": '{"text": "private\0", "label": "a"}\n',
}
BAD_BYTES = {
    "has a NUL": "text,label\nprivate,1\n".encode("utf-16-le"),
    "is not UTF-8 text": ("text,label\n" + "это личное,1\n" * 9).encode("windows-1251"),
    "no column text": b"",
    "column text twice": b"text,label,text\nprivate,1,private\n",
    "row 1 has 3 fields": b"text,label\nprivate,1,2\n",
    "row 1 cannot be read": b'text,label\n"private,1\n' + b"private," * 30_000,
}


def refused(read) -> str:
    with pytest.raises(BadInput) as caught:
        list(read())
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert "private" not in text
    return text


@pytest.mark.parametrize("message", list(BAD_JSONL))
def test_bad_jsonl(tmp_path: Path, message: str):
    path = tmp_path / "a.jsonl"
    path.write_text(BAD_JSONL[message])
    assert message in refused(lambda: read_chunks(path, Columns()))


@pytest.mark.parametrize("message", list(BAD_BYTES))
def test_bad_csv(tmp_path: Path, message: str):
    path = tmp_path / "a.csv"
    path.write_bytes(BAD_BYTES[message])
    assert message in refused(lambda: read_chunks(path, Columns()))


@pytest.mark.soak
def test_a_small_parquet_file_with_gigabytes_inside_is_refused_unread(tmp_path: Path):
    pages = pa.table({"text": ["a " * (30 << 20)] * 10, "label": ["x", "y"] * 5})
    pq.write_table(pages, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    begun = time.monotonic()
    said = refused(lambda: read_chunks(tmp_path / "a.parquet", Columns()))
    assert "holds 0.6 GiB or more in a small file" in said
    assert time.monotonic() - begun < 60  # reading it takes minutes
    assert len(list(read_texts(tmp_path / "a.parquet", "label"))) == 10


def test_a_text_that_a_parquet_file_repeats_is_counted_each_time(tmp_path: Path):
    for rows, longest in ((100_000, 1 << 20), (300, 1 << 18)):
        numbers = pa.array(range(rows)).cast(pa.int32())
        texts = ["a " * (longest // 2), "b"]
        column = pa.DictionaryArray.from_arrays(pc.bit_wise_and(numbers, 1), texts)
        table = pa.table({"text": column, "label": numbers, "list": [["a", None]] * rows})
        pq.write_table(table, tmp_path / "a.parquet", compression="zstd", store_schema=False)
        if rows > 1000:
            said = refused(lambda: read_chunks(tmp_path / "a.parquet", Columns()))
            [shown] = re.findall(r"holds ([\d.]+) GiB or more in a small file", said)
            assert 4 < float(shown) <= rows / 2 * (longest + 1) / 2**30
    for chunk in read_chunks(tmp_path / "a.parquet", Columns(), 1):
        assert chunk.texts[0] == texts[int(chunk.labels[0]) % 2]
    assert chunk.numbers == [300]


def test_a_byte_order_mark_is_read(tmp_path: Path):
    for name, content in (("a.csv", "text\nwords\n"), ("a.jsonl", '{"text": "words"}\n')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert list(read_texts(tmp_path / name, "text")) == ["words"]


def test_a_line_without_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainfit.data.row_files.LONGEST_LINE", 1 << 20)
    (tmp_path / "a.jsonl").write_text("private" * (1 << 18))
    assert "1 million characters" in refused(lambda: read_lines(tmp_path / "a.jsonl"))


def test_text_and_label_are_two_columns(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(GOOD)
    columns = Columns(text="text", label="text")
    assert "both the column" in refused(lambda: read_chunks(tmp_path / "a.jsonl", columns))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "a.txt"])
def test_what_is_no_regular_file_is_refused_by_its_kind(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / name)
    for read in (check_file, lambda path: list(read_texts(path, "text"))):
        with pytest.raises(BadInput, match=r"a pipe|the ending"):
            read(tmp_path / name)
    with pytest.raises(BadInput, match="a pipe"):
        find_files([tmp_path / name])
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(BadInput, match="a device"):
        check_file(tmp_path / name)
    with pytest.raises(BadInput, match="too long"):
        check_file(tmp_path / ("x" * 5000))


def test_a_binary_file_is_no_corpus(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("private".encode("utf-16"))
    with pytest.raises(BadInput, match="NUL bytes"):
        find_files([tmp_path / "a.txt"])


def test_a_vocabulary_beyond_memory_is_refused(tmp_path: Path):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(bytes(64))
    for size in (2**40, -1, True, "a", [1]):
        (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": size}))
        with pytest.raises(BadInput, match="vocab_size"):
            open_tokens(tmp_path)
    for dtype in ([], {}, "object", None):
        (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": 9, "dtype": dtype}))
        with pytest.raises(BadInput, match="dtype"):
            open_tokens(tmp_path)


# ── Parquet and saved datasets ────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rows = [{"text": f"private {n} " + "abc" * 20, "label": n % 3} for n in range(300)]
    return pa.Table.from_pylist(rows)


def saved(folder: Path, table: pa.Table) -> Path:
    """As datasets' save_to_disk writes it."""
    folder.mkdir()
    with (
        pa.OSFile(str(folder / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=100)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    return folder


def damaged(data: bytes, seed: int) -> bytes:
    """Some bytes flipped, near the ends where the structure is; every third one cut off."""
    draw = random.Random(seed)
    changed = bytearray(data)
    for _ in range(8):
        at = min(draw.randrange(len(changed)), draw.randrange(len(changed)), 2000)
        changed[at if draw.random() < 0.5 else -at - 1] = draw.choice([0, 255, draw.randrange(256)])
    return bytes(changed[: draw.randrange(len(changed))] if seed % 3 == 0 else changed)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_columnar_files_are_one_line(tmp_path: Path, table: pa.Table, seed: int):
    folder = saved(tmp_path / "data", table)
    pq.write_table(table, tmp_path / "a.parquet")
    for file, path in ((tmp_path / "a.parquet",) * 2, (folder / "a.arrow", folder)):
        assert len(list(read_texts(path, "text"))) == 300 if seed == 0 else True
        file.write_bytes(damaged(file.read_bytes(), seed))
        said = ""
        try:
            assert len(list(read_texts(path, "text"))) <= 300
        except BadInput as error:
            said = str(error)
        assert not said or "is damaged, or not a" in said
        assert "private" not in said


def test_columns_that_cannot_be_used_are_named(tmp_path: Path, table: pa.Table):
    twice = pa.table([table["text"], table["text"]], names=["text", "text"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    assert "column text twice" in refused(lambda: read_texts(tmp_path / "twice.parquet", "text"))
    nested = pa.table({"text": [{"a": "private"}], "when": [pa.scalar(1, pa.timestamp("s"))]})
    pq.write_table(nested, tmp_path / "nested.parquet")
    assert "nested" in refused(lambda: read_texts(tmp_path / "nested.parquet", "text"))


@pytest.mark.parametrize(
    "state", ["", "[]", "{}", '{"_data_files": 3}', "../a.arrow", "/dev/zero", "[" * 5000]
)
def test_a_state_that_points_elsewhere_is_refused(tmp_path: Path, table: pa.Table, state: str):
    folder = saved(tmp_path / "data", table)
    if state.endswith(("arrow", "zero")):
        state = json.dumps({"_data_files": [{"filename": state}]})
    (folder / "state.json").write_text(state)
    assert "state.json" in refused(lambda: read_texts(folder, "text"))


@pytest.mark.parametrize(
    "script",
    [
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "import time; time.sleep(60)",
        "print('{', end='')",
    ],
)
def test_a_child_that_dies_or_hangs_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
):
    (tmp_path / "child.py").write_text(script)
    (tmp_path / "a.parquet").write_text("private")
    monkeypatch.setattr(columnar, "CHILD", tmp_path / "child.py")
    monkeypatch.setattr(columnar, "_PATIENCE", 0.5)
    assert "is damaged" in refused(lambda: read_texts(tmp_path / "a.parquet", "text"))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_memory_of_the_reader_is_bounded(
    tmp_path: Path, table: pa.Table, monkeypatch: pytest.MonkeyPatch
):
    pq.write_table(table, tmp_path / "a.parquet")
    monkeypatch.setattr(columnar, "_memory", lambda: 64 << 20)
    assert "is damaged" in refused(lambda: read_texts(tmp_path / "a.parquet", "text"))
