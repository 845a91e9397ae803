"""Advice on errors in a user's own training loop, in the words of its framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainfit.doctor import diagnose_text
from trainfit.doctor.finding import numbered, tables
from trainfit.doctor.signs import Numbers, kind_of, read_numbers

_HEAD = "trainfit:"
_UNKNOWN = "python_error"
"""The finding that only says that there was an error."""
_MODULES = {
    "transformers.": "transformers",
    "lightning.": "lightning",
    "pytorch_lightning.": "lightning",
}
"""Modules of a traceback that tell the framework; a loop without any is torch's."""
_EXPANDABLE = (
    "`export PYTORCH_ALLOC_CONF=expandable_segments:True` before Python starts "
    "(PYTORCH_CUDA_ALLOC_CONF before torch 2.9)"
)


@contextmanager
def oom_advice() -> Iterator[None]:
    """Let errors through with advice as a note, which Python prints below them."""
    try:
        yield
    except Exception as error:
        add_advice(error)
        raise


def add_advice(error: BaseException) -> None:
    """Add a note with the cause of a known error, once; running out of memory gets steps too."""
    if any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ())):
        return
    numbers = read_numbers(str(error))
    for finding in diagnose_text(f"{type(error).__name__}: {error}"):
        if finding.id == _UNKNOWN:
            continue
        out_of_memory = finding.id == kind_of(numbers)
        steps = numbered(_steps(finding.id, numbers, framework_of(error)))
        advice = steps if out_of_memory else finding.why
        error.add_note(f"{_HEAD} {finding.title} ({finding.evidence})\n{advice}")


def framework_of(error: BaseException) -> str:
    """Framework whose code the error passed through: transformers, lightning, or else torch."""
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        for prefix, name in _MODULES.items():
            if module.startswith(prefix):
                return name
        trace = trace.tb_next
    return "torch"


def _steps(kind: str, numbers: Numbers, framework: str) -> tuple[str, ...]:
    """Steps for running out of memory, in the order to try them."""
    steps = tables()["elsewhere"][framework]
    grow = f"If much is reserved but unallocated: {_EXPANDABLE}."
    if kind == "cuda_oom_fragmented":
        amount = f"{numbers.unallocated or 0:.1f} GiB are reserved but unallocated"
        return (f"Fragmentation: {amount}. Let segments grow: {_EXPANDABLE}.", *steps)
    if kind == "cuda_oom_shared":
        pids = ",".join(str(pid) for pid, _ in numbers.others)
        return (
            f"Other processes hold {numbers.held:.1f} GiB: `ps -o pid,user,etime,cmd -p {pids}` "
            "lists them; end those that are yours and left over.",
            "Choose another GPU: `export CUDA_VISIBLE_DEVICES=1`.",
            *steps,
        )
    if numbers.allowed is not None:
        cap = f"The process may use {numbers.allowed:.1f} GiB only: "
        return (f"{cap}raise what set_per_process_memory_fraction was given.", *steps, grow)
    return (*steps, grow)
