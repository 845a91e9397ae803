"""Read a log of any size and say what went wrong in it, without showing what else it holds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from trainfit.core.errors import BadInput, reason
from trainfit.core.files import open_regular
from trainfit.doctor.finding import Finding, worst_first
from trainfit.doctor.patterns import PATTERNS, Context, Pattern
from trainfit.doctor.patterns.pattern import Sign
from trainfit.doctor.patterns.training import FP16

_BLOCK = 1 << 20
_MOST = 1000
"""Signs kept of a fault; a log of a million bad steps says the same a million times."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def read_log(path: Path) -> tuple[Finding, ...]:
    """What is wrong in the log file at `path`."""
    try:
        with TextIOWrapper(open_regular(path), "utf-8", "replace", newline=None) as file:
            return diagnose(_blocks(file))
    except OSError as error:
        raise BadInput(
            f"cannot read the log {path} ({reason(error)})", "give a text file"
        ) from None


def diagnose_text(text: str) -> tuple[Finding, ...]:
    """What is wrong in a text, such as the message of an error."""
    return diagnose([text])


def diagnose(blocks: Iterable[str]) -> tuple[Finding, ...]:
    """What is wrong in a log that comes in blocks of whole lines."""
    signs: dict[str, list[Sign]] = defaultdict(list)
    fp16 = False
    for block in blocks:
        text = _COLOURS.sub("", block)
        fp16 = fp16 or any(sign.search(text) for sign in FP16)
        folded = text.lower()
        for pattern in PATTERNS:
            if pattern.word in folded:
                _collect(pattern, text, signs[pattern.fault.id])
    context = Context(fp16=fp16)
    found = [
        (pattern, pattern.fault.finding(seen))
        for pattern in PATTERNS
        if (all_of := signs[pattern.fault.id]) and (seen := pattern.explain(all_of, context))
    ]
    causes = any(not pattern.symptom and f.severity == "error" for pattern, f in found)
    return worst_first(f for pattern, f in found if not (pattern.symptom and causes))


def _collect(pattern: Pattern, text: str, found: list[Sign]) -> None:
    for regex in pattern.regex:
        for match in regex.finditer(text):
            if len(found) >= _MOST:
                return
            found.append(Sign(match[0], match.groupdict()))


def _blocks(file: TextIO) -> Iterator[str]:
    """The file in pieces that end with a line, unless a line is longer than a piece."""
    rest = ""
    while piece := file.read(_BLOCK):
        text = rest + piece
        cut = text.rfind("\n") + 1 or len(text)
        rest = text[cut:]
        yield text[:cut]
    if rest:
        yield rest
