"""A case of the fuzzer: a command line, the files around it, and what must come of it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fuzz_damage import damage

Expected = Literal["any", "refused", "ok"]


@dataclass(frozen=True)
class Special:
    """Something in the place of a file that is no file."""

    what: Literal["fifo", "folder", "link"]
    target: str = ""

    def make(self, path: Path) -> None:
        if self.what == "fifo":
            os.mkfifo(path)
        elif self.what == "folder":
            path.mkdir()
        else:
            path.symlink_to(self.target)


FIFO, FOLDER = Special("fifo"), Special("folder")
LOOP, ZERO = Special("link", "loop"), Special("link", "/dev/zero")


@dataclass(frozen=True)
class Edit:
    """Damage to one of the files that a template brought."""

    how: str
    seed: int
    among: str = "*"
    """A pattern of file names."""


@dataclass(frozen=True)
class Case:
    """One command line in a folder of its own."""

    argv: list[str]
    """{here} stands for the folder: the planner's processes stay where they were started."""
    files: dict[str, bytes | str | Special] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    expect: Expected = "any"
    """any: done, a finding, or refused; but never an internal error."""
    template: str | None = None
    """What is copied into the folder first: see fuzz_templates."""
    edits: tuple[Edit, ...] = ()
    real_plan: bool = False
    """Ask the planner itself, which takes seconds, and not the quick stand-in."""


Make = Callable[[random.Random], Case]


@dataclass(frozen=True)
class Kind:
    make: Make
    weight: int


KINDS: dict[str, Kind] = {}


def kind(weight: int) -> Callable[[Make], Make]:
    """Register a generator under its name; `weight` is its share of the cases."""

    def register(make: Make) -> Make:
        KINDS[make.__name__] = Kind(make, weight)
        return make

    return register


def make_case(seed: int, name: str, number: int) -> Case:
    return KINDS[name].make(random.Random(f"{seed}/{name}/{number}"))


def deal(count: int, kinds: list[str]) -> list[tuple[str, int]]:
    """The names and numbers of `count` cases, by the weights of the kinds."""
    total = sum(KINDS[name].weight for name in kinds)
    shares = {name: max(1, round(count * KINDS[name].weight / total)) for name in kinds}
    return [(name, number) for name in kinds for number in range(shares[name])]


def lay_out(case: Case, folder: Path, templates: Path) -> None:
    """Make the files of a case."""
    if case.template is not None:
        shutil.copytree(templates / case.template, folder, symlinks=True)
    for edit in case.edits:
        found = sorted(p for p in folder.rglob(edit.among) if p.is_file() and not p.is_symlink())
        if found:
            chosen = random.Random(edit.seed)
            damage(chosen.choice(found), edit.how, chosen)
    folder.mkdir(parents=True, exist_ok=True)  # an edit may remove a file with its folder
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Special):
            if path.is_file():
                path.unlink()
            content.make(path)
        else:
            path.write_bytes(_bytes(content))


def _bytes(content: bytes | str) -> bytes:
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
