"""What a line of a log may say, and what that means."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from trainfit.doctor.finding import Fault, Seen

_LONGEST = 240


@dataclass(frozen=True, slots=True)
class Context:
    """What else a log shows that decides which advice is right."""

    fp16: bool = False


class Sign(NamedTuple):
    """What a pattern matched: these words and nothing of the line around them.

    A log may hold texts that are nobody's business.
    """

    words: str
    groups: Mapping[str, str | None]


Explain = Callable[[Sequence[Sign], Context], Seen | None]
"""What the signs of a fault say together; None: nothing."""


def quote(signs: Sequence[Sign]) -> str:
    """The words of the first, and how often there are such."""
    words = " ".join(signs[0].words.split())[:_LONGEST]
    return words if len(signs) == 1 else f"{words} ({len(signs)} times)"


def as_quoted(signs: Sequence[Sign], _context: Context) -> Seen | None:
    """The words themselves are the evidence."""
    return Seen(evidence=quote(signs))


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A fault, and the signs of it in a log."""

    fault: Fault
    like: str
    """A message of this kind, for people who look for theirs."""
    signs: tuple[str, ...]
    """Regular expressions. None may reach into a free text: what they match is shown."""
    word: str = ""
    """Lower-case text that every sign has in it: blocks of a log without it need no slow search."""
    explain: Explain = as_quoted
    symptom: bool = False
    """Follows from some other fault: said only where the log shows no such."""

    @cached_property
    def regex(self) -> tuple[re.Pattern[str], ...]:
        """The signs, compiled."""
        return tuple(re.compile(sign, re.MULTILINE) for sign in self.signs)
