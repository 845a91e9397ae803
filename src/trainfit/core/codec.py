"""Typed JSON: dataclasses to plain data and back, strictly, with every problem reported at once.

Strict means that nothing is coerced: "3" is no integer, 1 is no boolean, an unknown key is an
error with the nearest valid one. The records of a run and the configuration both go through here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import types
import unicodedata
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trainfit.core.errors import BadConfig, BadInput, did_you_mean
from trainfit.core.files import read_text

T = TypeVar("T")

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FLOAT = "$float"  # strict JSON has no NaN: {"$float": "nan"} stands for it
_DEEPEST = 100
"""Maximum nesting of lists and objects; trainfit's own files have about ten levels."""
_SHOWN = 200
"""Characters of a wrong value that an error shows."""
_LONG_NUMBER = re.compile(r"\d{19}")


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds for a number, given as `Annotated[int, Range(1)]`."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        """Word the bounds for an error message."""
        if self.high == math.inf:
            return f"{_number(self.low)} or more"
        if self.low == -math.inf:
            return f"{_number(self.high)} or less"
        return f"{_number(self.low)} to {_number(self.high)}"

    def allows(self, value: float) -> bool:
        """Tell a finite number within the bounds."""
        return self.low <= value <= self.high and abs(value) != math.inf


@dataclasses.dataclass(frozen=True)
class Length:
    """Bounds for the characters of a text, given as `Annotated[str, Length(1, 500)]`."""

    least: int
    most: int

    def __str__(self) -> str:
        """Word the bounds for an error message."""
        return f"{self.least} to {self.most:,} characters"

    def allows(self, value: str) -> bool:
        """Tell a text within the bounds, without control characters."""
        return self.least <= len(value) <= self.most and is_plain(value)


@dataclasses.dataclass(frozen=True)
class PathName:
    """A path, or a name that may be one, that an operating system takes."""

    def __str__(self) -> str:
        """Word the bounds for an error message."""
        return "a path of at most 4,096 bytes, 255 between two slashes"

    def allows(self, value: str) -> bool:
        """Tell a path that a system call would take, whether or not it exists."""
        if not value.strip() or not is_plain(value):
            return False
        parts = value.encode().split(b"/")
        return sum(map(len, parts)) + len(parts) <= 4096 and max(map(len, parts)) <= 255


def is_plain(text: str) -> bool:
    """Tell a text without control characters, and without any that UTF-8 lacks."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


_BOUNDS = (Range, Length, PathName)


def _number(value: float) -> str:
    """Format a bound: 1,000,000, 0.5 or 1e-05."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:g}"


def encode(value: Any) -> Any:
    """Turn a dataclass (or a container of them) into plain JSON data, without loss."""
    if type(value) in (int, str, bool):  # as the millions of lengths of a workload are
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    return value


def decode(kind: type[T], data: Any, source: str = "", key: str = "") -> T:
    """Build a `kind` from plain data, or raise one error that lists everything wrong with it.

    An error names the `source`, and the `key` where `data` is the value of one.
    """
    problems: list[BadInput] = []
    value = _read(kind, data, key, problems)
    if problems:
        named = [BadInput(f"{source}: {p.what}" if source else p.what, p.fix) for p in problems]
        raise named[0] if len(named) == 1 else BadConfig(named)
    return value  # type: ignore[no-any-return]


def dumps(value: Any, indent: int | None = 2) -> str:
    """Turn a dataclass into strict JSON text, which any program can read."""
    return json.dumps(encode(value), indent=indent, allow_nan=False)


def loads(kind: type[T], text: str, source: str = "") -> T:
    """Build a `kind` from JSON text."""
    try:
        data = parse(text)
    except ValueError as error:
        where = source or f"this {kind.__name__}"
        fix = "use the file as trainfit wrote it"
        raise BadInput(f"{where} is not JSON ({error})", fix) from None
    if isinstance(data, dict) and dataclasses.is_dataclass(kind) and "version" not in hints(kind):
        data.pop("version", None)  # a command's answer carries the version that wrote it
    return decode(kind, data, source)


def own_version() -> str:
    """Version of trainfit, also where it runs from a checkout that is not installed."""
    return str(vars(sys.modules["trainfit"])["__version__"])


def for_programs(data: Any, indent: int | None = 2) -> str:
    """Write the answer of a command as JSON, with the version that wrote it."""
    stamped = {"version": own_version(), **data} if isinstance(data, dict) else data
    return json.dumps(stamped, indent=indent)


def parse(
    text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None, *, missing: bool = False
) -> Any:
    """Parse strict JSON text; ValueError for anything else, and for extreme values.

    NaN, Infinity, whole numbers over 64 bits and deep nesting are refused. `pairs` builds the
    objects, as in json.loads. `missing`: NaN and Infinity are values that are missing, None.
    """
    integers = _integer if _LONG_NUMBER.search(text) else None
    try:
        data = json.loads(
            text,
            parse_constant=(lambda _name: None) if missing else _constant,
            parse_int=integers,
            object_pairs_hook=pairs,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > _DEEPEST:
        _check_depth(data)
    return data


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; OSError or ValueError where there is none."""
    data = parse(read_text(path))
    if not isinstance(data, dict):
        raise ValueError("it is not an object")
    return data


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**64:
        raise ValueError("a whole number has more than 64 bits")
    return number


def _check_depth(data: Any) -> None:
    level = [data]
    for _ in range(_DEEPEST):
        level = [
            item
            for value in level
            if isinstance(value, (dict, list))
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise ValueError("it is nested too deeply")


@cache
def hints(kind: type) -> dict[str, Any]:
    """Resolve the type of each field of a dataclass."""
    return get_type_hints(kind, include_extras=True)


def describe(kind: Any) -> str:
    """Describe the values of a type for an error: "a whole number (1 or more) or auto"."""
    origin = get_origin(kind)
    if origin is Annotated:
        base, *extras = get_args(kind)
        return " ".join([describe(base), *(f"({e})" for e in extras if isinstance(e, _BOUNDS))])
    if origin in (Union, types.UnionType):
        return " or ".join(describe(k) for k in get_args(kind))
    if origin is Literal:
        return ", ".join(_plain(v) for v in get_args(kind))
    if origin is tuple:
        return f"a list of {describe(get_args(kind)[0])}"
    if origin is dict:
        return "a mapping"
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        type(None): "null",
    }
    return names.get(kind) or f"the fields of {getattr(kind, '__name__', kind)}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read(kind: Any, data: Any, path: str, problems: list[BadInput]) -> Any:
    """Read one value; on failure append to `problems` and return something harmless."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _read_annotated(kind, data, path, problems)
    if origin in (Union, types.UnionType):
        return _read_union(kind, data, path, problems)
    if origin is tuple:
        return _read_tuple(kind, data, path, problems)
    if origin is dict:
        return _read_dict(kind, data, path, problems)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, data, path, problems)
    value = _read_scalar(kind, data)
    if value is _WRONG:
        problems.append(_mismatch(kind, data, path))
    return value


_WRONG: Any = object()


def _read_scalar(kind: Any, data: Any) -> Any:
    if kind is Any:
        return _revive(data)
    if get_origin(kind) is Literal:
        same = [v for v in get_args(kind) if v == data and type(v) is type(data)]
        return same[0] if same else _WRONG
    if kind is float:
        return _float(_revive(data))
    if kind is type(None):
        return None if data is None else _WRONG
    return data if type(data) is kind else _WRONG


def _float(number: Any) -> Any:
    try:
        return float(number) if type(number) in (int, float) else _WRONG
    except OverflowError:
        return _WRONG


def _revive(data: Any) -> Any:
    """Undo `encode` for a value of unknown type."""
    if isinstance(data, Mapping):
        if list(data) == [_FLOAT] and str(data[_FLOAT]) in _NON_FINITE:
            return _NON_FINITE[str(data[_FLOAT])]
        return {key: _revive(item) for key, item in data.items()}
    return [_revive(item) for item in data] if isinstance(data, (list, tuple)) else data


def _mismatch(kind: Any, data: Any, path: str) -> BadInput:
    shown = str(data) if isinstance(data, float) else json.dumps(encode(data), default=str)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    what = f"{path or 'value'} is {shown}"
    hint = ""
    if isinstance(data, str):
        words = [v for k in (kind, *get_args(kind)) for v in get_args(k) if isinstance(v, str)]
        hint = did_you_mean(data, words)
    return BadInput(what, f"use {describe(kind)}" + (f" ({hint})" if hint else ""))


def _read_annotated(kind: Any, data: Any, path: str, problems: list[BadInput]) -> Any:
    base, *extras = get_args(kind)
    tried: list[BadInput] = []
    value = _read(base, data, path, tried)
    bounds = [extra for extra in extras if isinstance(extra, _BOUNDS)]
    if tried or not all(bound.allows(value) for bound in bounds):
        problems.append(_mismatch(kind, data, path))
    return value


def _read_union(kind: Any, data: Any, path: str, problems: list[BadInput]) -> Any:
    # Names come first, since each failed attempt builds an error; float comes last, since it would
    # also take a whole number.
    members = sorted(get_args(kind), key=lambda member: (not _names(member, data), member is float))
    attempts: list[list[BadInput]] = []
    for member in members:
        tried: list[BadInput] = []
        value = _read(member, data, path, tried)
        if not tried:
            return value
        attempts.append(tried)
    nested = [t for t, m in zip(attempts, members, strict=True) if dataclasses.is_dataclass(m)]
    if nested and isinstance(data, Mapping):
        problems.extend(nested[0])
    else:
        problems.append(_mismatch(kind, data, path))
    return None


def _names(kind: Any, data: Any) -> bool:
    """Tell if `data` is one of the words of `kind`, or both are None."""
    if kind is type(None):
        return data is None
    return get_origin(kind) is Literal and isinstance(data, str) and data in get_args(kind)


def _read_tuple(kind: Any, data: Any, path: str, problems: list[BadInput]) -> Any:
    args = get_args(kind)
    if not isinstance(data, (list, tuple)):
        problems.append(_mismatch(kind, data, path))
        return ()
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(data)
    if len(args) != len(data):
        problems.append(BadInput(f"{path} has {len(data)} items", f"give {len(args)}"))
        return ()
    return tuple(
        _read(arg, item, f"{path}[{index}]", problems)
        for index, (arg, item) in enumerate(zip(args, data, strict=True))
    )


def _read_dict(kind: Any, data: Any, path: str, problems: list[BadInput]) -> Any:
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        problems.append(_mismatch(kind, data, path))
        return {}
    item_kind = get_args(kind)[1]
    return {k: _read(item_kind, v, f"{path}.{k}".lstrip("."), problems) for k, v in data.items()}


def _read_dataclass(kind: Any, data: Any, path: str, problems: list[BadInput]) -> Any:
    if not isinstance(data, Mapping):
        problems.append(_mismatch(kind, data, path))
        return None
    fields = {f.name: f for f in dataclasses.fields(kind)}
    before = len(problems)
    for key in data:
        if key not in fields:
            where = f"{path}.{key}".lstrip(".")
            fix = did_you_mean(str(key), fields, f"valid keys are {', '.join(fields)}")
            problems.append(BadInput(f"unknown key {where}", fix))
    values = {}
    for name, field in fields.items():
        where = f"{path}.{name}".lstrip(".")
        if name in data:
            values[name] = _read(hints(kind)[name], data[name], where, problems)
        elif field.default is field.default_factory is dataclasses.MISSING:
            problems.append(BadInput(f"{where} is missing", f"give {describe(hints(kind)[name])}"))
    if len(problems) > before:
        return None
    try:
        return kind(**values)
    except BadInput as error:  # a dataclass may check its fields against each other
        problems.append(error)
        return None
