"""Token files: what was written is what is read, and nothing wrong is trained on."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from job_tiny import detect_once
from trainfit.cli.main import run
from trainfit.core.errors import BadInput
from trainfit.data import corpus, token_preparation
from trainfit.data.corpus import END_OF_TEXT, find_files, read_pieces, standard_library
from trainfit.data.token_files import open_tokens, unigram_entropy
from trainfit.data.token_preparation import Preparation, embedded_tokens, prepare_tokens
from trainfit.data.tokenizers import load_bpe, short_words
from trainfit.jobs import job_plan

TREES = "alder birch cedar dogwood elm fir ginkgo hazel ivy juniper kapok larch maple"
WORDS = TREES.split(" ")
HOW = Preparation(vocab_size=300, validation_share=0.25, seed=3)


def texts(count: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return [
        f"{n}: " + " ".join(random.choice(WORDS, size=int(random.integers(3, 40))))
        for n in range(count)
    ]


def write(folder: Path, documents: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(documents):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Path:
    prepare_tokens([write(tmp_path / "texts", texts(60))], tmp_path / "tokens", HOW)
    return tmp_path / "tokens"


def documents_in(folder: Path, ids: Any, end: int | None) -> list[str]:
    tokenizer = load_bpe(folder / "tokenizer.json")
    found: list[list[int]] = [[]]
    for token in ids.tolist():
        if token == end:
            found.append([])
        else:
            found[-1].append(token)
    assert found.pop() == []
    return [tokenizer.decode(one) for one in found]


def test_every_document_is_in_one_part_and_reads_back(made: Path):
    data = open_tokens(made)
    end = data.header.end_of_text
    train = documents_in(made, data.train, end)
    held = documents_in(made, data.validation, end)
    assert sorted([*train, *held]) == sorted(texts(60))
    assert data.header.train.documents == len(train) == 60 - len(held)
    assert 5 <= len(held) <= 25
    assert data.train.dtype == np.uint16


def test_a_document_keeps_its_side_wherever_it_lies(tmp_path: Path, made: Path):
    held = set(
        documents_in(made, open_tokens(made).validation, open_tokens(made).header.end_of_text)
    )
    others = [*texts(30, seed=9), *reversed(texts(60)), *texts(60)[:5]]  # five of them twice
    joined = tmp_path / "all.txt"
    joined.write_text(END_OF_TEXT.join(others))
    prepare_tokens([joined], tmp_path / "again", HOW)
    data = open_tokens(tmp_path / "again")
    now = documents_in(tmp_path / "again", data.validation, data.header.end_of_text)
    assert held == set(now) & set(texts(60))
    train = documents_in(tmp_path / "again", data.train, data.header.end_of_text)
    assert not set(now) & set(train)


@settings(max_examples=25)
@given(parts=st.lists(st.text(min_size=1).filter(lambda t: t.strip()), min_size=1, max_size=5))
def test_any_text_comes_through(parts: list[str], tmp_path_factory: pytest.TempPathFactory):
    parts = [part.encode(errors="replace").decode() for part in parts]
    path = tmp_path_factory.mktemp("any") / "text.txt"
    path.write_bytes(END_OF_TEXT.join(parts).encode())
    found = [piece.text for piece in read_pieces([path], seed=0)]
    assert found == END_OF_TEXT.join(parts).split(END_OF_TEXT)


@pytest.mark.parametrize("ending", ["txt", "csv"])
def test_the_end_of_a_single_file_is_held_out(ending: str, tmp_path: Path):
    path, whole = tmp_path / f"book.{ending}", "".join(f"{text}\n" for text in texts(40))
    path.write_text(whole if ending == "txt" else f'text\n"{whole}"\n')
    if ending == "csv":  # a row is not cut
        with pytest.raises(BadInput, match="of 1 documents none is left"):
            prepare_tokens([path], tmp_path / "tokens", HOW)
        return
    prepare_tokens([path], tmp_path / "tokens", HOW)
    data = open_tokens(tmp_path / "tokens")
    parts = [
        documents_in(tmp_path / "tokens", ids, data.header.end_of_text)
        for ids in (data.train, data.validation)
    ]
    assert parts[0] + parts[1] == [whole[: len(parts[0][0])], whole[len(parts[0][0]) :]]
    assert len(parts[1][0]) == pytest.approx(len(whole) * HOW.validation_share, rel=0.2)


def test_long_documents_come_in_pieces_on_one_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "_BLOCK", 64)
    monkeypatch.setattr(corpus, "_LONGEST", 200)
    whole = "\n".join(texts(40))
    path = tmp_path / "long.txt"
    path.write_text(whole + END_OF_TEXT + "short")
    pieces = list(read_pieces([path], seed=0))
    assert len(pieces) > 5
    assert max(len(piece.text) for piece in pieces) < 300
    assert "".join(piece.text for piece in pieces[:-1]) == whole
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 2) + [True, True]
    assert len({piece.place for piece in pieces[:-1]}) == 1


def test_tables_and_folders(tmp_path: Path):
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "plain.md").write_text("three")
    files = find_files([tmp_path])
    assert [path.name for path in files] == ["plain.md", "rows.jsonl"]
    assert [piece.text for piece in read_pieces(files, seed=0)] == ["three", "one", "two"]


def test_processes_change_nothing(tmp_path: Path, made: Path):
    write(tmp_path / "texts", texts(60))
    prepare_tokens([tmp_path / "texts"], tmp_path / "two", HOW, processes=2)
    for name in ("train.bin", "val.bin", "meta.json", "tokenizer.json"):
        assert (tmp_path / "two" / name).read_bytes() == (made / name).read_bytes()


def test_a_vocabulary_over_16_bits_takes_32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_preparation, "dtype_for", lambda _: "uint32")
    prepare_tokens([write(tmp_path / "texts", texts(60))], tmp_path / "wide", HOW)
    data = open_tokens(tmp_path / "wide")
    assert data.train.dtype == np.uint32
    assert (tmp_path / "wide" / "train.bin").stat().st_size == 4 * data.header.train.tokens


def test_the_unigram_entropy_is_that_of_the_definition(made: Path):
    data = open_tokens(made)
    counts, size = Counter(data.train.tolist()), data.header.vocab_size
    total = len(data.train) + size
    wanted = -sum(math.log((counts[t] + 1) / total) for t in data.validation.tolist())
    assert data.unigram_entropy == pytest.approx(wanted / len(data.validation))
    even = np.full(8, 1000, dtype=np.int64)
    assert unigram_entropy(even, even) == pytest.approx(math.log(8))


def test_special_tokens_and_a_given_tokenizer(tmp_path: Path, made: Path):
    how = Preparation(vocab_size=300, validation_share=0.25, special=("<|fim|>",))
    source = write(tmp_path / "more", [f"{text} <|fim|> end" for text in texts(40)])
    prepare_tokens([source], tmp_path / "special", how)
    tokenizer = load_bpe(tmp_path / "special" / "tokenizer.json")
    assert tokenizer.encode("<|fim|>").ids == [tokenizer.token_to_id("<|fim|>")] == [1]
    prepare_tokens([source], tmp_path / "given", HOW, tokenizer=made / "tokenizer.json")
    ours, theirs = (json.loads((f / "meta.json").read_text()) for f in (tmp_path / "given", made))
    assert ours["tokenizer"] == theirs["tokenizer"]
    assert ours["train"] != theirs["train"]


# ── the embedded corpus ───────────────────────────────────────────────────────────────────────


def test_the_standard_library_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    files = standard_library()
    names = {path.name for path in files}
    assert {"argparse.py", "json", "decoder.py"} & names
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
    few = write(tmp_path / "few", texts(60))
    monkeypatch.setattr(token_preparation, "standard_library", lambda: sorted(few.iterdir()))
    folder = embedded_tokens(HOW)
    before = (folder / "train.bin").stat().st_mtime_ns
    assert embedded_tokens(HOW) == folder
    assert (folder / "train.bin").stat().st_mtime_ns == before
    (few / "000.txt").write_text("something else")
    assert embedded_tokens(HOW) != folder


# ── what others have made ─────────────────────────────────────────────────────────────────────


def nano(folder: Path, **meta: Any) -> Path:
    """A folder as nanoGPT's scripts write it."""
    folder.mkdir()
    ids = np.arange(100, dtype=np.uint16) % 65
    ids.tofile(folder / "train.bin")
    ids[:50].tofile(folder / "val.bin")
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def test_nanogpt_files_are_used_as_they_are(tmp_path: Path):
    data = open_tokens(nano(tmp_path / "shakespeare", vocab_size=65, itos={"0": "a"}))
    assert data.train.tolist() == [n % 65 for n in range(100)]
    assert len(data.validation) == 50
    assert data.header.vocab_size == 65
    assert data.tokenizer is None
    assert data.unigram_entropy is not None


# ── what is wrong is told in one line ─────────────────────────────────────────────────────────


def cut_off(folder: Path) -> None:
    os.truncate(folder / "train.bin", (folder / "train.bin").stat().st_size - 10)


def odd_bytes(folder: Path) -> None:
    (folder / "meta.json").write_text('{"vocab_size": 300}')
    os.truncate(folder / "train.bin", (folder / "train.bin").stat().st_size - 1)


def changed(folder: Path) -> None:
    data = bytearray((folder / "val.bin").read_bytes())
    data[10] ^= 1
    (folder / "val.bin").write_bytes(data)


def other_tokenizer(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"version"', ' "version"'))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def small_vocabulary(folder: Path) -> None:
    (folder / "meta.json").write_text('{"vocab_size": 100}')


def pickled(folder: Path) -> None:
    (folder / "meta.json").unlink()
    (folder / "meta.pkl").write_bytes(b"cos\nsystem\n(S'echo'\ntR.")


def no_meta(folder: Path) -> None:
    (folder / "meta.json").unlink()


def no_validation(folder: Path) -> None:
    (folder / "val.bin").unlink()


def not_json(folder: Path) -> None:
    (folder / "meta.json").write_text("{")


def empty_file(folder: Path) -> None:
    (folder / "meta.json").write_text('{"vocab_size": 300}')
    (folder / "train.bin").write_bytes(b"")


WRONG = {
    cut_off: "train.bin is cut off",
    odd_bytes: "no whole number of uint16",
    changed: "val.bin does not match its checksum",
    other_tokenizer: "is not the tokenizer that made the tokens",
    no_tokenizer: "no tokenizer.json in",
    small_vocabulary: "over the vocabulary of 100",
    pickled: 'write its vocabulary size to meta.json beside it: {"vocab_size": N}',
    no_meta: "no meta.json in",
    no_validation: "no val.bin in",
    not_json: "cannot read",
    empty_file: "train.bin has 0 tokens",
}


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)
def test_wrong_files_are_refused_in_one_line(
    made: Path, spoil: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(job_plan, "detect", detect_once)
    spoil(made)
    with pytest.raises(BadInput) as caught:
        open_tokens(made)
    assert WRONG[spoil] in str(caught.value)
    assert "\n" not in str(caught.value)
    capsys.readouterr()
    assert run(["train", "gpt", f"data.data_dir={made}", "model.name=gpt-tiny"]) == 2
    said = capsys.readouterr().err
    assert WRONG[spoil] in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("documents", "more", "says"),
    [
        (["", "  \n "], [], "the corpus is empty"),
        (texts(5), ["--vocab-size", "200"], "vocab_size is 200"),
        (texts(5), ["--tokenizer", "none.json"], "cannot read none.json"),
        (texts(5), ["--input", "nowhere"], "no file or folder nowhere"),
        (texts(5), ["--validation", "0.9"], "validation_share is 0.9"),
        (texts(5), ["--separator", ""], "--separator is empty"),
    ],
)
def test_a_corpus_that_cannot_be_prepared_is_told_in_one_line(
    documents: list[str], more: list[str], says: str, tmp_path: Path, capsys: Any
):
    source, output = write(tmp_path / "texts", documents), tmp_path / "out"
    words = ["prepare", "gpt", "--input", str(source), "--output", str(output), *more]
    assert run(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line
    assert not output.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]  # nothing half made


def test_prepare_tells_what_it_made(tmp_path: Path, capsys: Any):
    first = write(tmp_path / "a", texts(30))
    second = write(tmp_path / "b", texts(30, seed=5))
    words = ["prepare", "gpt", "--input", str(first), str(second), "--vocab-size", "300"]
    words += ["--validation", "0.2"]
    assert run([*words, "--output", str(tmp_path / "out"), "--json"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["train"]["documents"] + data["validation"]["documents"] == 60
    assert data["vocab_size"] == 300
    assert captured.err == ""  # quiet where nobody watches
    assert run([*words, "--output", str(tmp_path / "out")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert run([*words, "--output", str(tmp_path / "more")]) == 0
    assert "trainfit train gpt data.data_dir=" in capsys.readouterr().out


def test_a_preparation_that_is_killed_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def breaks(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(token_preparation, "_check_split", breaks)
    with pytest.raises(KeyboardInterrupt):
        prepare_tokens([write(tmp_path / "texts", texts(60))], tmp_path / "out", HOW)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_words_of_thousands_of_characters_are_learned_in_pieces():
    assert short_words("a few words\nof one text") == "a few words\nof one text"
    cut = short_words("x" * 2500)
    assert [len(word) for word in cut.split()] == [1000, 1000, 500]
    assert cut.replace(" ", "") == "x" * 2500
