"""Checksums of an export: a damaged or exchanged file is found before it is loaded.

checksums.json    {"format": 1, "sha256": {"encoder/config.json": "…", …}}
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path, PurePosixPath

from trainfit.core import codec
from trainfit.core.errors import BadInput, TrainfitWarning, reason
from trainfit.core.files import checksum, write_whole

NAME = "checksums.json"
_FIX = "export the model again, or get another copy of it"


def write(folder: Path) -> None:
    """Write the checksums of every file that is in a folder now."""
    found = {name: checksum(folder / name) for name in _files(folder)}
    write_whole(folder / NAME, json.dumps({"format": 1, "sha256": found}, indent=2) + "\n")


def check(folder: Path) -> None:
    """Raise BadInput for a file that is damaged, missing, or was not exported.

    An export of an earlier version has no checksums: it is used unchecked, with a warning.
    """
    path = folder / NAME
    if not path.is_file():
        text = f"{folder} has no {NAME}, as exports of earlier versions: its files are not checked"
        warnings.warn(text, TrainfitWarning, stacklevel=2)
        return
    try:
        wanted = codec.decode(dict[str, str], codec.read_object(path)["sha256"])
    except (OSError, ValueError, KeyError, BadInput) as error:
        raise BadInput(f"cannot read {path} ({reason(error)})", _FIX) from None
    there = _files(folder)
    for name in sorted({*wanted, *there}):
        if name not in wanted:
            what = f"{folder / name} is not of this export"
            raise BadInput(what, f"move it away, or {_FIX}")
        if name not in there:
            raise BadInput(f"{folder} lacks a file that {NAME} lists", _FIX)
        if checksum(folder / name) != wanted[name]:
            raise BadInput(f"{folder / name} is damaged: it does not match {NAME}", _FIX)


def _files(folder: Path) -> list[str]:
    """List every file in a folder except notes and hidden files, which nothing loads."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(
        str(PurePosixPath(path))
        for path in found
        if path.name != NAME and path.suffix != ".md" and not path.name.startswith(".")
    )
