"""CoNLL files: a word and its tag per line, and an empty line between sentences."""

from __future__ import annotations

import re
from pathlib import Path

from trainfit.core.errors import BadInput
from trainfit.data.columnar import Rows
from trainfit.data.columns import NAMES, shown_columns
from trainfit.data.row_files import KINDS, FileKind, Kinds, read_lines

WORDS, TAGS = "tokens", "tags"
"""Names of the two columns; any between them are left out."""
ENDINGS = (".conll", ".bio", ".iob", ".iob2", ".txt", ".tsv")
_DOCUMENT = "-DOCSTART-"
_BLANKS = re.compile(r"[ \t]+")
"""Other spaces may be part of a word."""


def _columns(_path: Path) -> list[str]:
    return [WORDS, TAGS]


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


_CONLL = FileKind(_columns, read_conll)
TAGGED: Kinds = {
    **{ending: KINDS[ending] for ending in (".jsonl", ".ndjson", ".json", ".parquet")},
    **dict.fromkeys(ENDINGS, _CONLL),
}
"""Kinds of files with a tag per word, by their ending."""
