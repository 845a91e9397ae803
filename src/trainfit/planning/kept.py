"""Answers and plans that were worked out before, by everything that they depend on."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from trainfit import codec
from trainfit.errors import TrainfitError
from trainfit.files import cache_folder, write_whole

T = TypeVar("T")
_SOURCES = ("planning", "kernels", "engine", "tasks", "catalogue", "packing")
"""The packages that decide what a step takes."""


def place(folder: str, *parts: str) -> Path:
    """Where the answer to a question is kept; it changes with the libraries and our own code."""
    digest = hashlib.sha256("\n".join([*parts, _versions()]).encode()).hexdigest()
    return cache_folder() / folder / f"{digest[:40]}.json"


def read(kind: type[T], path: Path) -> T | None:
    """What was kept, or None: never asked, or written by another version."""
    try:
        return codec.loads(kind, path.read_text(), str(path))
    except (OSError, TrainfitError):
        return None


def write(path: Path, record: object) -> None:
    """Keep it; a cache that cannot be written costs seconds, not the plan."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, codec.dumps(record, indent=None))
    except OSError:
        return


@cache
def _versions() -> str:
    digest = hashlib.sha256()
    home = Path(__file__).parent.parent
    for package in _SOURCES:
        for path in sorted((home / package).rglob("*")):
            if path.suffix in (".py", ".json", ".csv"):
                digest.update(path.read_bytes())
    libraries = [f"{name} {version(name)}" for name in ("torch", "transformers", "peft")]
    return " ".join([*libraries, digest.hexdigest()])
