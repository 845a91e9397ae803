"""Cache of a text file's tokens: made once, then mapped from disk.

The folder's name is a hash of everything that the tokens depend on (the file's content, the
tokenizer, the length, the columns), so that old tokens are never used after a change.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainfit.core import caches
from trainfit.core.errors import BadInput, RunFailed, TrainfitWarning, reason
from trainfit.core.files import cache_folder, checksum
from trainfit.data.columnar import is_stream
from trainfit.data.labels import VALUE, Label, LabelKind, Target, check_labels, class_order
from trainfit.data.row_files import check_file
from trainfit.data.text_files import Chunk, Columns, RowCount, hash_content, read_chunks
from trainfit.data.tokenizers import tokenizer_hash
from trainfit.data.tokens import (
    IGNORED,
    Tokens,
    encode_pairs,
    encode_texts,
    encode_words,
    map_in_order,
    tag_tokens,
)
from trainfit.hardware.host import allowed_by_affinity

if TYPE_CHECKING:
    from trainfit.data.tokenizers import Tokenizer

Progress = Callable[[int], None]
"""Called with the number of texts done so far."""
_FORMAT = 9
_FILES = ("tokens", "lengths", "labels", "groups", "types", "rows")
_MOST_CLASSES = 10_000
_LARGE = 64 * 2**20
"""Bytes of a file from which several processes are faster than one."""
_Encoded = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8], NDArray[np.int32]]
"""Token ids of texts end to end, the length of each, token types where there are some, and the
words that tokens begin, where words have tags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledTokens:
    """Tokens of a file, and the class names in order."""

    tokens: Tokens
    classes: list[str]
    rows: int
    """Rows of the file, with those that were skipped for want of a text or a label."""
    cut: tuple[int, int] = (0, 0)
    """Sentences that were cut, and the words that they lost, where words have tags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Meta:
    """Description of a file's tokens, from the folder that holds them."""

    rows: int
    sequences: int
    tokens: int
    labels: tuple[str, ...]
    checksums: dict[str, str]
    words: int = 0
    """Words, where each has a tag; and below the sentences that were cut, and the words lost."""
    cut: tuple[int, int] = (0, 0)


def tokenize_file(
    path: Path,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    columns: Columns,
    kind: LabelKind | None = None,
    known: Sequence[str] | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> LabelledTokens:
    """Read a file's tokens from the cache, or make them. `processes` None: by the file's size.

    The cache holds the label names, so nothing is cached unless they are class names, or the
    `known` ones where given.
    """
    kind = kind or LabelKind()
    content = {
        "format": _FORMAT,
        "content": hash_content(check_file(path, columns.kinds)),
        "tokenizer": tokenizer_hash(tokenizer),
        "max_length": max_length,
        "columns": asdict(columns),
        "labels": asdict(kind),
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    folder = cache_folder() / "tokens" / key[:32]
    found = _open(folder, kind.target)
    check = partial(check_labels, path, columns.label, known=known)
    if found is not None:
        check(found.classes, _labels(found.tokens))
    else:
        counted = RowCount()
        chunks = read_chunks(path, columns, kind=kind, count=counted)
        count = _processes(path) if processes is None else processes
        rows = ((chunk, chunk.rows) for chunk in chunks)
        encoded = map_in_order(rows, partial(_encode, tokenizer, max_length), count)
        _make(folder, path, encoded, counted, check, progress)
        found = _open(folder, kind.target)
    if found is None:
        raise RunFailed(f"{folder} was changed as it was written", "try again")
    if skipped := found.rows - len(found.tokens):
        what = f"{path.name}: skipped {skipped:,} of {found.rows:,} rows without text or label"
        what += f" ({kind.unlabelled} counts as none)" if kind.unlabelled else ""
        warnings.warn(what, TrainfitWarning, stacklevel=2)
    if found.cut[0]:
        sentences, words = found.cut
        what = f"{path.name}: {sentences:,} of {len(found.tokens):,} sentences lose {words:,} words"
        why = f"beyond data.max_length {max_length}, or without any token"
        warnings.warn(f"{what}, {why}", TrainfitWarning, stacklevel=2)
    return found


def _labels(tokens: Tokens) -> int:
    """Number of labels: one per sequence, or one per word."""
    return len(tokens) if tokens.tags is None else int(tokens.labels.sum())


def _processes(path: Path) -> int:
    if is_stream(path):
        return allowed_by_affinity()
    files = path.rglob("*") if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.is_file())
    return 1 if size < _LARGE else allowed_by_affinity()


def _encode(tokenizer: Tokenizer, max_length: int, rows: list[Any]) -> _Encoded:
    """Tokenise the text of each row, both of a pair, or its words."""
    types: Sequence[Sequence[int]] | None = None
    places: Sequence[Sequence[int]] = [[]]
    if isinstance(rows[0], list):
        encoded, places = encode_words(tokenizer, rows, max_length)
    elif len(rows[0]) == 1:
        encoded = encode_texts(tokenizer, [text for (text,) in rows], max_length)
    else:
        encoded, types = encode_pairs(tokenizer, rows, max_length)
    ids = [np.array(one, dtype=np.int32) for one in encoded]
    kinds = [np.array(one, dtype=np.uint8) for one in types or [[]]]
    sizes = np.array([one.size for one in ids], dtype=np.int32)
    begun = [np.array(one, dtype=np.int32) for one in places]
    return np.concatenate(ids), sizes, np.concatenate(kinds), np.concatenate(begun)


def _make(
    folder: Path,
    source: Path,
    encoded: Iterator[tuple[Chunk, _Encoded]],
    counted: RowCount,
    check: Callable[[Sequence[str], int], None],
    progress: Progress | None,
) -> None:
    """Write the folder whole or not at all."""
    with caches.building(folder) as made:
        meta = _write(made, source, encoded, counted, progress)
        if not meta.sequences:
            which = " with a text and a label" if counted.rows else ""
            raise BadInput(f"{source} has no rows{which}", "give a file with a text per row")
        check(meta.labels, meta.words or meta.sequences)
        caches.write(made / "meta.json", meta)


def _write(
    building: Path,
    source: Path,
    encoded: Iterator[tuple[Chunk, _Encoded]],
    counted: RowCount,
    progress: Progress | None,
) -> _Meta:
    labels: dict[str, int] = {}
    sequences = tokens = words = 0
    cut = np.zeros(2, dtype=np.int64)
    with ExitStack() as stack:
        files = {name: stack.enter_context((building / name).open("wb")) for name in _FILES}
        for chunk, (flat, sizes, types, places) in encoded:
            files["tokens"].write(flat.tobytes())
            files["types"].write(types.tobytes())
            files["lengths"].write(sizes.tobytes())
            if chunk.words:
                rows, lost = _tag_rows(chunk.labels, labels, sizes, places)
                words += sum(map(len, chunk.words))
                cut += lost
            else:
                rows = _label_rows(chunk.labels, labels, sequences)
            if len(labels) > _MOST_CLASSES:
                fix = "name the right column (data.label_column)"
                raise BadInput(f"{source} has more than {_MOST_CLASSES:,} different labels", fix)
            files["labels"].write(rows.tobytes())
            files["rows"].write(np.array(chunk.numbers, dtype=np.int64).tobytes())
            for name in chunk.groups:  # a hash of its name, so that no table of groups is needed
                files["groups"].write(hashlib.blake2b(name.encode(), digest_size=8).digest())
            sequences += sizes.size
            tokens += flat.size
            if progress is not None:
                progress(sequences)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return _Meta(
        rows=counted.rows,
        sequences=sequences,
        tokens=tokens,
        labels=tuple(labels),
        checksums=_checksums(building),
        words=words,
        cut=(int(cut[0]), int(cut[1])),
    )


def _label_rows(labels: Sequence[Label], names: dict[str, int], first: int) -> NDArray[Any]:
    """Number the labels of rows from `first` on: classes, pairs of row and label, or numbers."""
    found: list[Any] = []
    for row, label in enumerate(labels, first):
        if isinstance(label, float):
            found.append(label)
        elif isinstance(label, str):
            found.append(names.setdefault(label, len(names)))
        else:
            found += [(row, names.setdefault(name, len(names))) for name in label]
    kind = np.float64 if isinstance(labels[0], float) else np.int32
    return np.array(found, dtype=kind)


def _tag_rows(
    rows: Sequence[Any], names: dict[str, int], sizes: NDArray[np.int32], places: NDArray[np.int32]
) -> tuple[NDArray[np.int32], tuple[int, int]]:
    """Number the tag of every token; count the rows with words that none begins, and those."""
    found, lost = [], []
    for tags, begun in zip(rows, np.split(places, np.cumsum(sizes)[:-1]), strict=True):
        numbers = np.array([names.setdefault(tag, len(names)) for tag in tags])
        found.append(tag_tokens(numbers, begun))
        lost.append(len(tags) - int((begun >= 0).sum()))
    return np.concatenate(found), (sum(one > 0 for one in lost), sum(lost))


def _read_labels(folder: Path, meta: _Meta, classes: list[str], target: Target) -> NDArray[Any]:
    if target == "regression":
        return np.fromfile(folder / "labels", dtype=np.float64)
    places = {name: place for place, name in enumerate(classes)}
    numbers = np.array([places[name] for name in meta.labels], dtype=np.int64)
    found = np.fromfile(folder / "labels", dtype=np.int32)
    if target in ("single", "tags"):
        return np.where(found < 0, IGNORED, numbers[np.maximum(found, 0)])
    pairs = found.reshape(-1, 2)
    table = np.zeros((meta.sequences, len(classes)), dtype=np.uint8)
    table[pairs[:, 0], numbers[pairs[:, 1]]] = 1
    return table


def _checksums(folder: Path) -> dict[str, str]:
    return {name: checksum(folder / name) for name in _FILES}


def _open(folder: Path, target: Target) -> LabelledTokens | None:
    """Open the tokens in a folder; None where there are none, or damaged ones."""
    meta = caches.read(_Meta, folder / "meta.json") if folder.exists() else None
    try:
        if meta is None or _checksums(folder) != meta.checksums:
            raise OSError(errno.EIO, "a file does not match its checksum")
    except OSError as error:
        if folder.exists():
            caches.throw_away(folder, reason(error))
        return None
    lengths = np.fromfile(folder / "lengths", dtype=np.int32).astype(np.int64)
    groups, types = np.fromfile(folder / "groups", dtype=np.int64), folder / "types"
    classes = [VALUE] if target == "regression" else class_order(meta.labels)
    labels, tags = _read_labels(folder, meta, classes, target), None
    if target == "tags":
        tags = labels.astype(np.int32)
        labels = np.add.reduceat(labels != IGNORED, np.cumsum(lengths) - lengths, dtype=np.int64)
    tokens = Tokens(
        ids=np.memmap(folder / "tokens", dtype=np.int32, mode="r"),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        labels=labels,
        tags=tags,
        groups=groups if groups.size else None,
        rows=np.fromfile(folder / "rows", dtype=np.int64),
        types=np.memmap(types, dtype=np.uint8, mode="r") if types.stat().st_size else None,
    )
    return LabelledTokens(tokens=tokens, classes=classes, rows=meta.rows, cut=meta.cut)
