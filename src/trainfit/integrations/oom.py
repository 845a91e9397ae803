"""Advice beside an error: what the doctor says of its message, as a note of the exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainfit.doctor import diagnose_text

_HEAD = "trainfit:"


@contextmanager
def oom_advice() -> Iterator[None]:
    """Let errors through with the doctor's advice as a note, which Python prints below them."""
    try:
        yield
    except Exception as error:
        add_advice(error)
        raise


def add_advice(error: BaseException) -> None:
    """Note what the doctor knows of this error, once."""
    if any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ())):
        return
    for finding in diagnose_text(f"{type(error).__name__}: {error}"):
        error.add_note(f"{_HEAD} {finding.title} ({finding.evidence})\n{finding.mend}")
