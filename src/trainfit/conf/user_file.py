"""A configuration file of the user's, as the words that would say the same on the command line.

So a file can say what words can and nothing else, every mistake in it is reported as a word's
would be, and a word given beside it wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainfit.conf.aliases import canonical_key
from trainfit.conf.composition import GROUPS, as_word, keys
from trainfit.conf.yaml_files import read_yaml
from trainfit.errors import BadConfig, BadInput, did_you_mean

_MOST = 20
"""Unknown keys that are named one by one."""


def with_file(task: str, path: Path | None, words: Sequence[str]) -> tuple[str, ...]:
    """The words of the file at `path`, then those given beside it."""
    if path is None:
        return tuple(words)
    given = {_key(task, word.partition("=")[0]) for word in words}
    file = [(key, value) for key, value in _read(task, path) if _key(task, key) not in given]
    return (*(as_word(key, value) for key, value in file), *words)


def _key(task: str, written: str) -> str:
    return canonical_key(written, keys(task)) or written


def _read(task: str, path: Path) -> list[tuple[str, Any]]:
    """The keys and values of the file, or one error that lists every key that is wrong."""
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
    """Dotted keys; a section that says nothing, since all in it is commented out, is left out."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, known, f"{key}.")
        elif value is not None or not any(one.startswith(f"{key}.") for one in known):
            yield key, value
