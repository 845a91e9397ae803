"""Secrets are taken out of whatever is printed or written: one rule for all of trainfit.

A URL loses its credentials; an option, key or variable whose name says that it holds a secret loses
its value; and the values of such environment variables are found wherever they turn up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
_TOKEN = "".join(rf"(?<!{kind}_)" for kind in ("pad", "eos", "bos", "unk", "cls", "sep", "mask"))
"""A tokenizer's own tokens are no secrets."""
_NAMES = (
    rf"(?:pass(?:word|wd|phrase)?|pwd|secret|{_TOKEN}token|credentials?"
    r"|(?:api|access|private|auth)[_-]?key)"
)
_SECRET_NAME = re.compile(rf"(?:^|[\W_]|\w(?=pass)){_NAMES}$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE)$", re.IGNORECASE)
_SHORTEST = 6
"""Characters of a variable's value; a shorter one would be found in innocent words."""

_URL = re.compile(r"(:/(?:/|(?=[^\s/?#@:]+:)))(?:[^\s/?#'\"<>]*|[^\s/?#@:'\"<>]*:[^\s@]*)@")
"""The second form is a password with a slash in it, which database drivers take.

A path that was made of a URL has one slash.
"""
_URL_WORD = re.compile(r"(://)(?:[^/?#]*|[^/?#@:]*:.*)@", re.DOTALL)
"""As a word of a command, which may hold spaces."""
_ASSIGNED = re.compile(
    rf"((?<![\w.-])[\w.-]*?(?:(?<![a-z]){_NAMES}|password)['\"]?=\s?|"
    r"\b[\w.-]*(?:password|secret)['\"]?\s?:\s?)"
    r"(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s&;,'\"]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE)


def redact(text: str) -> str:
    """The text without credentials in URLs, named secrets and the values of secret variables."""
    text = _URL.sub(rf"\1{HIDDEN}@", text)
    for pattern in (_BEARER, _ASSIGNED):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    for value in _variables(os.environ):
        text = text.replace(value, HIDDEN)
    return text


def redact_word(word: str) -> str:
    """One word of a command, or a URL: a password in it may hold spaces."""
    return redact(_URL_WORD.sub(rf"\1{HIDDEN}@", word))


def redact_words(words: Iterable[str]) -> list[str]:
    """The words of a command, with the word after an option such as --password hidden too."""
    shown: list[str] = []
    hide = False
    for word in words:
        shown.append(HIDDEN if hide and not word.startswith("-") else redact_word(word))
        hide = word.startswith("-") and _SECRET_NAME.search(word) is not None
    return shown


def redact_values(value: Any) -> Any:
    """Plain data with every text in it redacted, and what a secret's name stands for."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _named(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(item) for item in value]
    return value


def _named(name: str, value: Any) -> Any:
    if isinstance(value, str) and value and _SECRET_NAME.search(name):
        return HIDDEN
    return redact_values(value)


def _variables(environment: Mapping[str, str]) -> list[str]:
    """The values of variables that are named like a secret, the longest first."""
    found = {
        value
        for name, value in environment.items()
        if _SECRET_VARIABLE.search(name)
        and len(value) >= _SHORTEST
        and not value.startswith(("/", "~", "."))
    }
    return sorted(found, key=len, reverse=True)
