"""A configuration file of the user's, as the words that would say the same on the command line.

So a file can say what words can and nothing else, every mistake in it is reported as a word's
would be, and a word given beside it wins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainfit.conf.aliases import canonical_key
from trainfit.conf.composition import GROUPS, keys
from trainfit.errors import BadConfig, BadInput, did_you_mean


def with_file(task: str, path: Path | None, words: Sequence[str]) -> tuple[str, ...]:
    """The words of the file at `path`, then those given beside it."""
    if path is None:
        return tuple(words)
    given = {_key(task, word.partition("=")[0]) for word in words}
    file = [(key, value) for key, value in _read(task, path) if _key(task, key) not in given]
    return (*(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in file), *words)


def _key(task: str, written: str) -> str:
    return canonical_key(written, keys(task)) or written


def _read(task: str, path: Path) -> list[tuple[str, Any]]:
    """The keys and values of the file, or one error that lists every key that is wrong."""
    known = (*keys(task), *GROUPS)
    found = list(_flat(_load(path), known))
    problems = [
        BadInput(f"{path}: unknown key {key} for {task}", did_you_mean(key, known, _listed(task)))
        for key, _ in found
        if key not in GROUPS and canonical_key(key, keys(task)) is None
    ]
    if problems:
        raise problems[0] if len(problems) == 1 else BadConfig(problems)
    return found


def _listed(task: str) -> str:
    return f"`trainfit config {task}` shows the keys"


def _load(path: Path) -> Mapping[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # Not yaml.safe_load, to which 2e-5 is a text.
        data = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        where = getattr(error, "problem_mark", None)
        line = "" if where is None else f", line {where.line + 1}"
        first = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise BadInput(f"cannot read {path}{line} ({first})", "give a YAML file") from None
    if not isinstance(data, Mapping):
        raise BadInput(f"{path} is no mapping", "give a YAML file of keys and values")
    return {str(key): value for key, value in data.items()}


def _flat(
    data: Mapping[str, Any], known: Sequence[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Dotted keys; a section that says nothing, since all in it is commented out, is left out."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, known, f"{key}.")
        elif value is not None or not any(one.startswith(f"{key}.") for one in known):
            yield key, value
