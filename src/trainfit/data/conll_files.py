"""Sentences of words: CoNLL files and CSV tables with a word per line, and what is to be tagged."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from trainfit.core.errors import BadInput
from trainfit.data.columnar import AUTO, NAMES, Rows, choose_columns, shown_columns
from trainfit.data.labels import check_characters
from trainfit.data.row_files import (
    KINDS,
    FileKind,
    Kinds,
    check_file,
    column_names,
    read_csv,
    read_lines,
    read_rows,
)

WORDS, TAGS = "tokens", "tags"
"""Names of the two columns; any between them are left out."""
ENDINGS = (".conll", ".bio", ".iob", ".iob2", ".txt", ".tsv")
_DOCUMENT = "-DOCSTART-"
_SENTENCE = re.compile(r"sent(ence)?([ _]?(#|id|idx|no|nr|number))?")
"""Name of the column that tells which sentence a word is of."""
_BLANKS = re.compile(r"[ \t]+")
"""Other spaces may be part of a word."""


def read_conll(path: Path, names: list[str]) -> Rows:
    """Read each sentence's number, from 1, with its words and tags; without TAGS, words alone."""
    for name in names:
        if name not in (WORDS, TAGS):
            raise BadInput(f"{path} has no column {name}", shown_columns([WORDS, TAGS]))
    words: list[str] = []
    tags: list[str] = []
    sentence, expected = 0, 0
    for number, line in enumerate(read_lines(path), 1):
        fields = split_line(line)
        if not fields or fields[0] == _DOCUMENT or _beside(line, fields, number, words):
            if words:
                sentence += 1
                yield sentence, {WORDS: words, TAGS: tags}
                words, tags = [], []
            continue
        expected = expected or len(fields)
        _check(fields, expected, f"{path}: line {number}", tagged=TAGS in names)
        words.append(fields[0])
        tags.append(fields[-1].strip())
    if words:
        yield sentence + 1, {WORDS: words, TAGS: tags}


def split_line(line: str) -> list[str]:
    """Split a line at tabs, or at spaces where it has none; nothing for an empty line."""
    if not line.strip(" \t\r\n"):
        return []
    if "\t" in line:
        return line.rstrip("\r\n").split("\t")
    return _BLANKS.split(line.strip(" \r\n"))


def _beside(line: str, fields: list[str], number: int, words: list[str]) -> bool:
    """Tell a header, or a comment such as `# id = 3` before a sentence."""
    if number == 1 and len(fields) > 1:
        first, last = fields[0].strip().lower(), fields[-1].strip().lower()
        if first in NAMES["tokens"] and last in NAMES["tags"]:
            return True
    return not words and line.startswith("#") and "=" in line


def _check(fields: list[str], expected: int, place: str, *, tagged: bool) -> None:
    """Raise BadInput for a line that is no word with its tag, such as one of plain text."""
    fix = "write a word and its tag per line, with a tab or a space between them"
    if tagged and (len(fields) < 2 or not fields[-1].strip()):
        raise BadInput(f"{place} has a word without a tag", fix)
    if len(fields) != expected:
        raise BadInput(f"{place} has {len(fields)} fields, but the first line {expected}", fix)


def _word_columns(names: Iterable[str]) -> dict[str, str]:
    """Columns of a table with a word per row: of sentences, of words and, if any, of tags."""
    found: dict[str, str] = {}
    for name in map(str.strip, names):
        folded = name.lower()
        if _SENTENCE.fullmatch(folded):
            found.setdefault("sentence", name)
        for role in (role for role in ("tokens", "tags") if folded in NAMES[role]):
            found.setdefault(role, name)
    return found


def _table_columns(path: Path) -> list[str]:
    found = _word_columns(column_names(path))
    if len(found) < 3:
        what = f"{path} has no columns of sentences, words and tags"
        fix = "name them such as sentence,word,tag with a word per row, or give JSONL with lists"
        raise BadInput(what, fix)
    return [WORDS, TAGS]


def read_word_table(path: Path, names: list[str]) -> Rows:
    """Read the sentences of a table with a word per row, as `read_conll` does.

    A new one begins where the column of sentences changes; it may be empty in further rows.
    """
    if TAGS in names:
        _table_columns(path)
    columns = _word_columns(column_names(path))
    words: list[str] = []
    tags: list[str] = []
    sentence, now = 0, ""
    for number, row in read_csv(path, list(columns.values()), by_line=True):
        begun = row[columns["sentence"]].strip()
        if words and begun and begun != now:
            sentence += 1
            yield sentence, {WORDS: words, TAGS: tags}
            words, tags = [], []
        now = begun or now
        word, tag = row[columns["tokens"]], row.get(columns.get("tags", ""), "").strip()
        if not word.strip():
            continue
        if TAGS in names and not tag:
            raise BadInput(f"{path}: row {number} has a word without a tag", "fill it in")
        words.append(word)
        tags.append(tag)
    if words:
        yield sentence + 1, {WORDS: words, TAGS: tags}


def _read_tsv(path: Path, names: list[str]) -> Rows:
    """Read a table with a word per row, as its header tells, or else a CoNLL file."""
    header = split_line(next(read_lines(path), ""))
    return (read_word_table if _has_word_rows(header) else read_conll)(path, names)


def _has_word_rows(header: Iterable[str]) -> bool:
    return {"sentence", "tokens"} <= _word_columns(header).keys()


_CONLL = FileKind(lambda _path: [WORDS, TAGS], read_conll)
TAGGED: Kinds = {
    **{ending: KINDS[ending] for ending in (".jsonl", ".ndjson", ".json", ".parquet")},
    **dict.fromkeys(ENDINGS, _CONLL),
    ".tsv": FileKind(lambda _path: [WORDS, TAGS], _read_tsv),
    ".csv": FileKind(_table_columns, read_word_table),
}
"""Kinds of files with a tag per word, by their ending."""
_ALL_KINDS = {**TAGGED, **KINDS}
_SAMPLE = 1000
"""Lines of a .txt file that tell a CoNLL file from a text."""


def read_sentences(path: Path, column: str, known: Collection[str]) -> dict[int, list[str]]:
    """Read the words of each row by its number.

    A .txt file whose lines do not end with a known tag is a text. `column` has lists of words or
    texts.
    """
    ending = check_file(path, _ALL_KINDS).suffix.lower()
    if ending == ".txt" and not path.is_dir() and not _is_tagged(path, known):
        return {number: line.split() for number, line in enumerate(read_lines(path), 1)}
    if path.is_file() and (
        ending in ENDINGS or (ending == ".csv" and _has_word_rows(column_names(path)))
    ):
        return {number: row[WORDS] for number, row in read_rows(path, [WORDS], TAGGED)}
    return dict(_from_column(path, column))


def _is_tagged(path: Path, known: Collection[str]) -> bool:
    lines = [split_line(line) for line in islice(read_lines(path), _SAMPLE)]
    return all(len(fields) > 1 and fields[-1].strip() in known for fields in lines if fields)


def _from_column(path: Path, column: str) -> Iterator[tuple[int, list[str]]]:
    there = column_names(path, _ALL_KINDS) if column == AUTO else [column]
    role = "tokens" if any(name.lower() in NAMES["tokens"] for name in there) else "text"
    chosen = choose_columns(there, {role: column}, str(path), {role: "--text-column"})[role]
    for number, row in read_rows(path, [chosen], _ALL_KINDS):
        yield number, _words(row[chosen], f"{path}: row {number}, column {chosen}")


def _words(value: Any, place: str) -> list[str]:
    if isinstance(value, str):
        return check_characters(value, place).split()
    if value is not None and not isinstance(value, list):
        raise BadInput(f"{place}: there is no text", "write a text or a list of words")
    return read_words(value, place)


def read_words(value: Any, place: str) -> list[str]:
    """Read a list of words; none for nothing."""
    if value is None or value == "":
        return []
    if not isinstance(value, list):
        raise BadInput(f"{place}: the words are no list", 'write one such as ["Anna", "left"]')
    for word in value:
        if not isinstance(word, str):
            raise BadInput(f"{place}: a word is no text", "write every word as a string")
        check_characters(word, place)
    return value
