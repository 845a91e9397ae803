"""One step of a run, looked at: profiled, and what it showed kept as evidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from trainfit.measuring.evidence import Evidence, Profiling, gather
from trainfit.measuring.timing import synchronize

WARM_UP = 10
"""Steps before the one that is looked at: until then kernels are chosen and shapes compiled."""

_UNREADABLE = (RuntimeError, AttributeError, LookupError, TypeError, ValueError, OSError)


class Look:
    """What came of it: the evidence, or why there is none."""

    def __init__(self) -> None:
        self.evidence: Evidence | None = None
        self.obstacle = ""


def is_due(taken: int, total: int, sequences: int, most: int) -> bool:
    """Whether to look at the step after `taken` of `total`: past the warm-up, and a whole one.

    `sequences` are those of the step, `most` the most of any so far.
    """
    return taken >= min(WARM_UP, total // 2) and sequences >= most


@contextmanager
def looking(
    step: int,
    given: Sequence[Any],
    sequences: int | None = None,
    *,
    begins: Callable[[], None] = lambda: None,
    ends: Callable[[], None] = lambda: None,
) -> Iterator[Look]:
    """Profile the block, a step with these batches.

    `begins` and `ends` are called right before and after its work: what it takes to start the
    profiler and to read its events lies outside. Where that cannot be done, the block runs all the
    same.
    """
    look = Look()
    began = time.perf_counter()
    try:
        profiling = Profiling()
    except RuntimeError as error:
        look.obstacle = str(error)
        yield look
        return
    begins()
    started = time.perf_counter()
    try:
        yield look
    except BaseException:
        profiling.end()
        raise
    synchronize()
    worked = time.perf_counter() - started
    ends()
    try:
        trace = profiling.end()
        seen = gather(trace, step=step, given=given, seconds=worked, sequences=sequences)
        look.evidence = replace(seen, seconds=time.perf_counter() - began - worked)
    except _UNREADABLE as error:  # a torch that tells otherwise must not end a run
        look.obstacle = f"{type(error).__name__}: {error}"
