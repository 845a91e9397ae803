"""One error family. Every message says what was wrong, with the value, and what to do about it."""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HIDDEN = "***"
_TOKEN = "".join(rf"(?<!{kind}[_-])" for kind in ("pad", "eos", "bos", "unk", "cls", "sep", "mask"))
"""Expression that keeps pad_token and the like, which are no secrets, out of the names."""
_DATABASE = r"(?:database|db|mysql|postgres|mongo|redis)[_-]ur[il]|conn(?:ection)?_?str(?:ing)?"
_NAMES = (
    rf"(?:(?:db|my|pg)?pass(?:word|wd|phrase)?|pwd?|secrets?|{_TOKEN}token|credentials?|auth|jwt"
    rf"|cookie|dsn|{_DATABASE}|(?:api|(?:shared)?access|account|private|auth)[_-]?key)\d*"
)
_SECRET_NAME = re.compile(rf"(?:^|[\W_]|\w(?=pass)){_NAMES}$|[^\W_][_-]key$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(
    rf"(?:^|_){_NAMES}$|(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|_PAT)$", re.IGNORECASE
)
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys instead of showing them, but for tabs and line ends."""
_SHORTEST = 6
"""Minimum characters of a secret value; a shorter one would match innocent words."""

_URL = re.compile(r"(:/(?:/|(?=[^\s/?#@:]+:)))(?:[^\s/?#'\"<>]*|[^\s/?#@:'\"<>]*:[^\s@]*)@")
"""Credentials in a URL, or in a path made from one, which has a single slash after the colon.

The second form is a password with a slash in it, which database drivers accept.
"""
_PASSWORD = re.compile(r"://[^\s/@:]*:([^\s@/]+)@")
_URL_WORD = re.compile(r"(://)(?:[^/?#]*|[^/?#@:]*:.*)@", re.DOTALL)
"""A URL as one word of a command, which may contain spaces."""
_ASSIGNED = re.compile(
    rf"((?<![\w.-])[\w.-]*?(?:(?:(?<![a-z]){_NAMES}|password[\w-]*|[_-]key)['\"]?=\s?|"
    rf"(?:passw(?:or)?d|passphrase|secret|[_-]{_TOKEN}token|(?:api|[_-])key)['\"]?\s?:\s?(?![\d.]+\b))|"
    rf"['\"]{_NAMES}['\"]\s?:\s?)"
    r"(?!['\"]?[\w+.-]+://)(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s&;,'\"]+)",
    re.IGNORECASE,
)
"""A value behind the name of a secret; an address loses its credentials alone."""
_BEARER = re.compile(
    r"(\b(?:(?:bearer|basic)\s+|authorization\W{1,4}(?:\w+\s+)?))[\w.~+/=-]{8,}", re.IGNORECASE
)
_ISSUED = re.compile(
    r"(\b(?:(?:hf_|gh[a-z]_|github_pat_|glpat-|npm_|sk-(?:\w+-)?|xox[a-z]-|AKIA)(?=\w*\d)"
    r"(?=[A-Za-z0-9]{16})|AIza|eyJ))[\w-]{16,}(?:\.[\w-]{16,})*"
)
"""Tokens that are told by how they begin."""
_GIVEN = re.compile(
    rf"((?<![\w-])--?(?:[\w-]*[_-])?{_NAMES}\s+(?!-)|(?<![\w-])(?:-u|--user)\s+[^\s:]+:|"
    r"[?&](?:sig|(?:[\w-]+-)?signature|key|code)=|"
    r"\b(?:passw(?:or)?d|passphrase)\s+(?=[\w-]*\d)(?=\w*[a-z]))[^\s&'\"]{6,}",
    re.IGNORECASE,
)
"""A secret behind an option, in the query of an address, or with a digit behind "password"."""


def redact(text: str) -> str:
    """Remove credentials in URLs, named secrets and the values of secret variables."""
    text = _URL.sub(rf"\1{HIDDEN}@", text)
    for pattern in (_BEARER, _ASSIGNED, _GIVEN, _ISSUED):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    for value in _variables(os.environ):
        text = text.replace(value, HIDDEN)
    return text


def printable(text: str) -> str:
    """Escape control characters, such as those of a class name that would rule a terminal."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def redact_word(word: str) -> str:
    """Redact one word of a command, or a URL, whose password may contain spaces."""
    return redact(_URL_WORD.sub(rf"\1{HIDDEN}@", word))


def redact_words(words: Iterable[str]) -> list[str]:
    """Redact the words of a command, and the word after an option such as --password."""
    shown: list[str] = []
    hide = False
    for word in words:
        shown.append(HIDDEN if hide and not word.startswith("-") else redact_word(word))
        hide = word.startswith("-") and _SECRET_NAME.search(word) is not None
    return shown


def redact_values(value: Any) -> Any:
    """Redact every text in plain data, and the values of keys that are named like a secret."""
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
    """List the values of variables that are named like a secret, and passwords in addresses.

    The longest come first.
    """
    named = (value for name, value in environment.items() if _SECRET_VARIABLE.search(name))
    found = {
        value for value in named if not value.startswith(("/", "~", ".")) and "://" not in value
    }
    found.update(_PASSWORD.findall("\n".join(environment.values())))
    return sorted((one for one in found if len(one) >= _SHORTEST), key=len, reverse=True)


MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Errors that code raises on data of another form than it expects."""


class TrainfitWarning(UserWarning):
    """A problem that does not stop trainfit."""


class CompileFailed(TrainfitWarning):
    """torch.compile failed, and the model runs eagerly from there on."""


class TrainfitError(Exception):
    """Base of all errors that trainfit raises; the command line prints one line."""

    exit_code = 1

    def __init__(self, what: str, fix: str) -> None:
        """Say `what` was wrong, naming the value, and the `fix`; secrets are left out."""
        what, fix = redact(what), redact(fix)
        super().__init__(f"{what}; {fix}" if fix else what)
        self.what = what
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle both arguments, so that errors of worker processes reach their parent."""
        return type(self), (self.what, self.fix)


class RunFailed(TrainfitError):
    """The input was right, but the work could not be finished."""


class OutOfMemory(RunFailed):
    """Memory ran out, and every way around it was tried."""


class BadInput(TrainfitError):
    """A value given by the user, or read from a file, cannot be used."""

    exit_code = 2


class BadConfig(BadInput):
    """Every problem of one configuration, gathered and raised once."""

    def __init__(self, problems: Sequence[BadInput]) -> None:
        """Join the `problems`, one line each."""
        super().__init__("\n".join(str(problem) for problem in problems), "")
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with its own argument, as the base class does."""
        return type(self), (self.problems,)


def reason(error: BaseException) -> str:
    """Word why something failed in one short line; an OSError without its path."""
    if isinstance(error, KeyError) and " " not in str(error):
        return f"nothing is named {brief(str(error))}"
    said = (getattr(error, "strerror", None) or str(error)).strip().splitlines()
    if len(said) > 1 and said[0].endswith(":"):
        said[0] = f"{said[0]} {said[1].strip()}"
    return brief(said[0]) if said else type(error).__name__


def user_line(error: BaseException) -> str | None:
    """Name the last line that an error passed in a file of the user's; None where it passed none.

    Files of trainfit, of installed packages and of Python itself are not the user's.
    """
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    others = {Path(__file__).parents[1], *(Path(sysconfig.get_path(kind)) for kind in kinds)}
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if path.is_absolute() and others.isdisjoint(path.parents):
            found = f"line {line} of {path.name}"
    return found


def in_one_line(error: BaseException) -> str:
    """Type and first line of an error; of trainfit's own errors the line alone."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, TrainfitError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def refusing(refusal: Callable[[str], BadInput]) -> Iterator[None]:
    """Turn an exception that a library raises for bad input into the error that `refusal` makes."""
    try:
        yield
    except (TrainfitError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in a Rust library is not an Exception
        raise refusal(reason(error)) from error


def brief(text: str, most: int = 200) -> str:
    """Shorten a text to one line by leaving out its middle."""
    return text if len(text) <= most else f"{text[: most - 40]} … {text[-37:]}"


def nearest(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """Return the `choices` most similar to `word`, best first."""
    folded = word[:200].lower()  # the time grows with the product of both lengths
    likeness = {
        choice: difflib.SequenceMatcher(None, folded, choice.lower()).ratio()
        for choice in sorted(set(choices))
    }
    best = max(likeness.values(), default=0.0)
    floor = max(0.5, best - 0.1)
    close = sorted(likeness, key=lambda choice: (-likeness[choice], choice[:1] != word[:1]))
    return [choice for choice in close if likeness[choice] >= floor][:count]


def did_you_mean(word: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Word a fix that names the nearest valid words, or `otherwise` when none is near."""
    close = nearest(word, choices)
    return f"did you mean {' or '.join(close)}?" if close else otherwise
