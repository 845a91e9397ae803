"""Hides the libraries that TRAINFIT_TEST_WITHOUT names from this Python and from its children."""

import os
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_HIDDEN = frozenset(os.environ["TRAINFIT_TEST_WITHOUT"].split(","))
_find = PathFinder.find_spec


def _find_the_rest(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    return None if name.partition(".")[0] in _HIDDEN else _find(name, path, target)


PathFinder.find_spec = staticmethod(_find_the_rest)  # type: ignore[method-assign,assignment]
