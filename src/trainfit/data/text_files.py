"""Labelled texts from CSV, JSONL, Parquet or a saved `datasets` folder, read in chunks."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainfit.core import codec
from trainfit.core.errors import BadInput, reason
from trainfit.core.files import check_regular, checksum, open_regular
from trainfit.data.columnar import check_saved_dataset, read_parquet, read_saved_dataset
from trainfit.data.labels import check_characters, check_kind, read_name

Row = tuple[int, dict[str, str]]
LONGEST_LINE = 64 << 20
"""Most characters of a line or a text; no book has as many."""
_Rows = Iterator[tuple[int, dict[str, Any]]]
_PATHS = "check data.train, data.validation and data.test"
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
        chunk.labels.append(read_name(label, where))
        check_kind(kinds, label, number, where)
        if columns.group is not None:
            chunk.groups.append(read_name(row[columns.group], f"{place}, column {columns.group}"))
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
    return check_characters(value, place)
