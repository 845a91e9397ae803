"""Rows of a CSV file by column name, with errors that say where and never quote the content."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainfit.errors import BadInput

Row = tuple[int, dict[str, str]]


def read_csv(path: Path, columns: Sequence[str | tuple[str, ...]]) -> Iterator[Row]:
    """Each row's number, counted from 1 below the header, and its values in these columns.

    A column may have several spellings; its values come under the first.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _rows(path, csv.reader(file, strict=True), columns)
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text", "save it as UTF-8") from None
    except OSError as error:
        raise BadInput(f"cannot read {path} ({error.strerror})", "check the path") from None


def _rows(
    path: Path, lines: Iterator[list[str]], columns: Sequence[str | tuple[str, ...]]
) -> Iterator[Row]:
    number = 0
    try:
        header = next(lines, [])
        places = {_first(names): _place(path, header, names) for names in columns}
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
        # The messages of the csv module are fixed sentences: none quotes the file.
        raise BadInput(
            f"{path}: row {number + 1} cannot be read ({error})",
            "quote fields as CSV does; for longer texts use JSONL or Parquet",
        ) from None


def _first(names: str | tuple[str, ...]) -> str:
    return names if isinstance(names, str) else names[0]


def _place(path: Path, header: list[str], names: str | tuple[str, ...]) -> int:
    for name in (names,) if isinstance(names, str) else names:
        if name in header:
            return header.index(name)
    missing = names if isinstance(names, str) else " or ".join(names)
    raise BadInput(f"{path} has no column {missing}", "name it in the first line of the file")
