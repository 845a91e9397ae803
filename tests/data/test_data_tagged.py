"""Words with tags: CoNLL files, lists, saved datasets, and the tokens that begin words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value

from tokenizer_folders import KINDS, WORDS, tokenizer_folder
from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.data.batches import collate_packed, collate_padded
from trainfit.data.conll_files import TAGGED
from trainfit.data.labels import LabelKind
from trainfit.data.text_files import Columns, RowCount, read_chunks
from trainfit.data.token_cache import tokenize_file
from trainfit.data.tokenizers import learn_tokenizer, load_tokenizer
from trainfit.data.tokens import encode_words, tokenize_words
from trainfit.jobs.known_data import find_splits
from trainfit.jobs.textclass import load_text_files

COLUMNS = Columns(text="tokens", label="tags", tagged=True)
KIND = LabelKind(target="tags")
ROWS = [
    (["Anna", "left", "New\u00a0York", "."], ["B-PER", "O", "B-LOC", "O"]),
    (["#", "one"], ["O", "O"]),
    (["Bo"], ["B-PER"]),
]
CONLL = """-DOCSTART- -X- -X- O

Anna NNP x B-PER
left VBD x O
New\u00a0York NNP x B-LOC
. . x O


# # x O
one CD x O
\t
Bo NNP x B-PER
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))


def read(path: Path, columns: Columns = COLUMNS, count: RowCount | None = None) -> Any:
    chunks = list(read_chunks(path, columns, kind=KIND, count=count))
    words = [row for chunk in chunks for row in chunk.words]
    return list(zip(words, [list(row) for chunk in chunks for row in chunk.labels], strict=True))


def test_a_table_with_a_word_per_row(tmp_path: Path):
    path = tmp_path / "a.csv"
    lines = ["Sentence #,Word,POS,Tag"]
    for number, (words, tags) in enumerate(ROWS, 1):
        for place, (word, tag) in enumerate(zip(words, tags, strict=True)):
            lines.append(f"{'' if place else f'Sentence: {number}'},{word},x,{tag}")
    path.write_text("\n".join(lines))
    assert read(path) == ROWS
    tabs = tmp_path / "a.tsv"
    tabs.write_text(path.read_text().replace(",", "\t"))
    assert read(tabs) == ROWS
    marks = ['Sentence: 9\t"\tx\tO', "\tyes\tx\tO", '\t"\tx\tO', '\t""""\tx\tO']
    tabs.write_text("\n".join([lines[0].replace(",", "\t"), *marks]))
    assert read(tabs) == [(['"', "yes", '"', '"'], ["O"] * 4)]
    path.write_text("\n".join([*lines, ",more,x,"]))
    with pytest.raises(BadInput, match="row 8 has a word without a tag"):
        read(path)


def write_lists(path: Path, rows: Any = ROWS, **names: str) -> Path:
    word, tag = names.get("words", "tokens"), names.get("tags", "tags")
    path.write_text("".join(json.dumps({word: a, tag: b}) + "\n" for a, b in rows))
    return path


@pytest.mark.parametrize("ending", ["conll", "txt", "bio", "iob", "tsv"])
def test_conll_files_are_read_by_their_lines(tmp_path: Path, ending: str):
    path = tmp_path / f"a.{ending}"
    path.write_text(CONLL)
    assert read(path) == ROWS
    path.write_text("Word\tTag\n# id = 3\nAnna May\tB-PER\r\nleft\tO \n\nBo\tB-PER")
    assert read(path) == [(["Anna May", "left"], ["B-PER", "O"]), (["Bo"], ["B-PER"])]


def test_lists_and_saved_datasets_hold_the_same(tmp_path: Path):
    assert read(write_lists(tmp_path / "a.jsonl")) == ROWS
    names = ["O", "B-PER", "B-LOC"]
    for feature in (Value("string"), ClassLabel(names=names)):
        features = Features({"tokens": Sequence(Value("string")), "tags": Sequence(feature)})
        columns = {"tokens": [row[0] for row in ROWS], "tags": [row[1] for row in ROWS]}
        made = Dataset.from_dict(columns, features=features)
        made.save_to_disk(tmp_path / "saved")
        made.to_parquet(tmp_path / "a.parquet")
        assert read(tmp_path / "saved") == read(tmp_path / "a.parquet") == ROWS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Anna B-PER\nleft\n", r"line 2 has a word without a tag"),
        ("Anna\t\n", r"line 1 has a word without a tag"),
        ("Anna B-PER\nleft the secret house\n", r"line 2 has 4 fields, but the first line 2"),
        ("Anna\n", r"line 1 has a word without a tag"),
    ],
)
def test_lines_that_are_no_words_with_tags_are_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "a.conll"
    path.write_text(text)
    with pytest.raises(BadInput, match=message) as error:
        read(path)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["secret", "b"], "tags": ["O"]}, "row 2: 2 words and 1 tags"),
        ({"tokens": "secret b", "tags": ["O"]}, "row 2, column tokens: the words are no list"),
        ({"tokens": ["secret"], "tags": "O"}, "row 2, column tags: the tags are no list"),
        ({"tokens": ["secret", 3], "tags": ["O", "O"]}, "row 2, column tokens: a word is no text"),
        ({"tokens": ["secret"], "tags": [None]}, "row 2, column tags: there is no name"),
        ({"tokens": ["secret"], "tags": [3]}, "the label is a number, but text in row 1"),
    ],
)
def test_rows_that_do_not_fit_are_named_without_their_words(
    tmp_path: Path, row: dict[str, Any], message: str
):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"tokens": ["a"], "tags": ["O"]}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(BadInput, match=message) as error:
        read(path)
    assert "secret" not in str(error.value)


def test_empty_sentences_are_counted(tmp_path: Path):
    empty: list[Any] = [([], []), (["a"], None), ([" "], ["O"])]
    path, count = write_lists(tmp_path / "a.jsonl", [*ROWS, *empty]), RowCount()
    assert read(path, count=count) == ROWS
    assert (count.rows, count.skipped) == (6, 3)
    tokenizer = learn_tokenizer(["Anna left New York"] * 9, vocabulary=300)
    with pytest.warns(TrainfitWarning, match="skipped 3 of 6 rows"):
        tokenize_file(path, tokenizer, max_length=99, columns=COLUMNS, kind=KIND)


def test_splits_of_a_folder_may_be_conll_files(tmp_path: Path):
    for name in ("train.conll", "dev.bio", "test.txt"):
        (tmp_path / name).write_text(CONLL)
    found = find_splits(tmp_path, kinds=TAGGED)
    assert {split: path.name for split, path in found.items()} == {
        "train": "train.conll",
        "validation": "dev.bio",
        "test": "test.txt",
    }


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("phobert")])
def test_words_get_the_tokens_that_they_have_in_a_text(tmp_path: Path, kind: str):
    tokenizer = load_tokenizer(str(tokenizer_folder(tmp_path, kind)))
    rows = [WORDS[3:9], ["zqxj", *WORDS[:2]], ["sleep"]]
    ids, places = encode_words(tokenizer, rows, 40)
    assert ids == tokenizer([" ".join(row) for row in rows])["input_ids"]
    for row, each in zip(rows, places, strict=True):
        assert [place for place in each if place >= 0] == list(range(len(row)))
    short, cut = encode_words(tokenizer, rows, 5)
    wanted = tokenizer([" ".join(row) for row in rows], truncation=True, max_length=5)["input_ids"]
    assert short == wanted
    assert max(cut[0]) < len(rows[0]) - 1


def test_a_tokenizer_without_words_is_refused(tmp_path: Path):
    tokenizer = load_tokenizer(str(tokenizer_folder(tmp_path, "phobert")))
    with pytest.raises(BadInput, match="PhobertTokenizer does not tell which word"):
        encode_words(tokenizer, [["a"]], 9)


def test_first_pieces_have_tags_in_the_cache_and_in_batches(tmp_path: Path):
    tokenizer = learn_tokenizer(["Anna left"] * 9, vocabulary=300)
    path = write_lists(tmp_path / "a.jsonl")
    with pytest.warns(TrainfitWarning, match="1 of 3 sentences lose 1 words, beyond data.max_len"):
        read = tokenize_file(path, tokenizer, max_length=12, columns=COLUMNS, kind=KIND)
    tokens = tokenize_file(path, tokenizer, max_length=99, columns=COLUMNS, kind=KIND).tokens
    assert read.classes == ["B-LOC", "B-PER", "O"]
    assert read.tokens.labels.tolist() == [3, 2, 1]
    numbers = [[read.classes.index(tag) for tag in tags] for _, tags in ROWS]
    made = tokenize_words(tokenizer, [words for words, _ in ROWS], numbers, max_length=99)
    for name in ("ids", "tags", "labels", "lengths"):
        np.testing.assert_array_equal(getattr(tokens, name), getattr(made, name))
    assert made.tags is not None
    truth = [[row, tag] for row, tags in enumerate(numbers) for tag in tags]
    assert made.truth.tolist() == truth
    assert made.subset([2, 1]).truth.tolist() == [[0, 1], [1, 2], [1, 2]]
    for row, (words, _) in enumerate(ROWS):
        of = tokenizer(words, is_split_into_words=True).word_ids()
        first = [word is not None and word not in of[:at] for at, word in enumerate(of)]
        start = int(made.starts[row])
        assert (made.tags[start : start + len(of)] >= 0).tolist() == first
    total = int(made.lengths.sum())
    packed = collate_packed(made, [0, 1, 2], total + 3, 5)["labels"]
    padded = collate_padded(made, [0, 1, 2], 4, 40)["labels"]
    assert packed.shape == (1, total + 3)
    assert padded.shape == (4, 40)
    for labels in (packed, padded):
        assert labels.dtype == torch.int64
        assert labels[labels != -100].tolist() == [tag for _, tag in truth]


def test_tags_that_look_like_texts_are_refused(tmp_path: Path):
    tokenizer = learn_tokenizer(["a b"] * 9, vocabulary=300)
    rows = [([f"w{n}", "x"], [f"secret{n}", f"tag{n}"]) for n in range(30)]
    path = write_lists(tmp_path / "a.jsonl", rows)
    with pytest.raises(BadInput, match="60 different labels in 60 rows") as error:
        tokenize_file(path, tokenizer, max_length=9, columns=COLUMNS, kind=KIND)
    assert "secret" not in str(error.value)


def test_a_tag_of_one_file_alone_is_a_class_of_all(tmp_path: Path):
    tokenizer = learn_tokenizer(["Anna left"] * 9, vocabulary=300)
    rows = [(["Anna", "left"], ["B-PER", "O"])] * 20
    paths = [
        write_lists(tmp_path / f"{name}.jsonl", [*rows, *more])
        for name, more in (("train", []), ("test", [(["Oslo"], ["B-LOC"])]))
    ]
    (data,) = load_text_files(
        paths[0], tokenizer, test=paths[1], columns=COLUMNS, kind=KIND, max_length=20
    )
    assert data.metadata["classes"] == ["B-LOC", "B-PER", "O"]
    assert data.metadata["problem_type"] == "token_classification"
    assert data.metadata["test"]["by_class"] == [1, 20, 20]
    assert data.test.truth[:2].tolist() == [[0, 1], [0, 2]]
    assert data.test.truth[-1].tolist() == [20, 0]
    assert len(data.train) + len(data.validation) == 20
