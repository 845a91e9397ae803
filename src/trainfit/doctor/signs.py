"""Faults in logs: read a log of any size, find the signs, and show nothing else of it."""

from __future__ import annotations

import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TextIO

from trainfit.core.errors import BadInput, reason
from trainfit.core.files import open_regular
from trainfit.doctor import out_of_memory
from trainfit.doctor.finding import (
    GUIDE_MFU,
    Fault,
    Finding,
    Seen,
    fault,
    steps,
    tables,
    worst_first,
)

_BLOCK = 1 << 20
_MOST = 1000
"""Signs kept of a fault; a log of a million bad steps says the same a million times."""
_LONGEST = 240
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LOST = 79
"""Xid of a GPU that fell off the bus, which some messages say without the number."""
_PROGRAM_XIDS = {13, 31, 43, 45}


class Sign(NamedTuple):
    """The words that an expression matched, and nothing of the line around them.

    A log may hold private texts.
    """

    words: str
    groups: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """A fault, and the signs of it in a log."""

    fault: Fault
    like: str
    signs: tuple[re.Pattern[str], ...]
    word: str
    explain: Callable[[Pattern, Sequence[Sign], bool], Seen | None]
    """Takes the signs and True where the log shows fp16; None where they mean nothing."""
    symptom: bool


@cache
def patterns() -> tuple[Pattern, ...]:
    """The log section of signs.yaml, causes before what follows from them."""
    return tuple(
        Pattern(
            fault=fault(row),
            like=row["like"],
            signs=tuple(re.compile(_expression(sign), re.MULTILINE) for sign in row["signs"]),
            word=row.get("word", ""),
            explain=_EXPLAIN[row.get("explain", "quote")],
            symptom=row.get("symptom", False),
        )
        for row in tables()["log"]
    )


def _expression(sign: Any) -> str:
    if isinstance(sign, str):
        return sign
    if "stated" in sign:
        return f"(?i:{out_of_memory.stated(sign['stated'])})"
    return out_of_memory.MESSAGES[sign["message"]]


def read_log(path: Path) -> tuple[Finding, ...]:
    """Find the faults in the log file at `path`."""
    try:
        raw = open_regular(path)
        # PowerShell's > writes UTF-16.
        encoding = "utf-16" if raw.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig"
        raw.seek(0)
        with TextIOWrapper(raw, encoding, "replace", newline=None) as file:
            return diagnose(_blocks(file))
    except OSError as error:
        raise BadInput(
            f"cannot read the log {path} ({reason(error)})", "give a text file"
        ) from None


def diagnose_text(text: str) -> tuple[Finding, ...]:
    """Find the faults in a text, such as the message of an error."""
    return diagnose([text])


def diagnose(blocks: Iterable[str]) -> tuple[Finding, ...]:
    """Find the faults in a log that comes in blocks of whole lines."""
    signs: dict[str, list[Sign]] = defaultdict(list)
    halves = [re.compile(sign) for sign in tables()["fp16"]]
    fp16 = False
    for block in blocks:
        text = _COLOURS.sub("", block)
        fp16 = fp16 or any(sign.search(text) for sign in halves)
        folded = text.lower()
        for pattern in patterns():
            if pattern.word in folded:
                _collect(pattern, text, signs[pattern.fault.id])
    found = [
        (pattern, pattern.fault.finding(seen))
        for pattern in patterns()
        if (known := signs[pattern.fault.id]) and (seen := pattern.explain(pattern, known, fp16))
    ]
    causes = any(not pattern.symptom and f.severity == "error" for pattern, f in found)
    return worst_first(f for pattern, f in found if not (pattern.symptom and causes))


def _collect(pattern: Pattern, text: str, found: list[Sign]) -> None:
    for regex in pattern.signs:
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


# ── evidence from signs, by the name that signs.yaml gives as `explain` ──


def quote(signs: Sequence[Sign]) -> str:
    """The words of the first sign, and the number of signs."""
    words = " ".join(signs[0].words.split())[:_LONGEST]
    return words if len(signs) == 1 else f"{words} ({len(signs)} times)"


def _quoted(_pattern: Pattern, signs: Sequence[Sign], _fp16: bool) -> Seen | None:
    return Seen(evidence=quote(signs))


def _nan(_pattern: Pattern, signs: Sequence[Sign], fp16: bool) -> Seen | None:
    return Seen(evidence=quote(signs), fix=steps("nan_fp16" if fp16 else "nan_other"))


def _mfu(_pattern: Pattern, signs: Sequence[Sign], _fp16: bool) -> Seen | None:
    shares = [share for sign in signs if (share := float(sign.groups["mfu"] or 0)) > 0]
    if not shares or (middle := median(shares)) >= GUIDE_MFU:
        return None
    return Seen(evidence=f"mfu {middle:.1f}% (median of {len(shares)} lines)")


def _xid(_pattern: Pattern, signs: Sequence[Sign], _fp16: bool) -> Seen | None:
    number = int(signs[0].groups.get("number") or _LOST)
    meaning = tables()["xids"].get(number, "see NVIDIA's list of Xid errors")
    fix = steps("program_error") if number in _PROGRAM_XIDS else None
    return Seen(evidence=f"{quote(signs)}: {meaning}", fix=fix)


def _driver(_pattern: Pattern, signs: Sequence[Sign], _fp16: bool) -> Seen | None:
    versions = [found for sign in signs if (found := sign.groups.get("found"))]
    if not versions:
        return Seen(evidence=quote(signs))
    number = int(versions[0])
    return Seen(evidence=f"{quote(signs)}: CUDA {number // 1000}.{number % 1000 // 10}")


def _out_of_memory(pattern: Pattern, signs: Sequence[Sign], _fp16: bool) -> Seen | None:
    found = out_of_memory.explain(pattern.fault, [sign.words for sign in signs])
    if found is None:
        return None
    told, fitting, fix = found
    times = f" ({len(fitting)} times)" if len(fitting) > 1 else ""
    evidence = f"CUDA out of memory: {told}{times}" if told else quote([signs[i] for i in fitting])
    return Seen(evidence=evidence, fix=fix)


_EXPLAIN = {
    "quote": _quoted,
    "nan": _nan,
    "mfu": _mfu,
    "xid": _xid,
    "driver": _driver,
    "out_of_memory": _out_of_memory,
}
