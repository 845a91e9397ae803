"""Texts with labels out of CSV, JSONL, Parquet or a saved `datasets` folder, chunk by chunk."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainfit import codec
from trainfit.data.columnar import check_saved_dataset, read_parquet, read_saved_dataset
from trainfit.data.tables import LONGEST_LINE, read_csv, read_lines
from trainfit.errors import BadInput, reason
from trainfit.files import check_regular, checksum

_Rows = Iterator[tuple[int, dict[str, Any]]]
_HALVES = re.compile("[\ud800-\udfff]")
_PATHS = "check data.train, data.validation and data.test"
_LONGEST_NAME = 200
"""Characters of a label or a group; a longer one is a text in the wrong column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Where a file has what."""

    text: str = "text"
    label: str = "label"
    group: str | None = None
    """What must stay together in a split, such as the author; None: every row is its own."""

    @property
    def names(self) -> list[str]:
        """Those that are read."""
        return [self.text, self.label, *([self.group] if self.group else [])]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Some rows of a file, checked."""

    texts: list[str] = field(default_factory=list, repr=False)
    labels: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)


def read_chunks(path: Path, columns: Columns, rows: int = 2048) -> Iterator[Chunk]:
    """The file in chunks of so many rows: no more than one is in memory."""
    if columns.text == columns.label:
        raise BadInput(
            f"text and label are both the column {columns.text}",
            "name two (data.text_column, data.label_column)",
        )
    chunk, kinds = Chunk(), _Kinds()
    for number, row in _reader(path)(path, columns.names):
        place = f"{path}: row {number}"
        chunk.texts.append(_text(row[columns.text], f"{place}, column {columns.text}"))
        label, where = row[columns.label], f"{place}, column {columns.label}"
        chunk.labels.append(_name(label, where))
        kinds.check(label, number, where)
        if columns.group is not None:
            chunk.groups.append(_name(row[columns.group], f"{place}, column {columns.group}"))
        if len(chunk.texts) == rows:
            yield chunk
            chunk = Chunk()
    if chunk.texts:
        yield chunk


def read_texts(path: Path, column: str) -> Iterator[str]:
    """The texts of a file that may have no labels."""
    for number, row in _reader(path)(path, [column]):
        yield _text(row[column], f"{path}: row {number}, column {column}")


def hash_content(path: Path) -> str:
    """The same for files with the same bytes, wherever they lie."""
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
    """The path, or an error when there is nothing to read or no known format."""
    try:
        if path.is_dir():
            return check_saved_dataset(path)
    except OSError as error:  # a name that is too long, a folder that is closed
        raise BadInput(f"cannot read {str(path)!r:.200} ({reason(error)})", _PATHS) from None
    check_regular(path, _PATHS)
    _reader(path)
    return path


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
    """The text, unless it has half a character, which JSON can spell and nobody can write."""
    if _HALVES.search(value):
        raise BadInput(
            f"{place}: half of a surrogate pair (\\ud800 to \\udfff) stands alone",
            "write the whole character, or leave it out",
        )
    return value


def _name(value: Any, place: str) -> str:
    """A label or group as a string, the same whatever format it came in."""
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


class _Kinds:
    """The kind of the labels so far: one column has one, or 1 and "one" become two classes."""

    def __init__(self) -> None:
        self._kind, self._row = "", 0

    def check(self, value: Any, row: int, place: str) -> None:
        kind = {str: "text", bool: "true or false"}.get(type(value), "a number")
        if self._kind not in ("", kind):
            raise BadInput(
                f"{place}: the label is {kind}, but {self._kind} in row {self._row}",
                "use one kind of label",
            )
        if not self._kind:
            self._kind, self._row = kind, row
