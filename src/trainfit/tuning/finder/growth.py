"""How many rows fit, from a prediction of the memory and at most three real steps; no torch here.

Two small probes say how far the prediction is off, on a line over the rows. The third runs at the
budget that will be recommended, or at half of it where probes and prediction disagree. Nothing is
run that is not expected to fit, so that memory does not run out by design.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainfit.core.errors import RunFailed
from trainfit.core.plan_records import TaskSpec
from trainfit.core.records import Gpu
from trainfit.engine.optimizer import take_workspaces
from trainfit.planning.estimator.estimate import Request, Room, Target, ask, told

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


GIB = 1 << 30
CONFIRMED = 0.9
"""The share of the largest budget up to which a probe may go."""
_TRUSTED = 0.1
"""By how much of the memory probes may disagree with the prediction and it is still believed."""
_ALIKE = 0.05
"""By how much two slopes may differ and still be of one line."""
_NEAR_BEST = 0.98
_CLEAR = 0.96
"""The share of the memory that the last probe may take, by a line through much smaller ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """What a step is predicted to take, in bytes."""

    allocated: float
    reserved: float
    """Where nothing limits it."""
    needed: float
    """The least memory in which it runs, the allocator giving back its cache where it has to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a real step took, in bytes and seconds."""

    rows: int
    held: float
    """Before its first micro-batch: weights and the optimizer's state."""
    allocated: float
    reserved: float
    seconds: float
    """Of a micro-batch, with its share of the update."""


Predict = Callable[[int], Peak]
Measure = Callable[[int], Measured | None]
"""A real step of so many rows; None: memory ran out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRange:
    """Which numbers of rows are asked about."""

    at_least: int = 1
    at_most: int = 1 << 16
    share: float = CONFIRMED
    """Of the largest budget: what will be recommended, and so what is confirmed."""

    def within(self, rows: float) -> int:
        """The nearest number of rows in the range."""
        return max(self.at_least, min(self.at_most, math.floor(rows)))


@dataclass(slots=True)
class Search:
    """What is known so far."""

    room: Callable[[], float]
    """Bytes that the steps may take, as the device says now."""
    asked: RowRange
    predict: Predict | None
    measure: Measure | None
    probes: list[Measured] = field(default_factory=list)
    known: dict[int, Peak] = field(default_factory=dict)
    ran_out: int | None = None
    """The rows at which memory ran out, if it did."""
    settled: bool = False
    """Whether enough was asked: what lies between two predictions is then on a line."""
    confirmed: bool = False
    """Whether the last probe was at the budget that is recommended."""

    def peak(self, rows: int) -> Peak:
        """The prediction; to ask for one takes a second or more, so nothing is asked twice."""
        if rows not in self.known:
            below = max((r for r in self.known if r < rows), default=None)
            above = min((r for r in self.known if r > rows), default=None)
            if self.settled and below is not None and above is not None:
                share = (rows - below) / (above - below)
                return _between(self.known[below], self.known[above], share)
            assert self.predict is not None
            self.known[rows] = self.predict(rows)
        return self.known[rows]

    def off(self, rows: int) -> float:
        """How much more than predicted a step takes, by the line through the last two probes."""
        points = [(p.rows, p.allocated - self.peak(p.rows).allocated) for p in self.probes[-2:]]
        return line(points)(rows) if points else 0.0

    def pieces(self) -> float:
        """What the allocator keeps in pieces beyond what was predicted, by the last probe."""
        if not self.probes:
            return 0.0
        last = self.probes[-1]
        predicted = self.peak(last.rows)
        beyond = last.reserved - last.allocated - (predicted.reserved - predicted.allocated)
        return min(max(0.0, beyond), last.reserved - last.allocated)

    def probe(self, rows: int) -> bool:
        """Run a real step; False where memory ran out, or where there is nothing to run it on."""
        if self.measure is None:
            return False
        found = self.measure(rows)
        if found is None:
            self.ran_out = rows if self.ran_out is None else min(rows, self.ran_out)
            return False
        self.probes.append(found)
        return True


def search(found: Search) -> int:
    """The most rows that fit; it leaves its probes in `found`."""
    largest = _by_probes(found) if found.predict is None else _by_prediction(found)
    if largest < found.asked.at_least:
        raise _too_large(found)
    return largest


def _by_prediction(found: Search) -> int:
    asked = found.asked
    first = _largest(found)
    if first < asked.at_least or found.measure is None:
        return first
    small = small_sizes(first, asked)
    for rows in (*small, asked.within(first * min(asked.share, CONFIRMED))):
        found.peak(rows)
    found.settled = True
    for rows in small:
        if not found.probe(rows):
            return _largest(found)
    largest = _largest(found)
    if largest < max(2, asked.at_least):
        return largest
    believed = abs(found.off(largest)) <= _TRUSTED * found.room()
    share = min(asked.share, CONFIRMED) if believed else 0.5
    third = _safe(found, asked.within(largest * share))
    if all(third > probe.rows for probe in found.probes):
        found.confirmed = found.probe(third) and third == asked.within(largest * share) and believed
    return _largest(found)


def _safe(found: Search, rows: int) -> int:
    """So many rows, or as many as fit even if the allocator never gives back its cache.

    Where it has to, whether a step fits hangs on a few bytes, and that is no place for a probe.
    """
    takes = found.peak(rows).reserved + found.off(rows)
    room = _CLEAR * (found.room() - found.pieces())
    return rows if takes <= room else max(1, int(rows * room / takes))


def small_sizes(largest: int, asked: RowRange) -> list[int]:
    """Two sizes far below what is expected to fit; one, or none, where there is no room."""
    low = max(asked.at_least, largest // 8)
    high = max(low + 1, largest // 4)
    return [rows for rows in (low, high) if 2 * rows <= largest]


def _largest(found: Search) -> int:
    """The most rows whose prediction, corrected by the probes, keeps within the room."""
    room = found.room() - found.pieces()

    def slack(rows: int) -> float:
        return room - found.off(rows) - found.peak(rows).needed

    top = found.asked.at_most if found.ran_out is None else found.ran_out - 1
    return most_rows(slack, found.asked.at_least, top, sorted(found.known))


def _by_probes(found: Search) -> int:
    """Without a prediction: small probes, each chosen by the one before it."""
    if not found.probe(found.asked.at_least):
        return 0
    largest = _by_line(found)
    for part in (8, 2):
        rows = max(found.probes[-1].rows + 1, largest // part)
        if rows >= largest or not found.probe(rows):
            break
        largest = _by_line(found)
    return largest


def _by_line(found: Search) -> int:
    """By what the allocator reserved, and rather too few rows than too many.

    Part of what the last probe reserved beyond weights and state may be the same for any rows, so
    all of it, taken as if it grew with them, is a bound. A line that three probes lie on is better.
    """
    probes, last = found.probes, found.probes[-1]
    fixed = probes[0].held  # of the fewest rows: the batch itself is among what is held
    each = (last.reserved - fixed) / last.rows
    if len(probes) >= 3:
        lines = [law([(p.rows, p.reserved) for p in probes[at : at + 2]]) for at in (0, 1)]
        if abs(lines[0][1] - lines[1][1]) <= _ALIKE * lines[1][1]:
            fixed, each = lines[1]
    top = found.asked.at_most if found.ran_out is None else found.ran_out - 1
    return min(top, max(last.rows, int((found.room() - fixed) / each))) if each > 0 else top


def _between(low: Peak, high: Peak, share: float) -> Peak:
    def line(name: str) -> float:
        first: float = getattr(low, name)
        return first + share * float(getattr(high, name) - first)

    names = ("allocated", "reserved", "needed")
    return Peak(**{name: line(name) for name in names})


def knee(probes: Sequence[Measured], at_least: int, recommended: int) -> int | None:
    """The fewest rows that are within 2% of the throughput of the `recommended` ones.

    A micro-batch takes a + b · rows seconds. None: two probes at the least tell a from b.
    """
    if len(probes) < 2:
        return None
    start, each = law([(p.rows, p.seconds) for p in probes])
    if start <= 0:
        return at_least
    rate = _NEAR_BEST * recommended / (start + max(0.0, each) * recommended)
    return min(recommended, max(at_least, math.ceil(rate * start / (1 - rate * max(0.0, each)))))


def _too_large(found: Search) -> RunFailed:
    least, room = found.asked.at_least, found.room()
    rows = f"{least} row{'s' if least > 1 else ''}"
    takes = found.known[least].needed + found.off(least) if least in found.known else None
    told = "more" if takes is None else f"{takes / GIB:.2f} GiB"
    return RunFailed(
        f"a micro-batch of {rows} does not fit: it takes {told} and {room / GIB:.2f} GiB are free",
        "use gradient checkpointing, a shorter max_length or a smaller model, or free the device",
    )


_FACTORY = "trainfit.tuning.finder.growth:probe"  # imported by the child: it needs torch
_SHARES = tuple(share / 100 for share in range(88, 111, 2))
"""Of the room: the memory is tried at each of these to find the least that a step runs in."""


def predictor(
    factory: str, arguments: Callable[[int], dict[str, Any]], gpu: Gpu | None, room: float
) -> Predict:
    """Predict steps by their rows, as exactly as can be for those that take about `room` bytes."""
    sizes = [int(room * share) for share in _SHARES]
    sm_count = (gpu and gpu.sm_count) or 1
    capability = gpu.compute_capability if gpu else "0.0"
    targets = tuple(
        Target(sm_count=sm_count, compute_capability=capability, capacity=size) for size in sizes
    )

    def predict(rows: int) -> Peak:
        asked = {"factory": factory, "arguments": arguments(rows)}
        task = TaskSpec(factory=_FACTORY, arguments=asked)
        return peak_of(told(ask([Request(task=task, targets=targets)])[0]).rooms, sizes)

    return predict


def peak_of(rooms: Sequence[Room], sizes: Sequence[int]) -> Peak:
    """What a step takes, from how it did in memories of these `sizes`, the smallest first."""
    free = rooms[0]  # its peaks are those of unlimited memory, as all are
    failed = [size for size, room in zip(sizes, rooms, strict=True) if not room.fits]
    most = free.peak_reserved
    if not failed:
        needed = min(most, sizes[0])
    else:
        above = min([size for size in sizes if size > failed[-1]] or [most])
        # What is needed lies between two of the sizes: in the middle of them, as far as is known.
        needed = min(most, (above + max(failed[-1], free.peak_allocated)) // 2)
    return Peak(
        allocated=free.peak_allocated, reserved=most, needed=max(free.peak_allocated, needed)
    )


def probe(factory: str, arguments: dict[str, Any]) -> tuple[Any, Callable[[Any], Any]]:
    """The model of `factory(**arguments)`, and what makes its step."""
    model, make_step = TaskSpec(factory=factory, arguments={}).function()(**arguments)

    def make(built: Any) -> Any:
        take_workspaces()
        return make_step(built)

    return model, make
