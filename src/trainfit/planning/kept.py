"""Answers and plans that were worked out before, by everything that they depend on."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

from trainfit.files import cache_folder

_SOURCES = ("planning", "kernels", "engine", "tasks", "catalogue", "packing")
"""The packages that decide what a step takes."""


def place(folder: str, *parts: str) -> Path:
    """Where the answer to a question is kept; it changes with the libraries and our own code."""
    digest = hashlib.sha256("\n".join([*parts, _versions()]).encode()).hexdigest()
    return cache_folder() / folder / f"{digest[:40]}.json"


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
