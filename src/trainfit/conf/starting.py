"""Configuration files: the commented file of `trainfit init`, and reading a user's file.

All values are commented out, so that untouched keys are left to the presets and the planner.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from trainfit.conf.aliases import canonical_key
from trainfit.conf.composition import GROUPS, Composed, as_word, compose, keys, options
from trainfit.conf.yaml_files import read_yaml
from trainfit.core import codec
from trainfit.core.errors import BadConfig, BadInput, did_you_mean

_WIDTH = 98


def starting_file(task: str, name: str) -> str:
    """Text of the file that `trainfit init` writes under `name`."""
    composed = compose(task)
    lines = [
        f"# The keys of {task}, with their defaults. Take the # from a line such as #seed: 42 to",
        "# set it; what stays commented is left to the preset and the planner.",
        f"#     trainfit config {task} --config {name}",
        f"#     trainfit train {task} --config {name}",
        "",
        *_group("hardware", "auto", options(task, "hardware")),
        *_group("experiment", "null", options(task, "experiment")),
        "",
        *_section(type(composed.config), composed, "", 0),
    ]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def field_texts(kind: type) -> dict[str, str]:
    """Docstrings under the fields of a dataclass, those of its base classes included."""
    texts = {}
    for owner in reversed([base for base in kind.__mro__ if is_dataclass(base)]):
        [body] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = inspect.cleandoc(text)
    return texts


def _group(name: str, value: str, choices: tuple[str, ...]) -> Iterator[str]:
    yield from _comment(f"One of {', '.join(choices)}.", 0)
    yield f"#{name}: {value}"


def _section(kind: type, composed: Composed, prefix: str, depth: int) -> Iterator[str]:
    texts, hints, values = field_texts(kind), codec.hints(kind), composed.values()
    for field in fields(kind):
        inner = hints[field.name]
        if is_dataclass(inner) and isinstance(inner, type):
            yield ""
            yield from _comment((inner.__doc__ or "").split("\n")[0], depth)
            yield f"{field.name}:"
            yield from _section(inner, composed, f"{prefix}{field.name}.", depth + 1)
        else:
            text = f"{texts.get(field.name, '')} Takes {codec.describe(inner)}."
            yield from _comment(" ".join(text.split()), depth)
            yield f"{'  ' * depth}#{field.name}: {_plain(values[prefix + field.name])}"


def _comment(text: str, depth: int) -> Iterator[str]:
    indent = "  " * depth + "# "
    yield from textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _plain(value: Any) -> str:
    """Value in YAML."""
    dumped: str = yaml.safe_dump(value, default_flow_style=True).strip()
    return dumped.removesuffix("...").strip()


_MOST = 20
"""Largest number of unknown keys that are named one by one."""


def with_file(task: str, path: Path | None, words: Sequence[str]) -> tuple[str, ...]:
    """Words of the file at `path`, then those of the command, which win."""
    if path is None:
        return tuple(words)
    given = {_key(task, word.partition("=")[0]) for word in words}
    file = [(key, value) for key, value in _read(task, path) if _key(task, key) not in given]
    return (*(as_word(key, value) for key, value in file), *words)


def _key(task: str, written: str) -> str:
    return canonical_key(written, keys(task)) or written


def _read(task: str, path: Path) -> list[tuple[str, Any]]:
    """Keys and values of the file, or one error that lists every wrong key."""
    known = (*keys(task), *GROUPS)
    found = list(_flat(read_yaml(path), known))
    unknown = [k for k, _ in found if k not in GROUPS and canonical_key(k, keys(task)) is None]
    problems = [
        BadInput(f"{path}: unknown key {key} for {task}", did_you_mean(key, known, _listed(task)))
        for key in unknown[:_MOST]
    ]
    if (more := len(unknown) - _MOST) > 0:
        problems.append(BadInput(f"{path}: {more} more keys are unknown", _listed(task)))
    twice = [key for key, times in Counter(key for key, _ in found).items() if times > 1]
    problems += [BadInput(f"{path}: {key} is there twice", "give it once") for key in twice]
    if problems:
        raise problems[0] if len(problems) == 1 else BadConfig(problems)
    return found


def _listed(task: str) -> str:
    return f"`trainfit config {task}` shows the keys"


def _flat(
    data: Mapping[str, Any], known: Sequence[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; a section in which all is commented out is left out."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, known, f"{key}.")
        elif value is not None or not any(one.startswith(f"{key}.") for one in known):
            yield key, value
