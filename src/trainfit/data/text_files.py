"""Labelled texts from CSV, JSONL, Parquet or a saved `datasets` folder, read in chunks."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainfit.core import codec
from trainfit.core.errors import BadInput, reason
from trainfit.core.files import check_regular, checksum, open_regular
from trainfit.data.columnar import check_saved_dataset, read_parquet, read_saved_dataset
from trainfit.data.folds import IntArray

Row = tuple[int, dict[str, str]]
LONGEST_LINE = 64 << 20
"""Most characters of a line or a text; no book has as many."""
_Rows = Iterator[tuple[int, dict[str, Any]]]
_HALVES = re.compile("[\ud800-\udfff]")
_PATHS = "check data.train, data.validation and data.test"
_LONGEST_NAME = 200
"""Most characters of a label or group; longer ones are texts in the wrong column."""
_WORD = re.compile(r"[\w.+:/-]{1,40}")
_LONGEST, _MOST_WORDS = 100, 12
"""Most characters and words of a class name; longer ones are texts in the wrong column."""
_FEW = 20
"""Number of classes that may have one row each."""
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks, longest first, since one begins like another."""


def read_lines(path: Path) -> Iterator[str]:
    """Read the lines of a UTF-8 file with their line ends; a byte order mark is dropped."""
    check_regular(path)
    try:
        with open_regular(path) as raw:
            start = raw.read(4)
            for mark, name in _MARKS.items():
                if start.startswith(mark):
                    raise BadInput(f"{path} is {name} text", "save it as UTF-8")
            raw.seek(0)
            file = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
            number = 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                _check_line(line, f"{path}: line {number}")
                yield line
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text", "save it as UTF-8") from None
    except OSError as error:
        raise BadInput(f"cannot read {path} ({reason(error)})", "check the path") from None


def _check_line(line: str, place: str) -> None:
    if len(line) > LONGEST_LINE:
        raise BadInput(
            f"{place} has more than {LONGEST_LINE >> 20} million characters", "break it up"
        )
    if "\0" in line:
        raise BadInput(
            f"{place} has a NUL: the file is binary, or not UTF-8", "save it as UTF-8 text"
        )


def read_csv(path: Path, columns: Sequence[str | tuple[str, ...]]) -> Iterator[Row]:
    """Read each row's number, from 1 below the header, and its values in these columns.

    A column may have several names; its values are returned under the first.
    """
    lines = csv.reader(read_lines(path), strict=True)
    number = 0
    try:
        header = next(lines, [])
        spellings = [(names,) if isinstance(names, str) else names for names in columns]
        places = {names[0]: _place(path, header, names) for names in spellings}
        for number, values in enumerate(lines, 1):
            if not values:
                continue
            if len(values) != len(header):
                raise BadInput(
                    f"{path}: row {number} has {len(values)} fields, but the header {len(header)}",
                    "quote fields that hold a comma",
                )
            yield number, {name: values[place] for name, place in places.items()}
    except csv.Error as error:
        # The csv module's messages are fixed sentences that quote no data.
        raise BadInput(
            f"{path}: row {number + 1} cannot be read ({error})",
            "quote fields as CSV does; for longer texts use JSONL or Parquet",
        ) from None


def _place(path: Path, header: list[str], spellings: tuple[str, ...]) -> int:
    places = [place for place, name in enumerate(header) if name in spellings]
    if len(places) > 1:
        raise BadInput(f"{path} has the column {spellings[0]} twice", "rename one of them")
    if not places:
        missing = " or ".join(spellings)
        raise BadInput(f"{path} has no column {missing}", "name it in the first line of the file")
    return places[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Names of the columns."""

    text: str = "text"
    label: str = "label"
    group: str | None = None
    """Column of rows that must stay together in a split, such as the author; None: no groups."""

    @property
    def names(self) -> list[str]:
        """Columns to read."""
        return [self.text, self.label, *([self.group] if self.group else [])]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Checked rows of a file."""

    texts: list[str] = field(default_factory=list, repr=False)
    labels: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)


def read_chunks(path: Path, columns: Columns, rows: int = 2048) -> Iterator[Chunk]:
    """Read a file in chunks of `rows` rows, with only one in memory."""
    if columns.text == columns.label:
        raise BadInput(
            f"text and label are both the column {columns.text}",
            "name two (data.text_column, data.label_column)",
        )
    chunk = Chunk()
    kinds: dict[str, int] = {}
    for number, row in _reader(path)(path, columns.names):
        place = f"{path}: row {number}"
        chunk.texts.append(_text(row[columns.text], f"{place}, column {columns.text}"))
        label, where = row[columns.label], f"{place}, column {columns.label}"
        chunk.labels.append(_name(label, where))
        _check_kind(kinds, label, number, where)
        if columns.group is not None:
            chunk.groups.append(_name(row[columns.group], f"{place}, column {columns.group}"))
        if len(chunk.texts) == rows:
            yield chunk
            chunk = Chunk()
    if chunk.texts:
        yield chunk


def read_texts(path: Path, column: str) -> Iterator[str]:
    """Read the texts of a file; labels are not needed."""
    for number, row in _reader(path)(path, [column]):
        yield _text(row[column], f"{path}: row {number}, column {column}")


def hash_content(path: Path) -> str:
    """Hash the content of a file or folder, whatever its path."""
    digest = hashlib.sha256()
    try:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(file.name.encode() if path.is_dir() else b"")
                digest.update(bytes.fromhex(checksum(file)))
    except OSError as error:
        raise BadInput(f"cannot read {path} ({reason(error)})", "make it readable") from None
    return digest.hexdigest()


def check_file(path: Path) -> Path:
    """Return the path; raise BadInput where it cannot be read or has an unknown format."""
    try:
        if path.is_dir():
            return check_saved_dataset(path)
    except OSError as error:  # a name that is too long, or no permission
        raise BadInput(f"cannot read {str(path)!r:.200} ({reason(error)})", _PATHS) from None
    check_regular(path, _PATHS)
    _reader(path)
    return path


def check_columns(path: Path, columns: Columns) -> None:
    """Raise BadInput where a file cannot be read or lacks a column, by its first row."""
    next(_reader(check_file(path))(path, columns.names), None)


def _reader(path: Path) -> Callable[[Path, list[str]], _Rows]:
    if path.is_dir():
        return read_saved_dataset
    readers: dict[str, Callable[[Path, list[str]], _Rows]] = {
        ".csv": read_csv,
        ".jsonl": _json_lines,
        ".parquet": read_parquet,
    }
    if path.suffix.lower() not in readers:
        raise BadInput(
            f"{path} has the ending {path.suffix or '(none)'}",
            f"give {', '.join(readers)} or a folder that datasets' save_to_disk wrote",
        )
    return readers[path.suffix.lower()]


def _json_lines(path: Path, names: list[str]) -> _Rows:
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        row = _object(line, f"{path}: row {number}")
        missing = [name for name in names if name not in row]
        if missing:
            raise BadInput(
                f"{path}: row {number} has no {missing[0]}", "add it, or name the right column"
            )
        yield number, row


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        row = codec.parse(line, _once)
    except BadInput as twice:
        raise BadInput(f"{place} {twice.what}", twice.fix) from None
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise BadInput(f"{place} is not a JSON object", "write one object per line")
    return row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise BadInput("has the same key twice", "keep one of them")
    return row


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadInput(f"{place}: there is no text", "fill it in, or leave the row out")
    if len(value) > LONGEST_LINE:
        raise BadInput(f"{place}: the text has {len(value):,} characters", "break it up")
    return _characters(value, place)


def _characters(value: str, place: str) -> str:
    """Return the text; raise BadInput for half a surrogate pair, which JSON allows."""
    if _HALVES.search(value):
        raise BadInput(
            f"{place}: half of a surrogate pair (\\ud800 to \\udfff) stands alone",
            "write the whole character, or leave it out",
        )
    return value


def _name(value: Any, place: str) -> str:
    """Convert a label or group to a string that is the same for all file formats."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool):
        value = str(value).lower()
    if not isinstance(value, str | int) or not str(value).strip():
        raise BadInput(f"{place}: there is no label", "use a string or a whole number")
    name = str(value).strip()
    if len(name) > _LONGEST_NAME:
        raise BadInput(f"{place}: the label has {len(name):,} characters", "name the right column")
    return _characters(name, place)


def _check_kind(kinds: dict[str, int], value: Any, row: int, place: str) -> None:
    """Raise BadInput for labels of two types in a column: 1 and "one" would become two classes."""
    kind = {str: "text", bool: "true or false"}.get(type(value), "a number")
    kinds.setdefault(kind, row)
    if len(kinds) > 1:
        first = next(iter(kinds))
        raise BadInput(
            f"{place}: the label is {kind}, but {first} in row {kinds[first]}",
            "use one kind of label",
        )


def class_order(names: Iterable[str]) -> list[str]:
    """Sort the class names; as numbers where all are numbers."""
    distinct = sorted(set(names))
    if all(name.removeprefix("-").isdecimal() for name in distinct):
        return sorted(distinct, key=int)
    return distinct


def shown(name: str) -> str:
    """Show a label in an error if it is one word; others may be texts."""
    return name if _WORD.fullmatch(name) else "(a label of several words)"


def check_classes(names: Iterable[str], rows: int, place: str) -> None:
    """Raise BadInput for labels that look like texts, since class names are written to files.

    There may be as many single words as rows in a small file; otherwise at most half as many
    labels.
    """
    distinct = set(names)
    several = any(not _WORD.fullmatch(name) for name in distinct)
    if any(len(name) > _LONGEST or len(name.split()) > _MOST_WORDS for name in distinct):
        what = f"{place} has labels of over {_LONGEST} characters or {_MOST_WORDS} words"
    elif len(distinct) > (0 if several else _FEW) and 2 * len(distinct) > rows:
        what = f"{place} has {len(distinct):,} different labels in {rows:,} rows"
    else:
        return
    raise BadInput(f"{what}, as a column of texts has", "name the right one (data.label_column)")


def count_classes(labels: IntArray, classes: int) -> list[int]:
    """Count the items of each class."""
    counted: list[int] = np.bincount(labels, minlength=classes).tolist()
    return counted


def balanced_weights(labels: IntArray, names: Sequence[str]) -> list[float]:
    """Compute class weights that are inverse to the class counts."""
    counted = count_classes(labels, len(names))
    for name, count in zip(names, counted, strict=True):
        if not count:
            raise BadInput(
                f"class {shown(name)} has no training example", "add some, or leave the class out"
            )
    return [len(labels) / (len(names) * count) for count in counted]
