"""Axes: which part of the numbers is shown, where the ticks stand, and places from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """A stretch of numbers, linear or logarithmic."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Where a number is, from 0 at the low end to 1 at the high one."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(max(value, 1e-300)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


def linear(low: float, high: float, count: int = 4, *, tight: bool = False) -> Axis:
    """An axis over `low` to `high` and, unless `tight`, on to the next round numbers."""
    if high <= low:
        room = abs(low) * 0.05 or 1.0
        low, high = low - room, high + room
    step = _round_step((high - low) / count)
    if not tight:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    ticks = tuple(_clean(n * step) for n in range(first, last + 1))
    return Axis(low, high, ticks)


def logarithmic(low: float, high: float) -> Axis:
    """An axis over positive numbers, with ticks at powers of ten, or every few of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 5))
    ticks = tuple(10.0**n for n in range(first, last + 1) if (n - first) % every == 0)
    inside = tuple(tick for tick in ticks if low * 0.999 <= tick <= high * 1.001)
    return Axis(low, high, inside or ticks[:1], log=True)


def span(values: Iterable[float | None]) -> tuple[float, float] | None:
    """The least and the greatest of what is finite."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    return (min(found), max(found)) if found else None


def thinned(ticks: Sequence[float], most: int) -> tuple[float, ...]:
    """Every second tick, or every third …, so that no more than `most` are left."""
    return tuple(ticks[:: max(1, math.ceil(len(ticks) / most))])


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)


def _clean(value: float) -> float:
    """0.30000000000000004 is 0.3."""
    return float(f"{value:.12g}")
