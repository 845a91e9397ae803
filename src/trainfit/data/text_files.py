"""Labelled texts of a file, read in chunks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from trainfit.core.errors import BadInput, reason
from trainfit.core.files import checksum
from trainfit.data.columnar import is_stream
from trainfit.data.conll_files import TAGGED, read_words
from trainfit.data.labels import (
    Label,
    LabelKind,
    Target,
    check_characters,
    check_classes,
    check_kind,
    check_labels,
    infer_kind,
    is_marked,
    is_missing,
    one_class,
    read_label,
    read_name,
    written_number,
)
from trainfit.data.row_files import (
    KINDS,
    LONGEST_LINE,
    Kinds,
    check_file,
    column_names,
    has_decimal_commas,
    read_rows,
)

_TELLING = 10_000
"""Rows that tell the kind of the labels."""
_FIRST = 1000
"""Rows that are looked at before anything is loaded."""
_MARKS = {"0", "1", "0.0", "1.0", "true", "false"}
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""Names of each split, as files and values of a column have them."""
_SPLIT_OF = {name: split for split, names in SPLITS.items() for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Names of the columns."""

    text: str = "text"
    label: str = "label"
    """Column of the labels, or the names of several joined by +."""
    marks: tuple[str, ...] = ()
    """Columns with a 0 or 1 for the label of each name; none: one column has all labels."""
    second: str | None = None
    """Column of the second texts; None: there are no pairs."""
    group: str | None = None
    """Column of rows that must stay together in a split, such as the author; None: no groups."""
    tagged: bool = False
    """True where texts are lists of words and labels are lists of tags, one for each word."""
    split: str | None = None
    """Column that says which split a row is of; None: all rows are of one."""
    part: str = "train"
    """The split whose rows are read, where a column says which they are."""

    @property
    def names(self) -> list[str]:
        """Columns to read."""
        more = (self.second, self.group, self.split)
        return [self.text, *self.labels, *(name for name in more if name is not None)]

    @property
    def labels(self) -> list[str]:
        """Columns of the labels."""
        return list(self.marks) or [self.label]

    def label_of(self, row: Mapping[str, Any], place: str) -> Any:
        """Label of a row: its cell, or the names of the columns that hold a 1."""
        if not self.marks:
            return row[self.label]
        return [name for name in self.marks if is_marked(row[name], f"{place}, column {name}")]

    def of_part(self, part: str, *, alone: bool) -> Columns:
        """Columns of another split, which may have a file of its own."""
        return replace(self, part=part, split=None if alone else self.split)

    @property
    def kinds(self) -> Kinds:
        """Kinds of files with such columns, by their ending."""
        return TAGGED if self.tagged else KINDS

    @property
    def texts(self) -> list[str]:
        """Columns of texts."""
        return [self.text] if self.second is None else [self.text, self.second]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Checked rows of a file."""

    texts: list[str] = field(default_factory=list, repr=False)
    labels: list[Label] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Number of each row in the file, from 1; skipped ones count."""
    seconds: list[str] = field(default_factory=list, repr=False)
    """Second texts, where there are pairs."""
    words: list[list[str]] = field(default_factory=list, repr=False)
    """Words of each row instead of its text, where each has a tag."""

    @property
    def rows(self) -> list[Any]:
        """The text of each row as a tuple, both of a pair, or its words as a list."""
        if self.words:
            return self.words
        columns = [self.texts, self.seconds] if self.seconds else [self.texts]
        return list(zip(*columns, strict=True))

    @property
    def plain(self) -> list[str]:
        """All texts; words are joined."""
        return [*self.texts, *self.seconds, *map(" ".join, self.words)]


@dataclass(slots=True)
class RowCount:
    """Rows of a file so far, and those among them that were skipped."""

    rows: int = 0
    skipped: int = 0


def read_chunks(
    path: Path,
    columns: Columns,
    rows: int = 2048,
    *,
    kind: LabelKind | None = None,
    count: RowCount | None = None,
) -> Iterator[Chunk]:
    """Read a file in chunks of `rows` rows, with only one in memory; `kind` None: classes.

    Rows without a text or a label are skipped, and counted by `count`. Of several labels, none
    is an answer too.
    """
    kind = kind or LabelKind()
    _check_apart(columns)
    chunk = Chunk()
    count = count or RowCount()
    kinds: dict[str, int] = {}
    add = _add_words if columns.tagged else partial(_add_text, kind=kind)
    for number, row in read_rows(path, columns.names, columns.kinds):
        if columns.split is not None and split_of(row[columns.split]) != columns.part:
            continue
        count.rows += 1
        place = f"{path}: row {number}"
        if not add(chunk, row, columns, place=place, number=number, kinds=kinds):
            count.skipped += 1
            continue
        chunk.numbers.append(number)
        if columns.group is not None:
            chunk.groups.append(read_name(row[columns.group], f"{place}, column {columns.group}"))
        if len(chunk.labels) == rows:
            yield chunk
            chunk = Chunk()
    if chunk.labels:
        yield chunk


def split_of(value: Any) -> str | None:
    """Name the split that a cell says; None where it says none."""
    return _SPLIT_OF.get(str(value).strip().lower())


def find_parts(path: Path, columns: Columns, column: str) -> Counter[str | None]:
    """Count the labelled rows of each split that a column tells; None: of other values."""
    rows = read_rows(path, list({column, *columns.labels}), columns.kinds)
    return Counter(
        split_of(row[column])
        for number, row in rows
        if not is_missing(columns.label_of(row, f"{path}: row {number}"))
    )


def find_marks(path: Path, columns: Columns) -> list[str]:
    """Name the columns of 0 and 1, where that of the label and two others at least are such."""
    there = column_names(path, columns.kinds)
    if columns.tagged or is_stream(path) or columns.label not in there:
        return []
    cells: dict[str, set[str]] = {name: set() for name in there if name and "+" not in name}
    with suppress(BadInput):  # for a column that cannot be read, and is not asked for
        for _, row in islice(read_rows(path, list(cells)), _FIRST):
            for name, value in row.items():
                cells[name].add(str(value).strip().lower())
    found = [name for name, values in cells.items() if values and values <= _MARKS]
    return found if columns.label in found and len(found) > 2 else []


def _check_apart(columns: Columns) -> None:
    """Raise BadInput for a column that is named twice."""
    used = [*columns.texts, *columns.labels]
    if twice := next((name for name in used if used.count(name) > 1), None):
        keys = f"data.{'words' if columns.tagged else 'text'}_column, data.label_column"
        if columns.second is not None:
            keys = "data.first_column, data.second_column, data.label_column"
        named = "two of texts and labels" if columns.second else "text and label"
        raise BadInput(f"{named} are both the column {twice}", f"name others ({keys})")


def _add_text(
    chunk: Chunk,
    row: dict[str, Any],
    columns: Columns,
    *,
    place: str,
    number: int,
    kinds: dict[str, int],
    kind: LabelKind,
) -> bool:
    """Add a row with its text, or both of a pair; False where it has no text or label."""
    label, where = columns.label_of(row, place), f"{place}, column {columns.label}"
    unlabelled = kind.target != "multi" and is_missing(label)
    if unlabelled or any(is_blank(row[name]) for name in columns.texts):
        return False
    found = read_label(label, kind, where)
    if found == kind.unlabelled:
        return False
    chunk.texts.append(_text(row[columns.text], f"{place}, column {columns.text}"))
    if columns.second is not None:
        second = columns.second
        chunk.seconds.append(_text(row[second], f"{place}, column {second}"))
    chunk.labels.append(found)
    if label is not None:
        check_kind(kinds, label, number, where)
    return True


def _add_words(
    chunk: Chunk,
    row: dict[str, Any],
    columns: Columns,
    *,
    place: str,
    number: int,
    kinds: dict[str, int],
) -> bool:
    """Add a row of words, each with its tag; False where it has no words, or no tags at all."""
    words = read_words(row[columns.text], f"{place}, column {columns.text}")
    tags, where = row[columns.label], f"{place}, column {columns.label}"
    if tags is None or tags == "":
        return False
    if not isinstance(tags, list):
        raise BadInput(f"{where}: the tags are no list", 'write one such as ["B-PER", "O"]')
    if len(words) != len(tags):
        raise BadInput(f"{place}: {len(words)} words and {len(tags)} tags", "give each word one")
    if not any(word.strip() for word in words):
        return False
    chunk.words.append(words)
    chunk.labels.append(tuple(read_name(tag, where) for tag in tags))
    for tag in tags:
        check_kind(kinds, tag, number, where)
    return True


def infer_labels(path: Path, columns: Columns, asked: Target | Literal["auto"]) -> LabelKind:
    """Tell the kind of a file's labels by its first rows."""
    if columns.tagged:
        return LabelKind(target="tags")
    rows = islice(read_rows(check_file(path), columns.names), _TELLING)
    labels = [columns.label_of(row, f"{path}: row {number}") for number, row in rows]
    known = [label for label in labels if not is_missing(label)]
    comma = has_decimal_commas(path)
    if asked in ("auto", "regression") and (one := written_number(known, comma)):
        fix = "write each number plainly, such as 1050.5, or set data.target=single or multi"
        raise BadInput(f"{path}, column {columns.label}, has numbers such as {one}", fix)
    kind = infer_kind(known, asked, comma=comma)
    if kind.target == "single" and len(labels) < _TELLING and len(set(map(str, known))) == 1:
        raise one_class(read_name(known[0], f"{path}, column {columns.label}"))
    return kind


def count_tags(path: Path, columns: Columns) -> Counter[str]:
    """Count the words of each tag in a file; raise BadInput where tags look like texts.

    Of a stream, which may not fit on this machine, the first rows tell.
    """
    counts: Counter[str] = Counter()
    chunks = read_chunks(path, columns, _TELLING, kind=LabelKind(target="tags"))
    for chunk in islice(chunks, 1 if is_stream(path) else None):
        for tags in chunk.labels:
            counts.update(tags)  # type: ignore[arg-type]
    check_classes(counts, counts.total(), f"{path}, column {columns.label},")
    return counts


def read_texts(path: Path, column: str) -> Iterator[str]:
    """Read the texts of a file; labels are not needed."""
    for number, row in read_rows(path, [column]):
        yield _text(row[column], f"{path}: row {number}, column {column}")


def read_filled(path: Path, columns: Sequence[str]) -> tuple[dict[int, list[str]], int]:
    """Read the texts of each row by its number, and count the rows where one is missing."""
    found: dict[int, list[str]] = {}
    skipped = 0
    for number, row in read_rows(path, list(columns)):
        if any(is_blank(row[name]) for name in columns):
            skipped += 1
            continue
        place = f"{path}: row {number}, column"
        found[number] = [_text(row[name], f"{place} {name}") for name in columns]
    return found, skipped


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


def check_columns(path: Path, columns: Columns) -> None:
    """Raise BadInput where a file cannot be read, lacks a column or has no row."""
    rows = read_rows(check_file(path, columns.kinds), columns.names, columns.kinds)
    if next(rows, None) is None:
        raise BadInput(f"{path} has no rows", "give a file with a text per row")


def check_first_rows(
    path: Path, columns: Columns, kind: LabelKind, known: Sequence[str] | None = None
) -> Sequence[str] | None:
    """Raise BadInput for a mistake in the first rows, before anything is loaded.

    Returns the `known` labels: those of the training file, if that ends within the first rows.
    """
    chunk = next(read_chunks(path, columns, _FIRST, kind=kind), None)
    if chunk is None:
        what = f"{path} has no rows with a text and a label"
        raise BadInput(what, "give a file with a text per row")
    labels = (label if isinstance(label, tuple) else (label,) for label in chunk.labels)
    names = list(dict.fromkeys(str(name) for label in labels for name in label))
    trains, ends = columns.part == "train", len(chunk.labels) < _FIRST
    if kind.target != "regression" and (ends if trains else known is not None):
        check_labels(path, columns.label, names, len(chunk.labels), None if trains else known)
    return names if trains and ends else known


def is_blank(value: Any) -> bool:
    """Tell if a cell holds nothing."""
    return value is None or (isinstance(value, str) and not value.strip())


def _text(value: Any, place: str) -> str:
    if isinstance(value, list | int | float):
        found = "a list" if isinstance(value, list) else "a number"
        fix = "write each text as one string, or name the right column (data.text_column)"
        raise BadInput(f"{place}: there is {found} and no text", fix)
    if not isinstance(value, str) or not value.strip():
        raise BadInput(f"{place}: there is no text", "fill it in, or leave the row out")
    if len(value) > LONGEST_LINE:
        raise BadInput(f"{place}: the text has {len(value):,} characters", "break it up")
    return check_characters(value, place)
