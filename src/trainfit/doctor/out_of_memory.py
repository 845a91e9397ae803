"""CUDA's out-of-memory messages, from torch 1.x on: the numbers in them decide the advice.

Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity; 18.37 GiB already allocated; …
Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.75 GiB of which 17 MiB is free. …

Without numbers the words alone count, where a line states them as what happened. A line that only
speaks of the error (advice, a setting, an `except` clause of a traceback) does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.doctor.finding import Fault

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
