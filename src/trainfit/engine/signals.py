"""SIGTERM and Ctrl-C ask the loop to stop after its step; a second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class StopRequest:
    """The signal that asked, if one has."""

    name: str | None = None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Note the signals instead of dying of them, for the length of a block.

    Only the main thread may do so; in another one the request stays empty.
    """
    request = StopRequest()

    def note(number: int, _frame: FrameType | None) -> None:
        if request.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.name = signal.Signals(number).name

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
