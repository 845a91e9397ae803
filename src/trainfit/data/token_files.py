"""Token files of the GPT job, mapped from disk.

    DIR/train.bin, val.bin    token ids and nothing else, uint16 or uint32, little-endian
    DIR/meta.json             the header: dtype, counts, checksums, the tokenizer's hash
    DIR/tokenizer.json        the tokenizer, for decoding

Folders in nanoGPT's form can be read too: uint16 files, and a meta.json with at least vocab_size.
Every file is read once and checked before training.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainfit.core import codec
from trainfit.core.codec import Range
from trainfit.core.errors import BadInput, reason
from trainfit.core.files import checksum
from trainfit.core.records import Record

FORMAT = "trainfit tokens 1"
META, TOKENIZER = "meta.json", "tokenizer.json"
FILES = {"train": "train.bin", "validation": "val.bin"}
Dtype = Literal["uint16", "uint32"]
Ids = NDArray[np.unsignedinteger[Any]]
_CHUNK = 1 << 22
"""Tokens that are read at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile(Record):
    """Description of a file in the header."""

    tokens: Annotated[int, Range(0)]
    documents: Annotated[int, Range(0)] | None = None
    checksum: str | None = None
    """SHA-256 of the file; None where it was not made by trainfit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header(Record):
    """Content of meta.json."""

    format: str = FORMAT
    dtype: Dtype
    vocab_size: Annotated[int, Range(1, 1 << 24)]
    """Size of the vocabulary; bounded, because counts of all tokens are kept in memory."""
    train: TokenFile
    validation: TokenFile
    tokenizer: str | None = None
    """SHA-256 of tokenizer.json; None where there is none."""
    end_of_text: int | None = None
    """Token that ends each document."""
    seed: int | None = None
    validation_share: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Checksum and token counts of a file."""

    checksum: str
    counts: NDArray[np.int64]
    """Number of occurrences of each token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFolder:
    """Training and validation tokens of a folder."""

    folder: Path
    header: Header
    train: Ids
    validation: Ids
    unigram_entropy: float | None
    """Nats per validation token under the token frequencies of the training file; None
    without a survey."""
    checksum: str
    """Checksum of both files and the vocabulary; empty without a survey."""

    @property
    def tokenizer(self) -> Path | None:
        """Path of the tokenizer, if there is one."""
        path = self.folder / TOKENIZER
        return path if path.is_file() else None


def dtype_for(vocab_size: int) -> Dtype:
    """Choose the smallest dtype for the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def open_tokens(folder: Path, *, survey: bool = True) -> TokenFolder:
    """Map the files of a folder; `survey` reads them and checks every token."""
    header = read_header(folder)
    parts = {name: _map(folder / file, header) for name, file in FILES.items()}
    entropy, digest = None, ""
    if survey:
        _check_tokenizer(folder, header)
        seen = {name: _checked(folder / file, header, name) for name, file in FILES.items()}
        entropy = unigram_entropy(seen["train"].counts, seen["validation"].counts)
        sums = [header.vocab_size, *(one.checksum for one in seen.values())]
        digest = hashlib.sha256(json.dumps(sums).encode()).hexdigest()
    return TokenFolder(
        folder=folder, header=header, unigram_entropy=entropy, checksum=digest, **parts
    )


def is_prepared(folder: Path) -> bool:
    """Look for token files in a folder; anything else is a text or a folder of texts."""
    return any((folder / name).is_file() for name in (META, "meta.pkl", *FILES.values()))


def read_header(folder: Path) -> Header:
    """Read meta.json of a folder, in trainfit's form or nanoGPT's."""
    path = folder / META
    if not path.is_file():
        raise BadInput(*_no_header(folder))
    try:
        data = codec.read_object(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path} ({reason(error)})", "prepare the data again") from None
    if "vocab_size" not in data:
        raise BadInput(f"{path} has no vocab_size", f'write {{"vocab_size": N}} to {META}')
    for file in FILES.values():
        if not (folder / file).is_file():
            fix = f"give a folder with {' and '.join(FILES.values())}"
            raise BadInput(f"no {file} in {folder}", fix)
    return _foreign(folder, data) if "format" not in data else _own(path, data)


def _no_header(folder: Path) -> tuple[str, str]:
    if not folder.is_dir():
        return f"no folder {folder}", "give one that `trainfit prepare gpt` wrote (data.data_dir)"
    if (folder / "meta.pkl").is_file():
        return (
            f"{folder / 'meta.pkl'} is a pickle, which may run any code and is not opened",
            f'write its vocabulary size to {META} beside it: {{"vocab_size": N}}',
        )
    if (folder / FILES["train"]).is_file():
        return f"no {META} in {folder}", 'write the vocabulary size to it: {"vocab_size": N}'
    return (
        f"there are no token files in {folder}",
        f"make them: trainfit prepare gpt --input {folder} --output TOKENS",
    )


def _own(path: Path, data: dict[str, Any]) -> Header:
    if data["format"] != FORMAT:
        raise BadInput(f"{path} has the format {data['format']!r:.80}", f"this reads {FORMAT!r}")
    return codec.decode(Header, data, str(path))


def _foreign(folder: Path, data: dict[str, Any]) -> Header:
    """Make a header for files that trainfit did not write."""
    dtype = data.get("dtype", "uint16")
    sizes = {name: (folder / file).stat().st_size for name, file in FILES.items()}
    width = {"uint16": 2, "uint32": 4}.get(str(dtype), 1)
    known = {
        "dtype": dtype,
        "vocab_size": data["vocab_size"],
        **{name: {"tokens": size // width} for name, size in sizes.items()},
    }
    if (folder / TOKENIZER).is_file():
        known["tokenizer"] = checksum(folder / TOKENIZER)
    return codec.decode(Header, known, str(folder / META))


def _map(path: Path, header: Header) -> Ids:
    part = header.train if path.name == FILES["train"] else header.validation
    size, width = path.stat().st_size, np.dtype(header.dtype).itemsize
    if size != part.tokens * width:
        what = f"{path} is cut off: {size:,} bytes are no whole number of {header.dtype}"
        if size % width == 0 or part.checksum:
            expected = f"{size:,} bytes instead of {part.tokens * width:,}"
            what = f"{path} is cut off or too long: {expected}"
        raise BadInput(what, "copy it again, or prepare the data again")
    if part.tokens < 2:
        raise BadInput(f"{path} has {part.tokens} tokens", "prepare a larger corpus")
    mapped: Ids = np.memmap(path, dtype=np.dtype(header.dtype).newbyteorder("<"), mode="r")
    return mapped


def _check_tokenizer(folder: Path, header: Header) -> None:
    path = folder / TOKENIZER
    if header.tokenizer is None:
        return
    if not path.is_file():
        raise BadInput(f"no {TOKENIZER} in {folder}", "put the one there that made the tokens")
    if checksum(path) != header.tokenizer:
        fix = "put the right one back, or prepare the data again"
        raise BadInput(f"{path} is not the tokenizer that made the tokens beside it", fix)


def _checked(path: Path, header: Header, name: str) -> Survey:
    seen = read_through(path, header)
    expected = (header.train if name == "train" else header.validation).checksum
    if expected is not None and seen.checksum != expected:
        fix = "copy it again, or prepare the data again"
        raise BadInput(f"{path} does not match its checksum: it was changed or damaged", fix)
    return seen


def read_through(path: Path, header: Header) -> Survey:
    """Read a file once for its checksum and token counts."""
    digest, at = hashlib.sha256(), 0
    counts = np.zeros(header.vocab_size, dtype=np.int64)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    with path.open("rb") as file:
        while block := file.read(_CHUNK * dtype.itemsize):
            digest.update(block)
            ids = np.frombuffer(block, dtype=dtype)
            largest = int(ids.max())
            if largest >= header.vocab_size:
                where = at + int((ids >= header.vocab_size).argmax())
                raise BadInput(
                    f"{path} has the token {ids[where - at]} at {where:,}, "
                    f"over the vocabulary of {header.vocab_size:,}",
                    f"give the vocabulary that the tokens were made with in {META}",
                )
            counts += np.bincount(ids, minlength=header.vocab_size)
            at += ids.size
    return Survey(checksum=digest.hexdigest(), counts=counts)


def unigram_entropy(train: NDArray[np.int64], validation: NDArray[np.int64]) -> float:
    """Nats per validation token under the training frequencies, each count plus one.

    A model that has learned only token frequencies reaches this loss.
    """
    total = float(train.sum() + train.size)
    nats = math.log(total) - np.log(train + 1.0)
    return float((validation * nats).sum() / validation.sum())
