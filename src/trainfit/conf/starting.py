"""A configuration to start from: every key of a task, with what the schema says of it.

All values are commented out, so that what a person does not touch stays with presets and planner.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from trainfit import codec
from trainfit.conf.composition import Composed, compose, options

_WIDTH = 98


def starting_file(task: str, name: str) -> str:
    """The text of the file that `trainfit init` writes under `name`."""
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
    """The docstring under each field of a dataclass."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            texts[field.target.id] = inspect.cleandoc(str(below.value.value))
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
            yield from _comment(_told(texts.get(field.name, ""), inner), depth)
            yield f"{'  ' * depth}#{field.name}: {_plain(values[prefix + field.name])}"


def _told(text: str, kind: Any) -> str:
    return " ".join([*text.split(), f"Takes {codec.describe(kind)}."])


def _comment(text: str, depth: int) -> Iterator[str]:
    indent = "  " * depth + "# "
    yield from textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _plain(value: Any) -> str:
    """A value as YAML writes it."""
    dumped: str = yaml.safe_dump(value, default_flow_style=True).strip()
    return dumped.removesuffix("...").strip()
