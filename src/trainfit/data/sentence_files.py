"""Sentences to be tagged: words from lists, CoNLL files, or texts that are split at spaces."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from trainfit.core.errors import BadInput
from trainfit.data.columns import AUTO, NAMES, choose_columns
from trainfit.data.conll_files import ENDINGS, TAGGED, WORDS, split_line
from trainfit.data.labels import check_characters
from trainfit.data.row_files import KINDS, check_file, column_names, read_lines, read_rows
from trainfit.data.text_files import read_words

_SAMPLE = 1000
"""Lines of a .txt file that tell a CoNLL file from a text."""
_KINDS = {**KINDS, **TAGGED}


def read_sentences(path: Path, column: str, known: Collection[str]) -> list[list[str]]:
    """Read the words of each row; a .txt file whose lines do not end with a known tag is a text.

    `column` has lists of words or texts. Sentences without a word are left out.
    """
    ending = check_file(path, _KINDS).suffix.lower()
    if ending == ".txt" and not path.is_dir() and not _is_tagged(path, known):
        found = [line.split() for line in read_lines(path)]
    elif ending in ENDINGS and not path.is_dir():
        found = [row[WORDS] for _, row in read_rows(path, [WORDS], TAGGED)]
    else:
        found = list(_from_column(path, column))
    return [words for words in found if any(word.strip() for word in words)]


def _is_tagged(path: Path, known: Collection[str]) -> bool:
    lines = [split_line(line) for line in islice(read_lines(path), _SAMPLE)]
    return all(len(fields) > 1 and fields[-1].strip() in known for fields in lines if fields)


def _from_column(path: Path, column: str) -> Iterator[list[str]]:
    there = column_names(path, _KINDS) if column == AUTO else [column]
    role = "tokens" if any(name.lower() in NAMES["tokens"] for name in there) else "text"
    chosen = choose_columns(there, {role: column}, str(path), {role: "--text-column"})[role]
    for number, row in read_rows(path, [chosen], _KINDS):
        yield _words(row[chosen], f"{path}: row {number}, column {chosen}")


def _words(value: Any, place: str) -> list[str]:
    if isinstance(value, str):
        return check_characters(value, place).split()
    if value is not None and not isinstance(value, list):
        raise BadInput(f"{place}: there is no text", "write a text or a list of words")
    return read_words(value, place)
