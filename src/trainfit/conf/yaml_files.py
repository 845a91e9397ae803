"""Read YAML files of users: plain values, each key once, within bounds.

Objects to construct, bytes, values that contain themselves and aliases that expand to many values
are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainfit.core.errors import BadInput, reason
from trainfit.core.files import read_text

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
            raise _wrong(
                f"{node.value!r} is no {kind} ({reason(error)})", node.start_mark
            ) from None


def _name(tag: str) -> str:
    return tag.removeprefix(_PLAIN)[:100]
