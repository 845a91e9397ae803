"""Documents of a corpus, read one at a time, so that it may be larger than memory.

A document is a text file, a part of one between two separators, or a row of a CSV, JSONL or Parquet
file. A hash of its text puts it wholly on one side of the split, so that copies of a document are
on the same side.
"""

from __future__ import annotations

import codecs
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainfit.core.errors import BadInput, reason
from trainfit.core.files import check_regular, open_regular
from trainfit.data.row_files import Western
from trainfit.data.text_files import read_texts

END_OF_TEXT = "<|endoftext|>"
_TABLES = (".csv", ".jsonl", ".parquet")
_TEXTS = (".txt", ".text", ".md")
"""Files of a folder that is named as data itself; other files there may be anything."""
_BLOCK = 1 << 20
_LONGEST = 4 << 20
"""Characters of the longest piece; a longer document comes in several pieces."""
_OTHERS = {"site-packages", "dist-packages", "__pycache__"}
_DULL = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
"""Folders to leave out: tests, which some installations lack, and long tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentPart:
    """A document, or a part of one that is very long."""

    text: str = field(repr=False)
    place: float
    """Hash of the document's text and the seed, between 0 and 1, for splitting and sampling."""
    last: bool
    """True for the last piece of its document."""


def standard_library() -> list[Path]:
    """List the source files of Python's standard library: text that is on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path
        for path in root.rglob("*.py")
        if not (_OTHERS | _DULL) & set(path.relative_to(root).parts) and path.is_file()
    )


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """List the files named, and all text files in the folders named, without hidden ones."""
    found: dict[Path, None] = {}
    for given in inputs:
        found |= dict.fromkeys(_listed(given, "check --input"))
    if not found:
        named = ", ".join(map(str, inputs))
        raise BadInput(f"there is no text file in {named}", "give files or folders with text")
    return list(found)


def find_texts(given: Path) -> list[Path]:
    """List the text file that is named as data, or the text files of a folder; one has a text."""
    fix = "give a text file, a folder of .txt files, or one that `trainfit prepare gpt` wrote"
    files = _listed(given, fix, _TEXTS)
    if not files:
        raise BadInput(f"there are no token files and no texts in {given}", fix)
    if not any(map(_has_text, files)):
        what = f"the files of {given} are empty" if given.is_dir() else f"{given} is empty"
        raise BadInput(what, "give a text to learn from")
    return files


def _listed(given: Path, fix: str, suffixes: Sequence[str] = ("",)) -> list[Path]:
    """List a file, or the text files of a folder with one of these endings."""
    try:
        given.stat()
        return list(_inside(given, suffixes)) if given.is_dir() else [_named(given, fix)]
    except FileNotFoundError:
        raise BadInput(f"no file or folder {given}", fix) from None
    except OSError as error:
        named = f"{str(error.filename or given)!r:.200}"
        raise BadInput(f"cannot read {named} ({reason(error)})", fix) from None


def _has_text(path: Path) -> bool:
    if path.suffix.lower() in _TABLES:
        return any(True for _ in read_texts(path, "text"))
    return any(block.strip() for block in _blocks(path))


def _named(path: Path, fix: str) -> Path:
    """Check that a file that was named itself exists and is text."""
    if not _is_text(check_regular(path, fix)):
        raise BadInput(f"{path} is binary, or not UTF-8: it has NUL bytes", "save it as UTF-8 text")
    return path


def _inside(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        named = path.name.lower().endswith(tuple(suffixes))
        if named and path.is_file() and not hidden and _is_text(path):
            yield path


def _is_text(path: Path) -> bool:
    if path.suffix.lower() in _TABLES:
        return True
    with open_regular(path) as file:
        return b"\0" not in file.read(8192)


def read_pieces(
    files: Sequence[Path],
    *,
    seed: int,
    separator: str = END_OF_TEXT,
    column: str = "text",
    ends: float | None = None,
) -> Iterator[DocumentPart]:
    """Read the documents of the files in order; empty ones are left out.

    `ends` is the share of each text file that is held out at its end, where there are too few
    documents to hold out some of them.
    """
    for path in files:
        if path.suffix.lower() in _TABLES:
            for text in read_texts(path, column):
                yield DocumentPart(text=text, place=_place(text, seed), last=True)
        elif ends is None:
            yield from _pieces(path, seed, separator)
        else:
            yield from _with_end_apart(path, separator, ends)


def _with_end_apart(path: Path, separator: str, share: float) -> Iterator[DocumentPart]:
    """Split a text file as `_pieces` does, with the place 0 after its border, cut at a line end."""
    whole = sum(len(block.encode(errors="replace")) for block in _blocks(path))
    border, done = whole * (1 - share), 0
    for text, last in _cut(path, separator):
        size = len(text.encode(errors="replace"))
        if done < border < done + size:
            about = int(len(text) * (border - done) / size)
            cut = text.rfind("\n", 0, about) + 1 or about
            yield DocumentPart(text=text[:cut], place=share, last=True)
            yield DocumentPart(text=text[cut:], place=0.0, last=last)
        elif text.strip():
            yield DocumentPart(text=text, place=share if done < border else 0.0, last=last)
        done += size


def _pieces(path: Path, seed: int, separator: str) -> Iterator[DocumentPart]:
    """Split a text file at the separators, and at line ends where a piece would get too long."""
    place: float | None = None  # of the current document
    for text, last in _cut(path, separator):
        if place is None and last and not text.strip():
            continue
        if place is None:
            place = _place(text, seed)
        yield DocumentPart(text=text, place=place, last=last)
        if last:
            place = None


def _cut(path: Path, separator: str) -> Iterator[tuple[str, bool]]:
    """Yield the texts between separators; True with those that end a document."""
    held = ""
    for block in _blocks(path):
        held += block
        *whole, held = held.split(separator)
        for text in whole:
            yield text, True
        if len(held) > _LONGEST:
            # Never inside a possible separator.
            end = held.rfind("\n", 0, len(held) - len(separator)) + 1 or _LONGEST
            yield held[:end], False
            held = held[end:]
    yield held, True


def _blocks(path: Path) -> Iterator[str]:
    """Read a file as UTF-8; single invalid bytes are read as Windows-1252, with a warning."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
    western = Western(path)
    try:
        with open_regular(path) as file:
            while block := file.read(_BLOCK):
                yield western.read(decoder.decode(block))
    except OSError as error:
        raise BadInput(f"cannot read {path} ({reason(error)})", "make it readable") from None
    yield western.read(decoder.decode(b"", final=True))
    western.tell()


def _place(text: str, seed: int) -> float:
    key = seed.to_bytes(8, "big")
    digest = hashlib.blake2b(text.encode(errors="replace"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
