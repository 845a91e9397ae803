"""Texts with labels out of CSV, JSONL, Parquet or a saved `datasets` folder, chunk by chunk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainfit.data.tables import read_csv
from trainfit.errors import BadInput

_Rows = Iterator[tuple[int, dict[str, Any]]]


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
    chunk = Chunk()
    for number, row in _reader(path)(path, columns.names):
        place = f"{path}: row {number}"
        chunk.texts.append(_text(row[columns.text], f"{place}, column {columns.text}"))
        chunk.labels.append(_name(row[columns.label], f"{place}, column {columns.label}"))
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
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(file.name.encode() if path.is_dir() else b"")
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def check_file(path: Path) -> Path:
    """The path, or an error when there is nothing to read or no known format."""
    if not path.exists():
        raise BadInput(f"no file {path}", "check data.train, data.validation and data.test")
    _reader(path)
    return path


def _reader(path: Path) -> Callable[[Path, list[str]], _Rows]:
    if path.is_dir():
        return _saved_dataset
    readers: dict[str, Callable[[Path, list[str]], _Rows]] = {
        ".csv": read_csv,
        ".jsonl": _json_lines,
        ".parquet": _parquet,
    }
    if path.suffix.lower() not in readers:
        raise BadInput(
            f"{path} has the ending {path.suffix or '(none)'}",
            f"give {', '.join(readers)} or a folder that datasets' save_to_disk wrote",
        )
    return readers[path.suffix.lower()]


def _json_lines(path: Path, names: list[str]) -> _Rows:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = _object(line, f"{path}: row {number}")
                missing = [name for name in names if name not in row]
                if missing:
                    raise BadInput(
                        f"{path}: row {number} has no {missing[0]}",
                        "add it, or name the right column",
                    )
                yield number, row
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text", "save it as UTF-8") from None


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None
    if not isinstance(row, dict):
        raise BadInput(f"{place} is not a JSON object", "write one object per line")
    return row


def _parquet(path: Path, names: list[str]) -> _Rows:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow.names, names)
            yield from _numbered(file.iter_batches(columns=names, batch_size=1024))
    except arrow.ArrowInvalid:
        raise BadInput(f"{path} is not a Parquet file", "save it again") from None


def _saved_dataset(path: Path, names: list[str]) -> _Rows:
    """The Arrow files that `state.json` lists, each read as a stream."""
    if (path / "dataset_dict.json").is_file():
        raise BadInput(f"{path} holds several splits", "give the folder of one, such as its train")
    if not (path / "state.json").is_file():
        raise BadInput(
            f"no state.json in {path}", "give a folder that datasets' save_to_disk wrote"
        )
    state = json.loads((path / "state.json").read_text())
    files = [path / entry["filename"] for entry in state["_data_files"]]
    yield from _numbered(batch for file in files for batch in _stream(file, path, names))


def _stream(file: Path, path: Path, names: list[str]) -> Iterator[Any]:
    from pyarrow import ipc, memory_map

    with memory_map(str(file)) as source, ipc.open_stream(source) as reader:
        _check_columns(path, reader.schema.names, names)
        for batch in reader:
            yield batch.select(names)


def _check_columns(path: Path, there: list[str], names: list[str]) -> None:
    for name in names:
        if name not in there:
            raise BadInput(
                f"{path} has no column {name}", f"name one of its columns: {', '.join(there)}"
            )


def _numbered(batches: Iterable[Any]) -> _Rows:
    rows = (row for batch in batches for row in batch.to_pylist())
    return enumerate(rows, 1)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadInput(f"{place}: there is no text", "fill it in, or leave the row out")
    return value


def _name(value: Any, place: str) -> str:
    """A label or group as a string, the same whatever format it came in."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool):
        value = str(value).lower()
    if not isinstance(value, str | int) or not str(value).strip():
        raise BadInput(f"{place}: there is no label", "use a string or a whole number")
    return str(value).strip()
