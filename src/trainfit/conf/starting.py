"""Configuration files: the commented file of `trainfit init`, and reading a user's file.

All values are commented out, so that untouched keys are left to the presets and the planner. Of a
user's YAML, objects to construct, bytes, values that contain themselves and aliases that expand to
many values are refused.
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
from trainfit.core import codec
from trainfit.core.errors import BadConfig, BadInput, did_you_mean, reason
from trainfit.core.files import read_text

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


_LARGEST = 1 << 20
_DEEPEST = 20
_MOST_VALUES = 2000
"""Largest number of values in a file, with aliases expanded."""
_LONGEST_NUMBER = 100
_PLAIN = "tag:yaml.org,2002:"
_FIX = "give a YAML file of keys and values"


def read_yaml(path: Path) -> dict[str, Any]:
    """Mapping in a YAML file, or BadInput that names the line."""
    try:
        text = read_text(path, _LARGEST)
        root = _compose(text)
        data = _YamlReader().value(root) if root is not None else {}
    except yaml.YAMLError as error:
        raise _refusal(path, error) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path} ({reason(error)})", _FIX) from None
    if not isinstance(data, dict):
        raise BadInput(f"{path} is no mapping", _FIX)
    return data


def _refusal(path: Path, error: yaml.YAMLError) -> BadInput:
    mark = getattr(error, "problem_mark", None)
    line = "" if mark is None else f", line {mark.line + 1}"
    said = getattr(error, "problem", None) or reason(error)
    return BadInput(f"cannot read {path}{line} ({said})", _FIX)


def _compose(text: str) -> yaml.Node | None:
    """Compose the nodes of a text; the depth is checked first, since composing recurses."""
    from omegaconf._utils import get_yaml_loader  # to YAML 1.1 itself, 2e-5 is a text

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise _wrong("nested too deeply", event.start_mark)
    node: yaml.Node | None = yaml.compose(text, Loader=get_yaml_loader())
    return node


def _wrong(problem: str, mark: yaml.Mark | None) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


class _YamlReader:
    """Turns nodes into plain values."""

    def __init__(self) -> None:
        self._values = 0
        self._numbers = yaml.SafeLoader("")

    def value(self, node: yaml.Node, depth: int = 0) -> Any:
        """Value of a node; aliases are expanded, so that loops reach the depth limit."""
        self._values += 1
        if depth > _DEEPEST:
            raise _wrong("a value contains itself", node.start_mark)
        if self._values > _MOST_VALUES:
            raise _wrong(f"over {_MOST_VALUES:,} values, aliases included", node.start_mark)
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_PLAIN}map":
            return dict(self._items(node, depth))
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_PLAIN}seq":
            return [self.value(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        raise _wrong(f"cannot take a value of type {_name(node.tag)}", node.start_mark)

    def _items(self, node: yaml.MappingNode, depth: int) -> Iterator[tuple[str, Any]]:
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != f"{_PLAIN}str":
                raise _wrong("a key must be a text", key.start_mark)
            if key.value in seen:
                raise _wrong(f"the key {key.value[:100]} is there twice", key.start_mark)
            seen.add(key.value)
            yield key.value, self.value(value, depth + 1)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        kind = node.tag.removeprefix(_PLAIN)
        if kind == "str":
            return node.value
        if kind not in ("null", "bool", "int", "float"):
            raise _wrong(f"cannot take a value of type {_name(node.tag)}", node.start_mark)
        if len(node.value) > _LONGEST_NUMBER:
            raise _wrong("a number is too long", node.start_mark)
        try:
            return self._numbers.construct_object(node)
        except (ValueError, KeyError, IndexError) as error:  # such as !!int x
            what = f"{node.value!r} is no {kind} ({reason(error)})"
            raise _wrong(what, node.start_mark) from None


def _name(tag: str) -> str:
    return tag.removeprefix(_PLAIN)[:100]
