"""Tables as people have them: separators, columns, and what is said where none is known."""

import csv
import json
from pathlib import Path

import pandas as pd
import pytest

from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.data.columnar import choose_columns
from trainfit.data.row_files import column_names, find_separator, read_rows

KEYS = {"text": "data.text_column", "label": "data.label_column", "second": "data.second_column"}
BOTH = {"text": "auto", "label": "auto"}
PAIR = {"text": "auto", "second": "auto", "label": "auto"}
ROWS = [
    {"review": f'a "good" film; tab\there, no {n} | so\nit goes, {n}', "sentiment": "pos"}
    for n in range(150)
] + [{"review": "dull; dull; dull", "sentiment": "neg"}]


def choose(found: list[str], wanted: dict[str, str] = BOTH) -> dict[str, str]:
    return choose_columns(found, wanted, "a.csv", KEYS)


@pytest.mark.parametrize(
    ("header", "wanted", "expected"),
    [
        ("review sentiment", BOTH, "review sentiment"),
        ("Sentiment Review", BOTH, "Review Sentiment"),
        ("id Text LABEL title", BOTH, "Text LABEL"),
        ("Unnamed:_0 remarks rating", BOTH, "remarks rating"),
        ("tweet mood", BOTH, "tweet mood"),
        ("v1 v2", BOTH, "v2 v1"),
        ("text label stars", BOTH | {"label": "stars"}, "text stars"),
        ("a b label", BOTH | {"text": "b"}, "b label"),
        ("premise hypothesis label", PAIR, "premise hypothesis label"),
        ("idx Sentence1 Sentence2 gold", PAIR, "Sentence1 Sentence2 gold"),
        ("query passage score", PAIR, "query passage score"),
        ("tokens ner_tags", {"tokens": "auto", "tags": "auto"}, "tokens ner_tags"),
        ("words labels", {"tokens": "auto", "tags": "auto"}, "words labels"),
        ("id qid1 qid2 question1 question2 is_duplicate", PAIR, "question1 question2 is_duplicate"),
        ("tweet_id content label_id", BOTH, "content label_id"),
        ("tweet_id airline_sentiment sentiment_confidence text", BOTH, "text airline_sentiment"),
        ("UserName OriginalTweet num_comments Sentiment", BOTH, "OriginalTweet Sentiment"),
        ("review_title review_body stars", BOTH, "review_body stars"),
        ("text _input_hash _task_hash options accept", BOTH, "text accept"),
        ("Class_Index Title Description", BOTH, "Description Class_Index"),
        ("first_text second_text similarity", PAIR, "first_text second_text similarity"),
        ("Nr. Text Bewertung", BOTH, "Text Bewertung"),
        ("# message verdict", BOTH, "message verdict"),
        ("comment", {"text": "auto"}, "comment"),
        ("remarks", {"text": "auto"}, "remarks"),
        ("remarks label", {"text": "auto"}, "remarks"),
    ],
)
def test_columns_are_told_by_their_names(header: str, wanted: dict[str, str], expected: str):
    found = choose(header.split(), wanted)
    assert found == dict(zip(wanted, expected.split(), strict=True))
    assert list(found) == list(wanted)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (["a", "b", "label"], "write data.text_column=a data.label_column=label"),
        (["a", "my note"], "data.text_column=a data.label_column='my note'"),
        (["text", "helpful_score", "user_rating"], "no column is recognised as label"),
        (["text"], "no column is recognised as label; its columns are text"),
        (["text", "text", "label"], "has the column text twice"),
        (["what a bad film it was", "0"], "begin with a line such as text,label"),
        ([], "has no columns; begin with a line"),
        (["id", "tokens", "ner_tags"], "or take the job tokens"),
    ],
)
def test_unknown_columns_are_listed_but_no_text(header: list[str], message: str):
    with pytest.raises(BadInput) as caught:
        choose(header)
    assert message in str(caught.value)
    assert "film" not in str(caught.value)


DIALECTS = {
    "comma": {},
    "semicolon": {"sep": ";"},
    "tab": {"sep": "\t"},
    "pipe": {"sep": "|"},
    "all quoted": {"quoting": csv.QUOTE_ALL, "sep": ";"},
    "of Windows": {"encoding": "utf-8-sig", "lineterminator": "\r\n"},
    "with an index": {"index": True},
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_table_is_read_in_any_dialect(tmp_path: Path, dialect: str, ending: str):
    path = tmp_path / f"reviews.{ending}"
    pd.DataFrame(ROWS).to_csv(path, **{"index": False} | DIALECTS[dialect])
    assert choose(column_names(path)) == {"text": "review", "label": "sentiment"}
    rows = [row for _, row in read_rows(path, ["review", "sentiment"])]
    assert rows == ROWS


@pytest.mark.parametrize("mark", [",", ";"])
def test_a_space_may_stand_between_a_separator_and_a_quote(tmp_path: Path, mark: str):
    path = tmp_path / "a.csv"
    path.write_text(f'id{mark} "text"{mark} label\n1{mark} "one{mark} two"{mark} "a"\n')
    assert column_names(path) == ["id", "text", "label"]
    assert list(read_rows(path, ["text", "label"])) == [
        (1, {"text": f"one{mark} two", "label": "a"})
    ]
    path.write_text(f'"text" {mark} label\n1{mark}a\n')
    with pytest.raises(BadInput, match="the header cannot be read"):
        list(read_rows(path, ["text"]))


def test_quotes_between_tabs_may_stand_as_they_are(tmp_path: Path):
    path = tmp_path / "a.tsv"
    path.write_text('label\ttext\n1\t"Hello," she said.\n0\t"No\n1\tno"\n0\t"a ""b"" c"\n1\t"\n')
    table = pd.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE)
    texts = [*table["text"][:3], 'a "b" c', table["text"][4]]
    assert [row["text"] for _, row in read_rows(path, ["text", "label"])] == texts


def test_quotes_between_tabs_that_pair_up_by_chance_join_no_rows(tmp_path: Path):
    path = tmp_path / "a.tsv"
    path.write_text('label\ttext\n1\t"Great, she said\n0\tdull\n1\tthe end"\n0\tbad\n')
    table = pd.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE)
    assert [row["text"] for _, row in read_rows(path, ["text", "label"])] == [*table["text"]]
    for content in ('label\ttext\n1\t"two\nlines"\n0\tone\n', 'text\n"two\nlines"\none\n'):
        path.write_text(content)  # a field of several lines
        assert [row["text"] for _, row in read_rows(path, ["text"])] == ["two\nlines", "one"]


@pytest.mark.parametrize(
    ("content", "mark"),
    [
        ("text\na;b;c\nd;e;f\n", ","),  # only in the texts
        ("text,label\na;b;c,1\nd;e;f,2\n", ","),
        ("text;label, really\na, b, c;1\nd;2\n", ";"),
        ("sep=;\r\n\n text;label, really\na, b;1\n", ";"),
        (' Text ; Label \n"a;b",1;2\n', ";"),
        ("text\tlabel\na, b\t1\n", "\t"),
        ("", ","),
    ],
)
def test_a_separator_is_in_the_header_and_the_rows_agree(tmp_path: Path, content: str, mark: str):
    path = tmp_path / "a.csv"
    path.write_text(content)
    assert find_separator(path) == mark
    assert all(name == name.strip() for name in column_names(path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "lines.json"])
def test_json_is_a_list_or_lines(tmp_path: Path, name: str):
    path = tmp_path / name
    lines = "\r\n".join(json.dumps(row) for row in ROWS)
    path.write_text(json.dumps(ROWS, indent=1) if name == "a.json" else lines, "utf-8-sig")
    assert column_names(path) == ["review", "sentiment"]
    assert [row for _, row in read_rows(path, ["review", "sentiment"])] == ROWS


@pytest.mark.parametrize("content", ["[1]", "[", '"x"', '[{"text": "private"}, null]'])
def test_other_json_is_refused(tmp_path: Path, content: str):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(BadInput, match="not a list of JSON objects"):
        column_names(tmp_path / "a.json")


@pytest.mark.parametrize("orient", ["records", "columns", "index", "split", "list", "data"])
def test_json_of_any_orientation_is_read(tmp_path: Path, orient: str):
    frame = pd.DataFrame(ROWS[:5])
    path = tmp_path / "a.json"
    if orient == "list":
        path.write_text(json.dumps(frame.to_dict("list")))
    elif orient == "data":
        path.write_text(json.dumps({"version": "1", "data": ROWS[:5]}, indent=2))
    else:
        frame.to_json(path, orient=orient)
    assert column_names(path) == ["review", "sentiment"]
    assert [row for _, row in read_rows(path, ["review", "sentiment"])] == ROWS[:5]


def test_lines_of_json_may_be_in_a_json_file(tmp_path: Path):
    path = tmp_path / "a.json"
    for rows in (ROWS[:1], ROWS[:3]):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert [row for _, row in read_rows(path, ["review", "sentiment"])] == rows


def test_what_excel_writes_before_the_header_is_skipped(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("sep=;\r\ntext;label\r\na, b;1\r\n", encoding="utf-8-sig")
    assert list(read_rows(path, ["text", "label"])) == [(1, {"text": "a, b", "label": "1"})]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("https://a.b/c.csv", "https://a.b/c.csv is an address, not a file; download it first"),
        ("no/*.csv", "no file no/*.csv; name one file, or a folder with train.csv"),
    ],
)
def test_what_is_no_file_is_answered_with_what_to_name(name: str, message: str):
    with pytest.raises(BadInput) as caught:
        column_names(Path(name))
    assert message in str(caught.value)


def test_western_bytes_are_read_and_told_once(tmp_path: Path):
    text = "Café “déjà vu” – 5 €"
    path = tmp_path / "a.csv"
    path.write_text(f"text,label\n{text},a\nplain,b\n", encoding="windows-1252")
    with pytest.warns(TrainfitWarning, match=r"a\.csv is not UTF-8 and is read as Windows-1252"):
        assert [row["text"] for _, row in read_rows(path, ["text"])] == [text, "plain"]
    assert len(list(read_rows(path, ["text"]))) == 2
