"""Rows of a table of texts: CSV, TSV, JSONL, JSON, Parquet or a saved `datasets` folder."""

from __future__ import annotations

import codecs
import csv
import difflib
import io
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from trainfit.conf.composition import flatten
from trainfit.core import codec
from trainfit.core.errors import BadInput, TrainfitWarning, reason
from trainfit.core.files import check_regular, open_regular
from trainfit.data import columnar
from trainfit.data.columnar import Rows, shown_columns

LONGEST_LINE = 64 << 20
"""Most characters of a line or a text; no book has as many."""
PATHS = "check data.train, data.validation and data.test"
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
_SAMPLE = 100
"""Lines of a file that tell its separator, or the keys of its objects."""
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Encoding by byte order mark, longest first, since one begins like another."""
_WRONG = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as Python's `surrogateescape` stands them in."""
_MOST_WRONG, _FEW_WRONG = 0.2, 20
"""Greatest share of such bytes in Western texts, above a number that tells nothing."""
_ELSEWHERE = {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip"), "unpack it first"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save it as CSV"),
    ".txt": "name it .csv or .tsv where it is a table with a header",
}
"""Fixes for files of other endings."""
_SEPARATOR_LINE = re.compile(r"\ufeff?\"?sep=(.)\"?\s*", re.IGNORECASE)
"""First line by which Excel is told the separator."""
_OPENED = re.compile(r'(?<![^\t])"[^\t\r\n]*')
_QUOTED = re.compile(r'"[^"]*(""[^"]*)*"')
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(?!/)", re.IGNORECASE)
csv.field_size_limit(LONGEST_LINE)  # a book may be one field


class FileKind(NamedTuple):
    """A kind of file: how its columns and its rows are read."""

    columns: Callable[[Path], list[str]]
    rows: Callable[[Path, list[str]], Rows]


Kinds = Mapping[str, FileKind]


def read_rows(path: Path, names: list[str], kinds: Kinds | None = None) -> Rows:
    """Read each row's number, from 1, and its values in these columns; None where one is absent.

    `kinds` are the kinds of files by their ending; None: tables.
    """
    return _kind(path, kinds).rows(path, names)


def column_names(path: Path, kinds: Kinds | None = None) -> list[str]:
    """Names of a file's columns, in their order."""
    return _kind(check_file(path, kinds), kinds).columns(path)


def check_file(path: Path, kinds: Kinds | None = None) -> Path:
    """Return the path; raise BadInput where it cannot be read or has an unknown format."""
    try:
        if path.is_dir():
            return columnar.check_saved_dataset(path)
    except OSError as error:  # a name that is too long, or no permission
        raise BadInput(f"cannot read {str(path)!r:.200} ({reason(error)})", PATHS) from None
    if address := _ADDRESS.match(str(path)):
        what = f"{address[1]}://{str(path)[address.end() :]} is an address, not a file"
        raise BadInput(what, "download it first")
    check_regular(path, _misspelt(path) or PATHS)
    _kind(path, kinds)
    return path


def _misspelt(path: Path) -> str | None:
    """Suggest a file in place of a missing one, such as one of a similar name."""
    with suppress(OSError, ValueError):
        if any(mark in path.name for mark in "*?[") and not path.exists():
            return "name one file, or a folder with train.csv and test.csv"
        files = [] if path.exists() else islice(path.parent.iterdir(), 1000)
        names = [one.name for one in files if one.suffix.lower() in KINDS]
        if near := difflib.get_close_matches(path.name[:200], names, 1, 0.8):
            return f"did you mean {near[0]}?"
    return None


def _kind(path: Path, kinds: Kinds | None) -> FileKind:
    if path.is_dir():
        return FileKind(columnar.table_columns, columnar.read_table)
    kinds = KINDS if kinds is None else kinds
    if path.suffix.lower() not in kinds:
        given = f"give {', '.join(kinds)} or a folder that datasets' save_to_disk wrote"
        fix = _ELSEWHERE.get(path.suffix.lower(), given)
        raise BadInput(f"{path} has the ending {path.suffix or '(none)'}", fix)
    return kinds[path.suffix.lower()]


def read_lines(path: Path) -> Iterator[str]:
    """Read the lines of a file with their line ends: UTF-8, or as its byte order mark says.

    Single bytes that are not UTF-8 are read as Windows-1252, with a warning.
    """
    check_regular(path)
    try:
        with open_regular(path) as raw:
            start = raw.read(4)
            marked = next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
            raw.seek(0)
            errors = "strict" if marked else "surrogateescape"
            file = io.TextIOWrapper(raw, encoding=marked or "utf-8-sig", errors=errors, newline="")
            western, number = Western(path), 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                line = western.read(line)
                _check_line(line, f"{path}: line {number}")
                yield line
            western.tell()
    except UnicodeError:
        raise _not_utf8(path) from None
    except OSError as error:
        raise BadInput(f"cannot read {path} ({reason(error)})", "check the path") from None


def _table_lines(path: Path) -> Iterator[str]:
    """Lines of a table from its header on, without empty ones and Excel's `sep=;` before it."""
    lines = read_lines(path)
    for line in lines:
        if line.strip() and not _SEPARATOR_LINE.fullmatch(line):
            yield line
            break
    yield from lines


def _not_utf8(path: Path) -> BadInput:
    fix = "save it as UTF-8; `iconv -f ENCODING -t UTF-8 OLD > NEW` does so, such as from GB18030"
    return BadInput(f"{path} is not UTF-8 text", fix)


class Western:
    """Text of a file, decoded with surrogates, whose bytes that are not UTF-8 are Windows-1252."""

    def __init__(self, path: Path) -> None:
        """Begin with no bytes read of `path`."""
        self._path, self._seen, self._wrong = path, 0, 0

    def read(self, text: str) -> str:
        """Decode the wrong bytes of a part, or raise BadInput where they are too many."""
        self._seen += len(text)
        if text.isascii():
            return text
        try:
            text, found = _WRONG.subn(
                lambda one: one[0].encode("utf-8", "surrogateescape").decode("windows-1252"), text
            )  # five bytes have no meaning in Windows-1252 either
        except UnicodeError:
            raise _not_utf8(self._path) from None
        self._wrong += found
        if self._wrong > max(_FEW_WRONG, _MOST_WRONG * self._seen):
            raise _not_utf8(self._path)
        return text

    def tell(self) -> None:
        """Warn where there were wrong bytes."""
        if self._wrong:
            _tell_western(self._path)


@cache
def _tell_western(path: Path) -> None:
    what = f"{path.name} is not UTF-8 and is read as Windows-1252"
    fix = "save it as UTF-8 where letters come out wrong"
    warnings.warn(f"{what}; {fix}", TrainfitWarning, stacklevel=3)


def _check_line(line: str, place: str) -> None:
    if len(line) > LONGEST_LINE:
        raise BadInput(f"{place} has over {LONGEST_LINE >> 20} million characters", "break it up")
    if "\0" in line:
        raise BadInput(f"{place} has a NUL: the file is binary, or not UTF-8", "save it as UTF-8")


def read_csv(path: Path, columns: Sequence[str | tuple[str, ...]], by_line: bool = False) -> Rows:
    """Read each row's number, from 1 below the header, and its values in these columns.

    A column of several names is returned under the first. `by_line`: between tabs, lines are rows.
    """
    mark = find_separator(path)
    lines, number = _fields(_csv_lines(path, mark, by_line), mark), -1
    try:
        header, number = [name.strip() for name in next(lines, [])], 0
        spellings = [(names,) if isinstance(names, str) else names for names in columns]
        places = {names[0]: _place(path, header, names) for names in spellings}
        for number, values in enumerate(lines, 1):
            if not values:
                continue
            if len(values) != len(header):
                raise BadInput(
                    f"{path}: row {number} has {len(values)} fields, but the header {len(header)}",
                    f"quote fields that hold a {_SEPARATORS[mark]}",
                )
            yield number, {name: values[place] for name, place in places.items()}
    except csv.Error as error:
        # The csv module's messages are fixed sentences that quote no data.
        fix = "quote fields as CSV does; for longer texts use JSONL or Parquet"
        where = "the header" if number < 0 else f"row {number + 1}"
        raise BadInput(f"{path}: {where} cannot be read ({error})", fix) from None


def _fields(lines: Iterable[str], mark: str, strict: bool = True) -> Iterator[list[str]]:
    """Fields of each row; after a comma or semicolon a space may stand before a quote."""
    return csv.reader(lines, delimiter=mark, skipinitialspace=mark in ",;", strict=strict)


def _csv_lines(path: Path, mark: str, by_line: bool) -> Iterator[str]:
    """Lines of a table as CSV has them: between tabs many tools write quotes as they are."""
    lines = _table_lines(path)
    plain = mark == "\t" and (by_line or _has_plain_quotes(path, path.stat().st_mtime_ns))
    return (_OPENED.sub(_quote, line) for line in lines) if plain else lines


@cache
def _has_plain_quotes(path: Path, _changed: int) -> bool:
    """Tell a table, read whole, with a row in each line that as CSV breaks, or has fewer rows."""
    width, lines = _shape(line.split("\t") for line in _table_lines(path) if line.strip("\r\n"))
    quoted, rows = _shape(_fields(_table_lines(path), "\t"))
    opened = (one for line in _table_lines(path) for one in _OPENED.findall(line))
    joined = width > 1 and rows < lines and not any('""' in one[1:] for one in opened)
    return width > 0 and (not quoted or joined)


def _shape(rows: Iterable[list[str]]) -> tuple[int, int]:
    """Number of fields that all rows have, and of rows; 0 where they differ or cannot be read."""
    widths = Counter[int]()
    with suppress(csv.Error):
        widths.update(len(row) for row in rows if row)
        return widths.popitem() if len(widths) == 1 else (0, 0)
    return (0, 0)


def _quote(found: re.Match[str]) -> str:
    """Quote a field that begins with a quote, unless it is quoted."""
    return found[0] if _QUOTED.fullmatch(found[0]) else '"' + found[0].replace('"', '""') + '"'


def has_decimal_commas(path: Path) -> bool:
    """Tell a file of a country with decimal commas: there a semicolon separates fields."""
    return path.suffix.lower() == ".csv" and path.is_file() and find_separator(path) == ";"


def find_separator(path: Path) -> str:
    """Find the separator of a CSV file: one that divides the header, and the rows alike."""
    told = _SEPARATOR_LINE.fullmatch(next(read_lines(path), ""))
    if told and told[1] in _SEPARATORS:
        return told[1]
    lines = list(islice(_table_lines(path), _SAMPLE))
    marks = sorted(_SEPARATORS, key=lambda mark: mark != "\t" or path.suffix.lower() != ".tsv")
    return max(marks, key=lambda mark: _agreement(lines, mark))


def _agreement(lines: Sequence[str], mark: str) -> tuple[float, int]:
    """Share of the rows with as many fields as the header, and their number; none for one field."""
    rows: list[list[str]] = []
    with suppress(csv.Error):  # the rows before the error tell enough
        rows.extend(_fields(lines, mark, strict=False))
    # The last row may go on in the next line.
    header, *others = [len(row) for row in rows if row] or [0]
    others = others[:-1] if len(lines) == _SAMPLE else others
    alike = sum(fields == header for fields in others) / len(others) if others else 1.0
    return (alike, header) if header > 1 else (0.0, 0)


def _header(path: Path) -> list[str]:
    lines = _fields(_table_lines(path), find_separator(path), strict=False)
    try:
        return [name.strip() for name in next(lines, [])]
    except csv.Error as error:
        raise BadInput(f"{path}: the header cannot be read ({error})", "fix it") from None


def _place(path: Path, header: list[str], spellings: tuple[str, ...]) -> int:
    places = [place for place, name in enumerate(header) if name in spellings]
    if len(places) > 1:
        raise BadInput(f"{path} has the column {spellings[0]} twice", "rename one of them")
    if not places:
        raise BadInput(f"{path} has no column {' or '.join(spellings)}", shown_columns(header))
    return places[0]


def _read_objects(path: Path, names: list[str]) -> Rows:
    there = _object_keys(path)
    for name in names:
        if there and name not in there:
            raise BadInput(f"{path} has no column {name}", shown_columns(there))
    for number, row in _objects(path):
        yield number, {name: row.get(name) for name in names}


def _object_keys(path: Path) -> list[str]:
    """Keys of the first objects; some writers leave out those without a value."""
    return list({name: None for _, row in islice(_objects(path), _SAMPLE) for name in row})


def _objects(path: Path) -> Rows:
    """Read JSON objects, one per line or, in a .json file, as one value."""
    lines = read_lines(path)
    first = next(lines, "")
    if path.suffix.lower() == ".json":
        second = next(lines, "")
        if not second.strip() or not isinstance(_parsed(first, str(path)), dict):
            yield from _listed_objects(path, "".join(chain([first, second], lines)))
            return
        lines = chain([second], lines)
    for number, line in enumerate(chain([first], lines), 1):
        if line.strip():
            row = _parsed(line, f"{path}: row {number}")
            if not isinstance(row, dict):
                fix = "write one object per line"
                raise BadInput(f"{path}: row {number} is not a JSON object", fix)
            yield number, dict(flatten(row))  # names such as data.text, of an object inside


def _listed_objects(path: Path, text: str) -> Rows:
    value = _parsed(text, str(path)) if text.strip() else []
    rows = _rows_of(value) if isinstance(value, dict) else value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadInput(f"{path} is not a list of JSON objects", "write one object per row")
    yield from ((number, dict(flatten(row))) for number, row in enumerate(rows, 1))


def _rows_of(value: dict[str, Any]) -> list[Any]:
    """Find the rows of one JSON object: its only list of objects, or lists or objects by column.

    Other objects are those that pandas writes with orient="split" or orient="index".
    """
    halves = (value.get(key) for key in ("columns", "data"))
    names, data = (one if isinstance(one, list) else [] for one in halves)
    if names and all(isinstance(row, list) and len(row) == len(names) for row in data):
        return [dict(zip(map(str, names), row, strict=True)) for row in data]
    lists = [one for one in value.values() if isinstance(one, list) and one]
    inner = [one for one in lists if all(isinstance(row, dict) for row in one)]
    if len(inner) == 1:
        return inner[0]
    if lists and len(lists) == len(value) and len(set(map(len, lists))) == 1:
        return [dict(zip(value, row, strict=True)) for row in zip(*lists, strict=True)]
    columns = [one for one in value.values() if isinstance(one, dict)]
    if len(columns) < len(value) or len({tuple(one) for one in columns}) != 1:
        return [value]
    if len(columns) > len(columns[0]):  # by row
        return columns
    return [{name: one[row] for name, one in value.items()} for row in columns[0]]


def _parsed(text: str, place: str) -> Any:
    """Parse JSON; None where it is something else."""
    try:
        return codec.parse(text, _once, missing=True)
    except BadInput as twice:
        raise BadInput(f"{place} {twice.what}", twice.fix) from None
    except ValueError:
        return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise BadInput("has the same key twice", "keep one of them")
    return row


_TABLE = FileKind(_header, read_csv)
_OBJECTS = FileKind(_object_keys, _read_objects)
KINDS: Kinds = {
    ".csv": _TABLE,
    ".tsv": _TABLE,
    ".jsonl": _OBJECTS,
    ".ndjson": _OBJECTS,
    ".json": _OBJECTS,
    ".parquet": FileKind(columnar.table_columns, columnar.read_table),
}
"""Kinds of files by their ending."""
