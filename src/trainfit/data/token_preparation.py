"""Preparation of token files: learns a tokenizer, then tokenises document by document.

Both passes stream, so a corpus may be larger than memory. The folder is renamed when all of it is
written, so that it is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainfit.core import caches
from trainfit.core.codec import Length, Range
from trainfit.core.errors import BadInput, RunFailed, reason
from trainfit.core.files import cache_folder, checksum
from trainfit.core.records import Record
from trainfit.data.corpus import (
    END_OF_TEXT,
    DocumentPart,
    find_files,
    find_texts,
    read_pieces,
    standard_library,
)
from trainfit.data.token_files import (
    FILES,
    META,
    TOKENIZER,
    Dtype,
    Header,
    TokenFile,
    dtype_for,
    open_tokens,
)
from trainfit.data.tokenizers import end_of_text, learn_bpe, load_bpe
from trainfit.data.tokens import map_in_order
from trainfit.hardware.host import allowed_by_affinity

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with the name of the phase, the bytes done so far, and the total bytes."""
_LARGE = 8 << 20
"""Bytes of a corpus from which several processes are faster than one."""
_LEARNED_FROM = 1 << 30
"""Most bytes that a tokenizer is learned from; larger corpora are sampled."""
_TOGETHER = 1 << 20
"""Characters sent to a process at a time."""
_FEW = 100
"""Documents from which on a share of them is held out; of fewer, chance might hold out none."""
_Encoded = list[NDArray[np.uint32]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation(Record):
    """Tokenizer's size, split and seed of a corpus that is turned into token files."""

    vocab_size: Annotated[int, Range(257, 2**20)] = 30_000
    special: tuple[Annotated[str, Length(1, 1000)], ...] = ()
    """Words that become one token each, besides the end of a text."""
    validation_share: Annotated[float, Range(0.0001, 0.5)] = 0.05
    """Share of the documents for validation."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 42
    separator: str = END_OF_TEXT
    """Text that separates documents in a file."""
    column: Annotated[str, Length(1, 500)] = "text"
    """Column with the texts in CSV, JSONL and Parquet files."""
    least: Annotated[int, Range(0)] = 0
    """Occurrences that make a piece of text a token: the vocabulary is saved with the model."""
    ends: bool = False
    """Hold out the end of each text file, not whole documents."""


def prepare_tokens(
    inputs: Sequence[Path],
    output: Path,
    how: Preparation | None = None,
    *,
    tokenizer: Path | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Header:
    """Write the token files of these files and folders; without `inputs`, of the standard library.

    `tokenizer` is a tokenizer.json to use instead of learning one. `processes` None: by size.
    """
    try:
        taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    except OSError as error:
        raise BadInput(f"cannot write {output} ({reason(error)})", "name a new folder") from None
    if taken:
        raise BadInput(f"{output} is there already", "name a new folder, or remove it")
    files = find_files(inputs) if inputs else standard_library()
    how = how or Preparation()
    sides = _held(files, how)
    first = next(sides, None)
    # Of documents on one side of the split alone, such as a single one, ends are held out.
    how = replace(how, ends=first is not None and all(side == first for side in sides))
    return _prepare(files, output, how, tokenizer, processes, progress or _quiet)


def embedded_tokens(how: Preparation) -> Path:
    """Return the folder with the tokens of Python's own source, making it at first use."""
    return _kept("python", standard_library(), how)


def text_tokens(place: Path, how: Preparation) -> Path:
    """Return the folder with the tokens of a text file or a folder of them, made at first use.

    Of a few documents, the end of each file is held out.
    """
    files = find_texts(place)
    few = len(list(islice(_held(files, how), _FEW))) < _FEW
    return _kept("texts", files, replace(how, ends=few))


def _held(files: Sequence[Path], how: Preparation) -> Iterator[bool]:
    """Yield for each document, read anew, if it is held out for validation."""
    return (piece.place < how.validation_share for piece in _pieces(files, how) if piece.last)


def _kept(name: str, files: Sequence[Path], how: Preparation) -> Path:
    """Return the cached folder of these files' tokens, by their content; it holds no text."""
    digest = hashlib.sha256(json.dumps(asdict(how), sort_keys=True).encode())
    for path in files:
        digest.update(checksum(path).encode())
    folder = cache_folder() / "corpora" / f"{name}-{digest.hexdigest()[:32]}"
    try:
        open_tokens(folder)
    except BadInput as error:
        if folder.exists():
            caches.throw_away(folder, error.what)
        _prepare(files, folder, how, None, None, _quiet)
    return folder


def _quiet(_phase: str, _done: int, _total: int) -> None:
    pass


def _prepare(
    files: Sequence[Path],
    output: Path,
    how: Preparation,
    tokenizer: Path | None,
    processes: int | None,
    progress: Progress,
) -> Header:
    """Write everything to a temporary folder, then rename it."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=output.parent, prefix=".building-"))
    except OSError as error:
        fix = "choose another folder"
        raise BadInput(f"cannot write {output} ({error.strerror})", fix) from None
    try:
        total = sum(path.stat().st_size for path in files)
        made = _tokenizer(files, total, how, tokenizer, progress)
        made.save(str(building / TOKENIZER))
        count = processes or (allowed_by_affinity() if total >= _LARGE else 1)
        encoded = _encode(files, how, made, count)
        header = _write(building, encoded, made, how, lambda done: progress("tokens", done, total))
        (building / META).write_text(header.to_json() + "\n", encoding="utf-8")
        if output.is_dir():
            output.rmdir()
        building.rename(output)
    except OSError as error:
        fix = "free some space and prepare again"
        raise RunFailed(f"cannot write {output} ({error.strerror})", fix) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return header


def _tokenizer(
    files: Sequence[Path], total: int, how: Preparation, given: Path | None, progress: Progress
) -> Tokenizer:
    """Load the given tokenizer, or learn one from the training documents."""
    if given is not None:
        return load_bpe(given)
    most = how.validation_share + (1 - how.validation_share) * min(1, _LEARNED_FROM / max(total, 1))

    def texts() -> Iterator[str]:
        done = 0
        for piece in _pieces(files, how):
            done += len(piece.text.encode(errors="replace"))
            progress("tokenizer", done, total)
            if how.validation_share <= piece.place <= most:
                yield piece.text

    return learn_bpe(texts(), how.vocab_size, how.special, least=how.least)


def _pieces(files: Sequence[Path], how: Preparation) -> Iterator[DocumentPart]:
    ends = how.validation_share if how.ends else None
    return read_pieces(files, seed=how.seed, separator=how.separator, column=how.column, ends=ends)


# ── tokens ────────────────────────────────────────────────────────────────────────────────────


def _encode(
    files: Sequence[Path], how: Preparation, tokenizer: Tokenizer, processes: int
) -> Iterator[tuple[DocumentPart, NDArray[np.uint32]]]:
    """Yield each piece with its tokens, in order."""
    groups = ((group, [piece.text for piece in group]) for group in _grouped(_pieces(files, how)))
    for pieces, encoded in map_in_order(groups, partial(_work, tokenizer), processes):
        yield from zip(pieces, encoded, strict=True)


def _grouped(pieces: Iterator[DocumentPart]) -> Iterator[list[DocumentPart]]:
    """Group pieces, so that each group is worth sending to a process."""
    group: list[DocumentPart] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= _TOGETHER:
            yield group
            group, size = [], 0
    if group:
        yield group


def _work(tokenizer: Tokenizer, texts: list[str]) -> _Encoded:
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return [np.array(one.ids, dtype=np.uint32) for one in encoded]


class _Written:
    """A token file that is being written."""

    def __init__(self, path: Path, dtype: Dtype) -> None:
        self._file: BinaryIO = path.open("wb")
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._digest = hashlib.sha256()
        self._tokens = self._documents = 0

    def add(self, ids: NDArray[np.uint32], *, ends: int | None, last: bool) -> None:
        """Append a piece; after the last one of a document, the token that ends it."""
        if last and ends is not None:
            ids = np.append(ids, np.uint32(ends))
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._tokens += ids.size
        self._documents += last

    def close(self) -> TokenFile:
        """Flush the file to disk; returns its description for the header."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return TokenFile(
            tokens=self._tokens, documents=self._documents, checksum=self._digest.hexdigest()
        )


def _write(
    building: Path,
    encoded: Iterator[tuple[DocumentPart, NDArray[np.uint32]]],
    tokenizer: Tokenizer,
    how: Preparation,
    progress: Callable[[int], None],
) -> Header:
    size, ends = tokenizer.get_vocab_size(), end_of_text(tokenizer)
    dtype, done = dtype_for(size), 0
    parts = {name: _Written(building / file, dtype) for name, file in FILES.items()}
    try:
        for piece, ids in encoded:
            name = "validation" if piece.place < how.validation_share else "train"
            parts[name].add(ids, ends=ends, last=piece.last)
            done += len(piece.text.encode(errors="replace"))
            progress(done)
    finally:
        train, validation = (parts[name].close() for name in ("train", "validation"))
    _check_split(train, validation)
    return Header(
        dtype=dtype,
        vocab_size=size,
        train=train,
        validation=validation,
        tokenizer=checksum(building / TOKENIZER),
        end_of_text=ends,
        seed=how.seed,
        validation_share=how.validation_share,
    )


def _check_split(train: TokenFile, validation: TokenFile) -> None:
    total = (train.documents or 0) + (validation.documents or 0)
    if not total:
        raise BadInput("the corpus is empty: no file has any text", "give files with text")
    for name, part in (("training", train), ("validation", validation)):
        if not part.documents:
            raise BadInput(
                f"of {total} documents none is left for {name}",
                "give more of them, another --seed, or the text that divides one file into many "
                "(--separator)",
            )
