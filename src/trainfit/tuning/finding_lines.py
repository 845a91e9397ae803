"""Lines through few points, and the search along them: each point costs a second or more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

_FINE = 64
"""The largest budget is found to one part in so many, or to the row."""
_SECANTS = 5
"""Lines that are tried before the rest is halved."""


def most_rows(
    slack: Callable[[int], float], at_least: int, at_most: int, known: Iterable[int] = ()
) -> int:
    """The most rows with room left over; `at_least` - 1 where there are none.

    To ask takes a second, and room falls on a line that bends down: so what is `known` is used
    first, then lines through what was asked, and halving where these mislead.
    """
    if at_most < at_least or slack(at_least) < 0:
        return at_least - 1
    fit, high = [at_least], at_most + 1
    for rows in known:
        if fit[-1] < rows < high and slack(rows) >= 0:
            fit.append(rows)
        elif fit[-1] < rows < high:
            high = rows
    for tries in itertools.count():
        low = fit[-1]
        step = max(1, low // _FINE)
        if high - low <= step:
            return low
        beyond = None if high > at_most else high
        rows = _end_of_room(slack, fit, beyond) if tries < _SECANTS else (low + high) // 2
        rows = min(max(rows, low + step), high - 1)
        if slack(rows) >= 0:
            fit.append(rows)
        else:
            high = rows
    raise AssertionError


def _end_of_room(slack: Callable[[int], float], fit: list[int], beyond: int | None) -> int:
    """Where a line says that the room ends: through two that fit, or one that does and one not."""
    low = fit[-1]
    if beyond is not None:
        left, lacks = slack(low), -slack(beyond)
        return low + int((beyond - low) * left / (left + lacks))
    if len(fit) == 1:
        return max(8, 2 * low)
    falls = (slack(fit[-2]) - slack(low)) / (low - fit[-2])
    return 2 * low if falls <= 0 else low + int(slack(low) / falls)


def law(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line of least squares, as its value at 0 and its slope."""
    across = sum(x for x, _ in points) / len(points)
    up = sum(y for _, y in points) / len(points)
    spread = sum((x - across) ** 2 for x, _ in points)
    slope = sum((x - across) * (y - up) for x, y in points) / spread if spread else 0.0
    return up - slope * across, slope


def line(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """The same line, to be asked."""
    fixed, each = law(points)
    return lambda x: fixed + each * x
