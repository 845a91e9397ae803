"""train.log read back: the events of a run that left no result, and its first lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainfit import codec
from trainfit.errors import TrainfitError
from trainfit.records import Event

_STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
_EVENT = re.compile(_STAMP + r"([a-z][a-z ]*) at step (\d+): (.*)")
_NOT_EVENTS = ("evaluation",)
_OPENING = re.compile(
    _STAMP
    + r"((?:Device|TF32|Precision|SDPA|Attention|Frozen encoder|Using|DataLoader|Steps of)\b.*)"
)
_MOST_LINES = 12


def events_of(log: str, result: Mapping[str, Any]) -> tuple[Event, ...]:
    """What happened in a run, by its result or, while there is none, by its log."""
    try:
        recorded = codec.decode(tuple[Event, ...], result.get("events", []))
    except TrainfitError:
        recorded = ()
    return tuple(recorded) or tuple(_logged(log))


def _logged(log: str) -> Iterator[Event]:
    for line in log.splitlines():
        if (found := event_in(line)) is not None:
            yield found


def event_in(line: str) -> Event | None:
    """The event that a line of the log tells of; when it was is not in it."""
    found = _EVENT.fullmatch(line)
    if found is None or found[1] in _NOT_EVENTS:
        return None
    return Event(kind=found[1], step=int(found[2][:18]), seconds=float("nan"), text=found[3])


def opening_of(log: str) -> tuple[str, ...]:
    """The first lines, about what is really set."""
    head = log.splitlines()[:_MOST_LINES]
    found = (_OPENING.fullmatch(line) for line in head)
    return tuple(dict.fromkeys(match[1] for match in found if match))
