"""A model folder's own tokenizer is used, whatever its files; each against what its maker says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import ByteLevelBPETokenizer
from tokenizers import Tokenizer as Backend

from tokenizer_folders import KINDS, WORDS, tokenizer_folder
from trainfit.core.errors import BadInput
from trainfit.data import load_tokenizer
from trainfit.data.tokenizers import join_pairs, pad_id, tokenizer_hash
from trainfit.data.tokens import encode_pairs, encode_texts, tokenize_pairs

TEXT = "the quiet river and a zebra zoo"
POSTS = (" ".join(WORDS), "happy town", "bread " * 200)
CRITERIA = ("sad at night", "alone without much rest")

Encode = Callable[[Path, str], list[int]]


def by_words(folder: Path, text: str) -> list[int]:
    """WordPiece by hand: whole words, and else letters."""
    lines = (folder / "vocab.txt").read_text().split("\n")
    known = {word: number for number, word in enumerate(lines)}
    ids = []
    for word in text.split():
        spelled = [word[0], *(f"##{letter}" for letter in word[1:])]
        ids += [known[piece] for piece in ([word] if word in known else spelled)]
    return ids


def by_codes(folder: Path, text: str) -> list[int]:
    """PhoBERT's BPE by hand: letters, with "qu" and the word "zoo" as the only merges."""
    lines = (folder / "vocab.txt").read_text().split("\n")
    known = {line.split(" ")[0]: number for number, line in enumerate(lines, 4)}
    ids = []
    for word in text.split():
        pieces = ["zoo"] if word == "zoo" else re.findall("qu|.", word)
        ids += [known[f"{piece}@@"] for piece in pieces[:-1]] + [known[pieces[-1]]]
    return ids


def by_bytes(folder: Path, text: str) -> list[int]:
    files = [str(folder / name) for name in ("vocab.json", "merges.txt")]
    found: list[int] = ByteLevelBPETokenizer.from_file(*files).encode(text).ids
    return found


def by_json(folder: Path, text: str) -> list[int]:
    found: list[int] = Backend.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return found


def by_pieces(folder: Path, text: str) -> list[int]:
    [path] = folder.glob("*.model")
    found: list[int] = SentencePieceProcessor(model_file=str(path)).encode(text)
    return found


REFERENCES: dict[str, Encode] = {
    "wordpiece": by_words,
    "byte_level": by_bytes,
    "json_alone": by_json,
    "phobert": by_codes,
    "phobert_unnamed": by_codes,
    "deberta_v3": by_pieces,
    "gemma": by_pieces,
    "t5": by_pieces,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("folders")
    return {kind: tokenizer_folder(base / kind, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_the_files(kind: str, folders: dict[str, Path]):
    tokenizer = load_tokenizer(str(folders[kind]))
    expected = REFERENCES[kind](folders[kind], TEXT)
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    [ids] = encode_texts(tokenizer, [TEXT], 100)
    assert [token for token in ids if token not in special] == expected
    assert 0 <= pad_id(tokenizer) < len(tokenizer)
    again = load_tokenizer(str(folders[kind]))
    assert tokenizer_hash(again) == tokenizer_hash(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_that_is_too_long_loses_the_end_of_its_post(kind: str, folders: dict[str, Path]):
    tokenizer = load_tokenizer(str(folders[kind]))
    pairs = np.array([0, 1, 2, 0, 1, 2]), np.array([0, 0, 0, 1, 1, 1])
    tokens = tokenize_pairs(tokenizer, POSTS, CRITERIA, *pairs, [0] * 6, max_length=48)
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    for number, (post, criterion) in enumerate(zip(*pairs, strict=True)):
        ids = tokens.sequence(number).tolist()
        plain = [token for token in ids if token not in special]
        # A tokenizer that puts nothing between two texts gets a new line there.
        apart = "\n" if kind == "json_alone" else ""
        second = REFERENCES[kind](folders[kind], apart + CRITERIA[criterion])
        first = REFERENCES[kind](folders[kind], POSTS[post])
        assert plain[-len(second) :] == second
        kept = plain[: -len(second)]
        assert kept
        assert kept == first[: len(kept)]
        assert len(ids) == 48 or kept == first
        assert len(ids) <= 48


@pytest.mark.parametrize("kind", ["deberta_v3", "gemma", "t5", "phobert"])
def test_a_folder_that_names_where_it_came_from_is_read_by_itself(kind: str, tmp_path: Path):
    """transformers saves the path that a vocabulary was read from, of whatever machine."""
    source = tokenizer_folder(tmp_path / "source", kind)
    folder = tokenizer_folder(tmp_path / "folder", kind)
    expected = load_tokenizer(str(folder))(TEXT)["input_ids"]
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text()) if config.is_file() else {}
    [name] = [path.name for path in source.iterdir() if path.suffix in (".model", ".txt")]
    (source / name).write_text("another one")
    config.write_text(json.dumps(settings | {"vocab_file": str(source / name)}))
    assert load_tokenizer(str(folder))(TEXT)["input_ids"] == expected
    config.write_text(json.dumps(settings | {"vocab_file": str(tmp_path / "other.model")}))
    with pytest.raises(BadInput, match="names a file outside of its folder"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("files", [[], ["tokenizer_config.json"], ["vocab.json", "merges.txt"]])
def test_a_folder_without_a_vocabulary_is_refused(files: list[str], tmp_path: Path):
    folder = tokenizer_folder(tmp_path, None)
    for name in files:
        (folder / name).write_text("{}")
    with pytest.raises(BadInput, match="no tokenizer in") as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name"), [("deberta_v3", "spm.model"), ("json_alone", "tokenizer.json")]
)
def test_a_damaged_file_is_one_line(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tokenizer_folder(tmp_path, kind)
    (folder / name).write_bytes(b"\x00nothing of the kind")
    with pytest.raises(BadInput, match="no tokenizer in") as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().err == ""


def test_a_name_that_the_hub_does_not_give_is_one_line():
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE is set; check the name") as caught:
        load_tokenizer("some/model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [40, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_occur_often_give_the_same_pairs(
    kind: str, length: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    answers = []

    def watched(*arguments: Any) -> Any:
        answers.append(join_pairs(*arguments))
        return answers[-1]

    monkeypatch.setattr("trainfit.data.tokens.join_pairs", watched)
    tokenizer = load_tokenizer(str(folders[kind]))
    first, second = np.tile(np.arange(len(POSTS)), 8), np.repeat([0, 1], 4 * len(POSTS))
    labels = [0] * first.size
    tokens = tokenize_pairs(tokenizer, POSTS, CRITERIA, first, second, labels, max_length=length)
    named = [(POSTS[i], CRITERIA[j]) for i, j in zip(first, second, strict=True)]
    expected, types = encode_pairs(tokenizer, named, length, "only_first")
    assert [tokens.sequence(at).tolist() for at in range(len(tokens))] == expected
    assert (tokens.types is None) is (types is None)
    if tokens.types is not None:
        assert tokens.types.tolist() == [each for row in types for each in row]
    assert len(answers) == 1
    assert answers[0] is not None


def test_a_tokenizer_with_its_own_way_of_pairs_keeps_it(folders: dict[str, Path]):
    tokenizer = load_tokenizer(str(folders[next(iter(KINDS))]))
    pairs = np.array([[0, 0], [1, 1], [2, 0]])

    def reversed_pairs(chosen: Any) -> Any:
        named = [(CRITERIA[j], POSTS[i]) for i, j in chosen.tolist()]
        return encode_pairs(tokenizer, named, 400)

    assert join_pairs(tokenizer, POSTS, CRITERIA, pairs, 400, reversed_pairs) is None


def test_a_template_with_an_unknown_token_is_one_line(tmp_path: Path):
    """The library would panic at the first text, and print so itself."""
    folder = tokenizer_folder(tmp_path / "model", "wordpiece")
    load_tokenizer(str(folder)).save_pretrained(folder)
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text())
    fields["post_processor"]["pair"][-1] = {"SpecialToken": {"id": "[NEW]", "type_id": 1}}
    path.write_text(json.dumps(fields))
    with pytest.raises(BadInput, match=r"unknown special token '\[NEW\]'"):
        load_tokenizer(str(folder))


def test_an_absurd_id_of_a_token_is_one_line_at_once(tmp_path: Path):
    """The library would count up to it, several times."""
    folder = tokenizer_folder(tmp_path / "model", "wordpiece")
    load_tokenizer(str(folder)).save_pretrained(folder)
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text())
    fields["model"]["vocab"][next(reversed(fields["model"]["vocab"]))] = 2 * 10**9
    path.write_text(json.dumps(fields))
    with pytest.raises(BadInput, match="its vocabulary has the id 2000000000, and no token"):
        load_tokenizer(str(folder))


def test_a_vocabulary_without_its_token_for_unknown_words_is_one_line(tmp_path: Path):
    """The library would fail at the first text with such a word."""
    folder = tokenizer_folder(tmp_path / "model", "wordpiece")
    path = folder / "vocab.txt"
    path.write_text(path.read_text().replace("[UNK]\n", "[UNKNOWN]\n"))
    with pytest.raises(BadInput, match=r"Missing \[UNK\] token from the vocabulary"):
        load_tokenizer(str(folder))
