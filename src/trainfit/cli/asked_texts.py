"""Texts that `trainfit predict` is asked about: of a table, of lines, or as items of an own job."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from trainfit.core import files
from trainfit.core.errors import BadInput, reason

STANDARD_INPUT = Path("-")


def read_words(
    path: Path | None, texts: Sequence[str], column: str, facts: Mapping[str, Any]
) -> dict[int, list[str]]:
    """Read the words of each row of a file by its number, or split the texts."""
    from trainfit.data.conll_files import read_sentences
    from trainfit.data.labels import check_characters

    if path is None:
        return {at: check_characters(text, "--text").split() for at, text in enumerate(texts, 1)}
    return read_sentences(path, column, [str(name) for name in facts.get("classes", ())])


def read_items(path: Path, column: str) -> list[Any]:
    """Items for a job of the user's own: the values of a JSONL file, or the texts of a table."""
    if column == "auto" and path.suffix in (".jsonl", ".ndjson"):
        items = []
        # Lines end with \n alone: JSON may hold U+2028, at which splitlines() would cut it.
        for number, line in enumerate(_whole(path).split("\n"), 1):
            try:
                items += [json.loads(line)] if line.strip() else []
            except ValueError:
                raise BadInput(f"{path}: row {number} is not JSON", "write one per line") from None
        if not all(isinstance(item, dict) and "text" in item for item in items):
            return items
    return [as_item(text) for text in read_table(path, {"text": column})[0]["text"]]


def _whole(path: Path) -> str:
    try:
        return files.read_text(path, most=4 << 30, errors="replace")
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path} ({reason(error)})", "give another file") from None


def as_item(text: str) -> Any:
    """Read an item of a job of the user's own: JSON, or a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_table(
    path: Path, columns: Mapping[str, str], trained: object = None
) -> tuple[dict[str, list[str]], list[int]]:
    """Read the texts of a file by role, and the numbers of their rows.

    With `auto` the file's column is that of the `trained` names, or the one its name tells.
    """
    from trainfit.data.columnar import choose_columns, shown_name
    from trainfit.data.row_files import column_names
    from trainfit.data.text_files import read_filled

    told = "auto" in columns.values()
    names = column_names(path) if told else list(columns.values())
    known = trained if isinstance(trained, dict) else {}
    wanted = {
        role: known[role] if name == "auto" and known.get(role) in names else name
        for role, name in columns.items()
    }
    keys = {role: f"--{role}-column" for role in columns}
    chosen = choose_columns(names, wanted, str(path), keys)
    rows, skipped = read_filled(path, list(chosen.values()))
    if told:
        named = " and ".join(map(shown_name, chosen.values()))
        click.echo(f"trainfit: note: the texts are of {named}", err=True)
    tell_skipped(skipped, len(rows) + skipped)
    texts = {role: [row[at] for row in rows.values()] for at, role in enumerate(chosen)}
    return texts, list(rows)


def is_lines(path: Path) -> bool:
    """Tell a file with a text per line by its ending."""
    return path.suffix.lower() == ".txt" and not path.is_dir()


def read_lines_of(path: Path) -> tuple[str, ...]:
    """Read a text per line, of a file or, for -, of standard input."""
    from trainfit.data.row_files import read_lines

    if path != STANDARD_INPUT:
        found = tuple(line.rstrip("\r\n") for line in read_lines(path))
    else:
        try:
            whole = b"" if sys.stdin is None else sys.stdin.buffer.read()
            found = tuple(line.rstrip("\r") for line in whole.decode("utf-8-sig").split("\n"))
        except UnicodeError:
            fix = "convert it, such as with iconv -f ENCODING -t UTF-8"
            raise BadInput("standard input is not UTF-8 text", fix) from None
        found = found if found[-1] else found[:-1]
    filled = [line for line in found if line.strip()]
    if filled and all(isinstance(as_item(line), dict) for line in filled):
        name = "standard input" if path == STANDARD_INPUT else path
        raise BadInput(f"{name} has objects, not a text per line", "give them as a .jsonl file")
    return found


def tell_skipped(skipped: int, every: int) -> None:
    """Count the rows without a text in a note."""
    if skipped:
        click.echo(f"trainfit: note: skipped {skipped:,} of {every:,} rows without text", err=True)
