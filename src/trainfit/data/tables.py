"""Lines of a text file and rows of a CSV file, with errors that never quote the content."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainfit.errors import BadInput, reason
from trainfit.files import check_regular, open_regular

Row = tuple[int, dict[str, str]]
LONGEST_LINE = 64 << 20
"""Characters of a line or a text: more than any book has."""
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Longest first: one begins like the other."""


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file with their ends, with or without a byte order mark."""
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
    """Each row's number, counted from 1 below the header, and its values in these columns.

    A column may have several spellings; its values come under the first.
    """
    lines = csv.reader(read_lines(path), strict=True)
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
    spellings = (names,) if isinstance(names, str) else names
    places = [place for place, name in enumerate(header) if name in spellings]
    if len(places) > 1:
        raise BadInput(f"{path} has the column {spellings[0]} twice", "rename one of them")
    if not places:
        missing = " or ".join(spellings)
        raise BadInput(f"{path} has no column {missing}", "name it in the first line of the file")
    return places[0]
