"""Search for the largest number of rows by prediction and three or four real steps; no torch here.

Two small probes correct the prediction by a line over the rows. The third probe runs at the
recommended size, or at half of it where probes and prediction disagree. Only steps that are
expected to fit are run, and no size is recommended that was not run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainfit.core.errors import RunFailed
from trainfit.core.plan_records import TaskSpec
from trainfit.core.records import Gpu
from trainfit.planning.estimator.estimate import Request, Room, Target, ask, told

_FINE = 64
"""Precision of the search: one part in 64 of the rows, or one row."""
_SECANTS = 5
"""Secant steps before the search falls back to bisection."""


def most_rows(
    slack: Callable[[int], float], at_least: int, at_most: int, known: Iterable[int] = ()
) -> int:
    """Largest number of rows with `slack` of 0 or more; `at_least` - 1 where none has.

    A call of `slack` takes a second, so `known` rows are used first, then secants, then bisection.
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
    """Rows at which a secant reaches a slack of 0."""
    low = fit[-1]
    if beyond is not None:
        left, lacks = slack(low), -slack(beyond)
        return low + int((beyond - low) * left / (left + lacks))
    if len(fit) == 1:
        return max(8, 2 * low)
    falls = (slack(fit[-2]) - slack(low)) / (low - fit[-2])
    return 2 * low if falls <= 0 else low + int(slack(low) / falls)


def law(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the line of least squares."""
    across = sum(x for x, _ in points) / len(points)
    up = sum(y for _, y in points) / len(points)
    spread = sum((x - across) ** 2 for x, _ in points)
    slope = sum((x - across) * (y - up) for x, y in points) / spread if spread else 0.0
    return up - slope * across, slope


GIB = 1 << 30
CONFIRMED = 0.9
"""Largest share of the largest size that a probe may run at."""
_TRUSTED = 0.1
"""Largest error of the prediction, as a share of the memory, at which it is trusted."""
_ALIKE = 0.05
"""Largest relative difference of two slopes that count as one line."""
_NEAR_BEST = 0.98
_CLEAR = 0.95
"""Share of the memory that the last probe may take, by the line through smaller ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Predicted memory of a step, in bytes."""

    allocated: float
    reserved: float
    """Reserved memory where nothing limits it."""
    needed: float
    """Least memory in which the step runs, with the allocator freeing its cache if needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measured memory and time of a real step, in bytes and seconds."""

    rows: int
    held: float
    """Memory before its first micro-batch: weights and optimizer state."""
    allocated: float
    reserved: float
    seconds: float
    """Seconds of a micro-batch, with its share of the update."""


Predict = Callable[[int], Peak]
Measure = Callable[[int], Measured | None]
"""Runs a real step of a number of rows; returns None where memory ran out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRange:
    """Range of rows to search."""

    at_least: int = 1
    at_most: int = 1 << 16
    share: float = CONFIRMED
    """Share of the largest size that is recommended, and confirmed by a probe."""

    def within(self, rows: float) -> int:
        """Nearest number of rows in the range."""
        return max(self.at_least, min(self.at_most, math.floor(rows)))

    def recommended(self, largest: int) -> int:
        """Rows to recommend where `largest` fit."""
        return self.within(largest * self.share)


@dataclass(slots=True)
class Search:
    """State of a search: predictions and probes so far."""

    room: Callable[[], float]
    """Returns the bytes that steps may take now."""
    asked: RowRange
    predict: Predict | None
    measure: Measure | None
    probes: list[Measured] = field(default_factory=list)
    known: dict[int, Peak] = field(default_factory=dict)
    ran_out: int | None = None
    """Rows at which memory ran out, if it did."""
    settled: bool = False
    """True once further predictions are interpolated between known ones."""

    @property
    def ran(self) -> int:
        """Most rows that were seen to run."""
        return max((probe.rows for probe in self.probes), default=0)

    def peak(self, rows: int) -> Peak:
        """Prediction for a number of rows; cached, since one takes a second or more."""
        if rows not in self.known:
            below = max((r for r in self.known if r < rows), default=None)
            above = min((r for r in self.known if r > rows), default=None)
            if self.settled and below is not None and above is not None:
                share = (rows - below) / (above - below)
                low, high = asdict(self.known[below]), asdict(self.known[above])
                return Peak(**{name: low[name] + share * (high[name] - low[name]) for name in low})
            assert self.predict is not None
            self.known[rows] = self.predict(rows)
        return self.known[rows]

    def off(self, rows: int) -> float:
        """Error of the prediction in bytes, by the line through the last two probes."""
        points = [(p.rows, p.allocated - self.peak(p.rows).allocated) for p in self.probes[-2:]]
        fixed, each = law(points) if points else (0.0, 0.0)
        return fixed + each * rows

    def pieces(self) -> float:
        """Fragmentation beyond the predicted one, in bytes, by the last probe."""
        if not self.probes:
            return 0.0
        last = self.probes[-1]
        predicted = self.peak(last.rows)
        beyond = last.reserved - last.allocated - (predicted.reserved - predicted.allocated)
        return min(max(0.0, beyond), last.reserved - last.allocated)

    def probe(self, rows: int) -> bool:
        """Run a real step; False where memory ran out or there is no GPU."""
        if self.measure is None:
            return False
        found = self.measure(rows)
        if found is None:
            self.ran_out = rows if self.ran_out is None else min(rows, self.ran_out)
            return False
        if self.predict is not None and rows not in self.known:  # fragmentation jumps between rows
            self.known[rows] = self.predict(rows)
        self.probes.append(found)
        return True


def search(found: Search) -> int:
    """Largest number of rows that fits; probes are added to `found`."""
    largest = _by_probes(found) if found.predict is None else _by_prediction(found)
    if largest >= found.asked.at_least and found.measure is not None:
        largest = _confirmed(found, largest)
    if largest < found.asked.at_least:
        raise _too_large(found)
    return largest


def _confirmed(found: Search, largest: int) -> int:
    """Run the recommended size where no larger one ran, and keep to what ran.

    With the cache given back more rows may fit, or not one more, if the prediction is off by a few
    bytes: there, the answer is at most a tenth above a size that ran.
    """
    asked, rows = found.asked, found.asked.recommended(largest)
    while rows > max(found.ran, asked.at_least - 1) and not found.probe(rows):
        rows = max(found.ran, rows // 2)
    if not found.probes:
        return 0
    if found.predict is None:
        largest = _by_line(found)
    else:
        kept = _largest(found, lambda peak: peak.reserved)
        largest = min(_largest(found), max(kept, found.ran + 1 + found.ran // 10))
    while asked.recommended(largest) > found.ran:
        largest -= 1
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
    if third > found.ran:
        found.probe(third)
    return _largest(found)


def _safe(found: Search, rows: int) -> int:
    """Limit `rows` to a number that fits even if the allocator never frees its cache.

    Where it must, a few bytes decide whether a step fits, which is too risky for a probe.
    """
    takes = found.peak(rows).reserved + found.off(rows)
    room = _CLEAR * (found.room() - found.pieces())
    return rows if takes <= room else max(1, int(rows * room / takes))


def small_sizes(largest: int, asked: RowRange) -> list[int]:
    """Two sizes far below the expected largest; one or none where there is no room."""
    low = max(asked.at_least, largest // 8)
    high = max(low + 1, largest // 4)
    return [rows for rows in (low, high) if 2 * rows <= largest]


def _largest(found: Search, takes: Callable[[Peak], float] = lambda peak: peak.needed) -> int:
    """Largest number of rows whose corrected prediction fits."""
    room = found.room() - found.pieces()

    def slack(rows: int) -> float:
        return room - found.off(rows) - takes(found.peak(rows))

    top = found.asked.at_most if found.ran_out is None else found.ran_out - 1
    return most_rows(slack, found.asked.at_least, top, sorted(found.known))


def _by_probes(found: Search) -> int:
    """Search without a prediction: small probes, each chosen by the one before."""
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
    """Lower bound of the rows that fit, from the reserved memory of the probes.

    All that the last probe reserved beyond weights and state is taken to grow with the rows, which
    overestimates. Where the last three probes lie on a line, that line is used instead.
    """
    probes, last = found.probes, found.probes[-1]
    fixed = probes[0].held  # of the fewest rows, since the batch itself is included
    each = (last.reserved - fixed) / last.rows
    if len(probes) >= 3:
        pairs = list(itertools.pairwise(probes[-3:]))
        lines = [law([(p.rows, p.reserved) for p in pair]) for pair in pairs]
        grows = [law([(p.rows, p.allocated) for p in pair]) for pair in pairs]
        # What few rows take may be the update's alone, whatever the allocator's pieces look like.
        if all(abs(a[1] - b[1]) <= _ALIKE * b[1] for a, b in (lines, grows)):
            fixed, each = lines[1]
    top = found.asked.at_most if found.ran_out is None else found.ran_out - 1
    return min(top, max(last.rows, int((found.room() - fixed) / each))) if each > 0 else top


def knee(probes: Sequence[Measured], at_least: int, recommended: int) -> int | None:
    """Fewest rows with a throughput within 2% of the `recommended` rows'.

    A micro-batch takes a + b · rows seconds; None with fewer than two probes.
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
    told = "more"
    if found.ran_out is None and least in found.known:
        told = f"{(found.known[least].needed + found.off(least)) / GIB:.2f} GiB"
    return RunFailed(
        f"a micro-batch of {rows} does not fit: it takes {told} and {room / GIB:.2f} GiB are free",
        "use gradient checkpointing, a shorter max_length or a smaller model, or free the device",
    )


_FACTORY = "trainfit.tuning.growth:probe"
_SHARES = tuple(share / 100 for share in range(88, 111, 2))
"""Shares of the available memory at which the least sufficient memory is searched."""


def predictor(
    factory: str, arguments: Callable[[int], dict[str, Any]], gpu: Gpu | None, room: float
) -> Predict:
    """Make a function that predicts steps, most exactly for those that take about `room` bytes."""
    sizes = [int(room * share) for share in _SHARES]
    sm_count = (gpu and gpu.sm_count) or 1
    capability = gpu.compute_capability if gpu else "0.0"
    targets = tuple(
        Target(sm_count=sm_count, compute_capability=capability, capacity=size) for size in sizes
    )

    def predict(rows: int) -> Peak:
        asked = {"factory": factory, "arguments": arguments(rows)}
        task = TaskSpec(factory=_FACTORY, arguments=asked)
        return predicted_peak(told(ask([Request(task=task, targets=targets)])[0]).rooms, sizes)

    return predict


def predicted_peak(rooms: Sequence[Room], sizes: Sequence[int]) -> Peak:
    """Peak of a step from estimates in memories of these `sizes`, smallest first."""
    free = rooms[0]  # every estimate has the peaks of unlimited memory
    failed = [size for size, room in zip(sizes, rooms, strict=True) if not room.fits]
    most = free.peak_reserved
    if not failed:
        needed = min(most, sizes[0])
    else:
        above = min([size for size in sizes if size > failed[-1]] or [most])
        # The memory needed lies between two of the sizes; the middle is the best guess.
        needed = min(most, (above + max(failed[-1], free.peak_allocated)) // 2)
    return Peak(
        allocated=free.peak_allocated, reserved=most, needed=max(free.peak_allocated, needed)
    )


def probe(factory: str, arguments: dict[str, Any]) -> tuple[Any, Callable[[Any], Any]]:
    """Model of `factory(**arguments)`, and the function that builds its step; for the child."""
    from trainfit.engine.optimizer import take_workspaces
    from trainfit.planning.estimator.child import checked_pair

    built = TaskSpec(factory=factory, arguments={}).function()(**arguments)
    model, make_step = checked_pair(built, factory)

    def make(built: Any) -> Any:
        take_workspaces()
        return make_step(built)

    return model, make
