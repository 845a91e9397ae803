"""CUDA's out-of-memory messages, of torch 1.x to today: the numbers in them decide the advice.

Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity; 18.37 GiB already allocated; …
Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.75 GiB of which 17 MiB is free. …

Without numbers the words alone count, where a line states them as what happened. A line that only
speaks of the error (advice, a setting, an `except` clause of a traceback) does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.doctor.finding import Fault, Seen
from trainfit.doctor.patterns.pattern import Context, Pattern, Sign, quote

_UNITS = {"bytes": 1 / 2**30, "kib": 1 / 2**20, "mib": 1 / 2**10, "gib": 1.0, "tib": 2.0**10}
_SIZE = r"[\d.]+ (?:bytes|[KMGT]iB)"
_MUCH = 0.05
"""The share of a GPU from which on fragmentation or others are the cause, and not the batch."""

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
"""Words after which a line states what happened, besides its own beginning."""


_HERE = rf"(?:^[ \t]*[\"'`]?|{'|'.join(f'(?<={re.escape(text)})' for text in _BEFORE)})"


def stated(words: str) -> str:
    """The expression for `words` where a line states them and says no more of them."""
    return rf"{_HERE}(?:{words})(?=[.!]|['\"]\)|[\"'`]?[ \t]*$)"


_NAMED = f"(?:{'|'.join((_MESSAGE, _WORDS, *_OTHER))})"
_CLASS = rf"{_HERE}torch\.(?:cuda\.)?OutOfMemoryError(?:: {_NAMED}|(?=: |:?[ \t]*$))"
_SIGN = f"(?i:{'|'.join((_MESSAGE, stated(_WORDS), _CLASS, *_OTHER))})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """What a message says, in GiB; None where it does not."""

    tried: float | None = None
    capacity: float | None = None
    free: float | None = None
    own: float | None = None
    allowed: float | None = None
    allocated: float | None = None
    unallocated: float | None = None
    reserved: float | None = None
    others: tuple[tuple[int, float], ...] = ()
    """(process, GiB) of those that are not the one that ran out."""

    @property
    def held(self) -> float:
        """By the others together."""
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


LESS_MEMORY = (
    "Lower training.batch_size first (24 → 16 → 12 → 8 → 4): training.batch_size=8. The effective "
    "batch stays the same with training.effective_batch_size=32, or elsewhere with "
    "optimization.gradient_accumulation_steps=4.",
    "Recompute activations: model.use_gradient_checkpointing=true.",
    "Shorten the sequences (1024 → 768, 192 → 128): data.max_length=768.",
    "Lower the peak of compiling: optimization.compile=false.",
    "If it happens in an evaluation: training.eval_batch_size=8, training.eval_iters=50 and a "
    "larger training.eval_steps.",
    "Train less of the model: model.method=lora, or model.freeze_encoder=true; "
    "hardware=gpu_low_mem sets all of this (`make nli-train-low-mem`). In a script of your own: "
    "trainfit.hardware_optimizer.enable_memory_efficient_mode().",
    "`trainfit plan nli --gpu t4` says beforehand what fits. fp16 is no cure: bf16 and fp16 take "
    "the same memory.",
)
_EXPANDABLE = (
    "device.expandable_segments=true, or before Python starts "
    "`export PYTORCH_ALLOC_CONF=expandable_segments:True` (PYTORCH_CUDA_ALLOC_CONF before torch "
    "2.9)"
)
_LAST = f"If much is reserved but unallocated: {_EXPANDABLE}."


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
    """Which of the three faults the numbers speak for."""
    tried = numbers.tried or 0.0
    much = max(tried, _MUCH * (numbers.capacity or 20.0))
    unallocated = numbers.unallocated or 0.0
    if numbers.held >= max(much, unallocated):
        return "cuda_oom_shared"
    return "cuda_oom_fragmented" if unallocated >= much else "cuda_oom"


def _explain(kind: str, signs: Sequence[Sign]) -> Seen | None:
    """The finding, if some of the messages are of this kind: by the one that asked for most."""
    known = [(read_numbers(sign.words), sign) for sign in signs]
    # Words without numbers say nothing new about what a message with numbers explains.
    known = [pair for pair in known if pair[0].tried is not None] or known
    fitting = [(numbers, sign) for numbers, sign in known if kind_of(numbers) == kind]
    if not fitting:
        return None
    numbers, _ = max(fitting, key=lambda pair: pair[0].tried or 0.0)
    told = _told(numbers)
    times = f" ({len(fitting)} times)" if len(fitting) > 1 else ""
    return Seen(
        evidence=f"CUDA out of memory: {told}{times}" if told else quote([s for _, s in fitting]),
        mend=_STEPS[kind](numbers),
    )


def _plain_steps(numbers: Numbers) -> tuple[str, ...]:
    steps = list(LESS_MEMORY)
    if numbers.capacity and (numbers.tried or 0.0) > numbers.capacity / 4:
        # One tensor of that size comes from long rows, such as the logits of a large vocabulary.
        one = f"One allocation of {numbers.tried:.1f} GiB comes from long sequences: "
        steps.insert(0, one + "begin with data.max_length=512.")
    if numbers.allowed is not None:
        cap = f"The process may use {numbers.allowed:.1f} GiB only: "
        steps.insert(0, cap + "raise what set_per_process_memory_fraction was given.")
    return (*steps, _LAST)


def _fragmented_steps(numbers: Numbers) -> tuple[str, ...]:
    amount = numbers.unallocated or 0.0
    first = f"Fragmentation: {amount:.1f} GiB are reserved but unallocated. Let segments grow: "
    return (
        first + f"{_EXPANDABLE}.",
        "Keep shapes alike (trainfit packs rows of a fixed size).",
        *LESS_MEMORY,
    )


def _shared_steps(numbers: Numbers) -> tuple[str, ...]:
    pids = ",".join(str(pid) for pid, _ in numbers.others)
    return (
        f"Other processes hold {numbers.held:.1f} GiB: `ps -o pid,user,etime,cmd -p {pids}` says "
        "what they are; end those that are yours and left over.",
        "Choose another GPU: `export CUDA_VISIBLE_DEVICES=1`.",
        *LESS_MEMORY,
    )


_STEPS = {
    "cuda_oom": _plain_steps,
    "cuda_oom_fragmented": _fragmented_steps,
    "cuda_oom_shared": _shared_steps,
}

_WHY = "The step did not fit: the run ends, unless its loop cuts the step finer and goes on."


def _pattern(id: str, title: str, why: str) -> Pattern:
    def explain(signs: Sequence[Sign], _context: Context) -> Seen | None:
        return _explain(id, signs)

    fault = Fault(id=id, severity="error", title=title, why=why, mend=_STEPS[id](Numbers()))
    return Pattern(fault=fault, like=_LIKE[id], signs=(_SIGN,), word="memory", explain=explain)


_LIKE = {
    "cuda_oom": "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of "
    "14.75 GiB of which 17.06 MiB is free.",
    "cuda_oom_fragmented": "CUDA out of memory. Tried to allocate 2.25 GiB. Of the allocated "
    "memory 18.90 GiB is allocated by PyTorch, and 3.10 GiB is reserved by PyTorch but "
    "unallocated.",
    "cuda_oom_shared": "CUDA out of memory. Tried to allocate 128.00 MiB. Process 5142 has 61.30 "
    "GiB memory in use. Including non-PyTorch memory, this process has 17.75 GiB memory in use.",
}
PATTERNS = (
    _pattern(
        "cuda_oom_shared",
        "GPU memory ran out, and other processes hold much of it",
        "What others hold cannot be won back by a smaller batch of yours.",
    ),
    _pattern(
        "cuda_oom_fragmented",
        "GPU memory ran out, though enough of it was free in pieces",
        "The allocator holds memory in blocks of the wrong sizes, as lengths change from step to "
        "step.",
    ),
    _pattern("cuda_oom", "GPU memory ran out", _WHY),
)
