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

_UNITS = {"bytes": 1 / 2**30, "kib": 1 / 2**20, "mib": 1 / 2**10, "gib": 1.0, "tib": 2.0**10}
_SIZE = r"[\d.]+ (?:bytes|[KMGT]iB)"
_MUCH = 0.05
"""Share of a GPU from which on fragmentation or other processes are the cause, not the batch."""

_FIELDS = {
    "tried": rf"Tried to allocate ({_SIZE})",
    "capacity": rf"({_SIZE}) total capacity|total capac(?:i)?ty of ({_SIZE})",
    "free": rf"of which ({_SIZE}) is free|({_SIZE}) free;",
    "own": rf"this process has ({_SIZE}) memory in use",
    "allowed": rf"({_SIZE}) allowed;",
    "allocated": rf"({_SIZE}) (?:is allocated by PyTorch|already allocated)",
    "unallocated": rf"({_SIZE}) is reserved by PyTorch but unallocated",
    "reserved": rf"({_SIZE}) reserved in total by PyTorch",
}
_FIELD_REGEX = {name: re.compile(text, re.IGNORECASE) for name, text in _FIELDS.items()}
_PROCESS = re.compile(rf"Process (\d+) has ({_SIZE}) memory in use", re.IGNORECASE)

# Only what torch itself writes can follow, so that no other text of the line is taken along.
_PARTS = (
    rf"\(GPU \d+; (?:{_SIZE} [a-zA-Z ]+[;)] ?)+",
    rf"GPU \d+ has a total capac(?:i)?ty of {_SIZE} of which {_SIZE} is free\.",
    rf"Process \d+ has {_SIZE} memory in use\.",
    rf"Including non-PyTorch memory, this process has {_SIZE} memory in use\.",
    rf"{_SIZE} allowed;",
    rf"Of the allocated memory {_SIZE} is allocated by PyTorch,",
    rf"with {_SIZE} allocated in private pools \(e\.g\., CUDA Graphs\),",
    rf"and {_SIZE} is reserved by PyTorch but unallocated\.",
)
_WORDS = r"(?:CUDA|HIP|XPU) out of memory"
_MESSAGE = rf"{_WORDS}\. Tried to allocate {_SIZE}\.?(?:\s*(?:{'|'.join(_PARTS)}))*"
_OTHER = (
    r"(?:CUDA|HIP|XPU|CUDA driver) error: out of memory",
    r"cuda runtime error \(2\) ?: out of memory",
    r"Triton Error \[(?:CUDA|HIP)\]: out of memory",
    r"Allocation on device (?:\d+ )?would exceed allowed memory",
    r"\bCUDA_ERROR_OUT_OF_MEMORY\b",
)
_BEFORE = (
    *(": ", "] ", "- ", "> ", "| ", "Error('", 'Error("'),
    *("ERROR ", "CRITICAL ", "FATAL ", "EXCEPTION ", "WARNING "),
    *("failed with ", "raised ", "got ", "hit ", "due to ", "because of "),
)
"""Words after which a line states what happened; the start of a line does too."""


_TIME = r"(?<=\d[ \t])|(?<=\dZ[ \t])"
_HERE = rf"(?:^[ \t]*[\"'`]?|{_TIME}|{'|'.join(f'(?<={re.escape(text)})' for text in _BEFORE)})"


def stated(words: str) -> str:
    """The expression for `words` where a line states them and says no more of them."""
    return rf"{_HERE}(?:{words})(?=[.!]|['\"]\)|[\"'`]?[ \t]*$)"


_NAMED = f"(?:{'|'.join((_MESSAGE, _WORDS, *_OTHER))})"
_CLASS = rf"{_HERE}torch\.(?:cuda\.)?OutOfMemoryError(?:: {_NAMED}|(?=: |:?[ \t]*$))"
MESSAGES = {"cuda_oom": f"(?i:{'|'.join((_MESSAGE, stated(_WORDS), _CLASS, *_OTHER))})"}
"""Expressions that signs.yaml refers to by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Figures of a message in GiB; None where it has none."""

    tried: float | None = None
    capacity: float | None = None
    free: float | None = None
    own: float | None = None
    allowed: float | None = None
    allocated: float | None = None
    unallocated: float | None = None
    reserved: float | None = None
    others: tuple[tuple[int, float], ...] = ()
    """(process, GiB) of the other processes."""

    @property
    def held(self) -> float:
        """GiB of the other processes together."""
        return sum(gib for _, gib in self.others)


def read_numbers(message: str) -> Numbers:
    """The numbers of a message."""
    found = {name: _first(regex, message) for name, regex in _FIELD_REGEX.items()}
    if found["unallocated"] is None and found["reserved"] and found["allocated"]:
        found["unallocated"] = found["reserved"] - found["allocated"]
    processes = [(int(pid), gib(size)) for pid, size in _PROCESS.findall(message)]
    if found["own"] is None and processes and found["allocated"] is not None:
        # torch 2.1 calls its own process by its number too: it holds what torch has allocated.
        holders = [p for p in processes if p[1] >= found["allocated"]]
        if holders:
            processes.remove(min(holders, key=lambda holder: holder[1]))
    return Numbers(**found, others=tuple(processes))


def gib(size: str) -> float:
    """A size as torch writes it, such as 20.00 MiB."""
    number, unit = size.split(" ")
    return float(number) * _UNITS[unit.lower()]


def _first(regex: re.Pattern[str], message: str) -> float | None:
    match = regex.search(message)
    return None if match is None else gib(next(group for group in match.groups() if group))


def _told(numbers: Numbers) -> str:
    told = [
        f"{name} {value:.2f} GiB"
        for name, value in (
            ("tried to allocate", numbers.tried),
            ("free", numbers.free),
            ("allocated", numbers.allocated),
            ("reserved but unallocated", numbers.unallocated),
            ("held by other processes", numbers.held or None),
            ("allowed for this process", numbers.allowed),
            ("capacity", numbers.capacity),
        )
        if value is not None
    ]
    return ", ".join(told)


def kind_of(numbers: Numbers) -> str:
    """The fault that the numbers speak for."""
    tried = numbers.tried or 0.0
    much = max(tried, _MUCH * (numbers.capacity or 20.0))
    unallocated = numbers.unallocated or 0.0
    if numbers.held >= max(much, unallocated):
        return "cuda_oom_shared"
    return "cuda_oom_fragmented" if unallocated >= much else "cuda_oom"


def explain(fault: Fault, messages: Sequence[str]) -> tuple[str, list[int], tuple[str, ...]] | None:
    """Figures, positions of the messages of this fault, and steps; None where no message is one.

    The message that asked for most decides.
    """
    known = {at: read_numbers(words) for at, words in enumerate(messages)}
    # Words without numbers say nothing new about what a message with numbers explains.
    known = {at: n for at, n in known.items() if n.tried is not None} or known
    fitting = {at: n for at, n in known.items() if kind_of(n) == fault.id}
    if not fitting:
        return None
    numbers = max(fitting.values(), key=lambda numbers: numbers.tried or 0.0)
    return _told(numbers), list(fitting), _steps(fault, numbers)


def _steps(fault: Fault, numbers: Numbers) -> tuple[str, ...]:
    """The steps of the fault with the figures in place, and those that the figures call for."""
    amount = numbers.held if fault.id == "cuda_oom_shared" else numbers.unallocated or 0.0
    pids = ",".join(str(pid) for pid, _ in numbers.others)
    steps = [
        step.replace("N GiB", f"{amount:.1f} GiB").replace("-p PID", f"-p {pids}")
        for step in fault.fix
    ]
    if fault.id != "cuda_oom":
        return tuple(steps)
    if numbers.capacity and (numbers.tried or 0.0) > numbers.capacity / 4:
        # One tensor of that size comes from long rows, such as the logits of a large vocabulary.
        one = f"One allocation of {numbers.tried:.1f} GiB comes from long sequences: "
        steps.insert(0, one + "begin with data.max_length=512.")
    if numbers.allowed is not None:
        cap = f"The process may use {numbers.allowed:.1f} GiB only: "
        steps.insert(0, cap + "raise what set_per_process_memory_fraction was given.")
    return tuple(steps)


# ── signs in a log ───────────────────────────────────────────────────────────────────────────────


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
    """True for what follows from another fault, which is then shown instead."""
    alone: bool
    """True for what is shown only where nothing else was found."""


@cache
def patterns() -> tuple[Pattern, ...]:
    """Return the log section of signs.yaml, causes before their consequences."""
    return tuple(
        Pattern(
            fault=fault(row),
            like=row["like"],
            signs=tuple(re.compile(_expression(sign), re.MULTILINE) for sign in row["signs"]),
            word=row.get("word", ""),
            explain=_EXPLAIN[row.get("explain", "quote")],
            symptom=row.get("symptom", False),
            alone=row.get("alone", False),
        )
        for row in tables()["log"]
    )


def _expression(sign: Any) -> str:
    if isinstance(sign, str):
        return sign
    if "stated" in sign:
        return f"(?i:{stated(sign['stated'])})"
    return MESSAGES[sign["message"]]


def read_log(path: Path) -> tuple[Finding, ...]:
    """Find the faults in the log file at `path`."""
    try:
        raw = open_regular(path)
        # PowerShell's > writes UTF-16.
        encoding = "utf-16" if raw.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig"
        raw.seek(0)
        with TextIOWrapper(raw, encoding, "replace", newline=None) as file:
            return diagnose(_blocks(file))
    except (OSError, ValueError) as error:  # a NUL in its name
        fix = "give a text file"
        raise BadInput(f"cannot read the log {path} ({reason(error)})", fix) from None


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
    if len(found) > 1:
        found = [(pattern, finding) for pattern, finding in found if not pattern.alone]
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
    found = explain(pattern.fault, [sign.words for sign in signs])
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
