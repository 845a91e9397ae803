"""The search: ask for candidates, run them, tell what came of it, within a time that is kept.

Rung 0 tries the most promising for a few steps. Those that could still be the best are tried again,
longer, in turns, so that a GPU that grows warm slows them all alike; each rung keeps half. Then the
winner's neighbours are tried, one setting away each, for as long as there is time. It ends early
when nothing is left to try and the best stands clear of the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trainfit.core.records import Scalar
from trainfit.measuring.timing import median_interval
from trainfit.tuning.children import RunTrial, mode_of
from trainfit.tuning.tuned_cache import Interval, Trial, TrialCandidate

WARM_UP = 4
"""Steps before the clock: CUDA graphs are recorded in the third."""
RUNGS = ((20, 2.0), (40, 4.0), (60, 6.0))
"""Of each rung: timed steps, and seconds after which three of them are enough."""
TIE = 0.01
"""A difference below this, within the intervals, is none: the fewer changes win."""
_LEAST_LIMIT = 20.0
_SHARE = 0.5
"""Of the whole time, that one trial may take at most."""
_CLEARLY = 0.97
"""Slower than this share of another's rate, intervals apart, is slower for good."""
_ROUNDS = 3
"""In which those that cannot be told apart are tried again."""

Ended = Literal["finished", "time is up", "interrupted"]
Neighbours = Callable[[TrialCandidate], Iterable[TrialCandidate | Trial]]
"""What is one setting away; a Trial is one that was skipped, with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A candidate with all that was measured of it."""

    candidate: TrialCandidate
    rates: tuple[float, ...]
    """Samples per second of every timed step."""
    rate: Interval
    """The median over all its trials."""
    rung: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the search came to."""

    tried: tuple[Tried, ...]
    """Those that could be measured, the best first."""
    trials: tuple[Trial, ...]
    ended: Ended


@dataclass
class _Board:
    """Everything that is known so far."""

    run: RunTrial
    seconds: float
    tell: Callable[[Trial], None]
    clock: Callable[[], float]
    tried: dict[str, Tried] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    trials: list[Trial] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)
    """Seconds of a trial: the last of each candidate, and the longest of each way of compiling."""
    out_of_time: bool = False
    """Something was not begun for want of time."""

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left(self) -> float:
        return self.began + self.seconds - self.clock()

    def note(self, trial: Trial) -> None:
        """Keep a record."""
        self.trials.append(trial)
        self.tell(trial)

    def attempt(self, candidate: TrialCandidate, rung: int, reserve: float = 0.0) -> None:
        """Run a candidate, unless it would overrun by what others like it took."""
        key, mode = _key(candidate), mode_of(candidate.plan)
        left = self.left - reserve
        # A new way of compiling takes as long as the usual one at the least.
        usual = self.costs.get("default", 0.0) if candidate.plan.compile else 0.0
        if left <= 0 or self.costs.get(key, self.costs.get(mode, usual)) > left:
            self.out_of_time = True
            return
        self.known.add(key)
        steps, most = RUNGS[rung]
        limit = min(left, max(_LEAST_LIMIT, self.seconds * _SHARE))
        started = self.clock()
        trial = self.run(candidate, steps=steps, warm_up=WARM_UP, limit=limit, most_seconds=most)
        self.note(replace(trial, rung=rung))
        if trial.status != "ok":
            self.tried.pop(key, None)  # what fails once in a while is no choice
            self.failed.add(key)
            return
        self.costs[key] = self.clock() - started
        self.costs[mode] = max(self.costs[key], self.costs.get(mode, 0.0))
        before = self.tried.get(key)
        rates = tuple(
            samples / max(seconds, 1e-9)
            for samples, seconds in zip(trial.step_samples, trial.step_seconds, strict=True)
        )
        earlier = () if before is None else before.rates
        rates = (*earlier, *rates)
        rate = median_interval(rates)
        self.tried[key] = Tried(candidate=candidate, rates=rates, rate=rate, rung=rung)

    def ranking(self) -> list[Tried]:
        return sorted(self.tried.values(), key=lambda tried: -tried.rate.value)

    def rivals(self) -> list[Tried]:
        """Those that could still be the best, the best first; two at the least, if there are."""
        ranked = self.ranking()
        close = [tried for tried in ranked if tried.rate.high >= ranked[0].rate.low]
        return close if len(close) > 1 else ranked[:2]

    def lost(self, candidate: TrialCandidate) -> bool:
        """Whether one of its changes failed, or was clearly slower, beside fewer other changes."""
        return any(
            self._is_worse({**other.candidate.settings, name: value}, other)
            for name, value in candidate.settings.items()
            for other in self.tried.values()
            if name not in other.candidate.settings
            and other.candidate.settings.items() <= candidate.settings.items()
        )

    def _is_worse(self, settings: dict[str, Scalar], than: Tried) -> bool:
        key = _settings_key(settings)
        found = self.tried.get(key)
        slower = found is not None and found.rate.high < _CLEARLY * than.rate.low
        return slower or key in self.failed


def search(
    first: Sequence[TrialCandidate | Trial],
    neighbours: Neighbours,
    run: RunTrial,
    *,
    seconds: float,
    tell: Callable[[Trial], None] = lambda _trial: None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Find the fastest; the first of `first` is the planner's own, which is always tried.

    Ctrl-C ends it with what was measured so far.
    """
    board = _Board(run=run, seconds=seconds, tell=tell, clock=clock)
    ended: Ended = "finished"
    try:
        for each in first:
            _try(board, each)
        _halve(board)
        _refine(board, neighbours)
        _confirm(board)
    except KeyboardInterrupt:
        ended = "interrupted"
    else:
        ended = "time is up" if board.out_of_time or board.left <= 0 else "finished"
    return Found(tried=tuple(_chosen_first(board)), trials=tuple(board.trials), ended=ended)


def _try(board: _Board, each: TrialCandidate | Trial, reserve: float = 0.0) -> None:
    """Try what is new; why another is not tried is noted once."""
    key = _settings_key(each.settings)
    if key in board.known:
        return
    if isinstance(each, Trial):
        board.known.add(key)
        board.note(each)
    elif not board.lost(each):
        board.attempt(each, 0, reserve)


def _halve(board: _Board) -> None:
    """Each rung keeps the better half of what could be the best, and looks longer.

    Two are looked at again in any case, and the planner's own, which all are measured by: a machine
    that was busy for a moment is found out.
    """
    planned = board.tried.get(_settings_key({}))
    for rung in range(1, len(RUNGS)):
        rivals = board.rivals() if board.tried else []
        keep = rivals[: max(2, len(board.tried) // 2**rung)]
        if rung == 1 and planned is not None and planned not in keep:
            keep.append(planned)
        if len(keep) < 2 or (rung > 1 and _alike(keep)):
            return
        for tried in keep:
            board.attempt(tried.candidate, rung)


def _refine(board: _Board, neighbours: Neighbours) -> None:
    """Try what is one setting away from the winner, until the winner stays.

    What it takes to confirm a new winner against the planner's own is held back.
    """
    while board.tried and board.left > 0:
        winner = board.ranking()[0]
        held = 2 * board.costs[_key(winner.candidate)]
        for each in neighbours(winner.candidate):
            _try(board, each, held)
            best = board.ranking()[0]
            if best is not winner and best.rate.low > winner.rate.high:
                break  # clearly better: go on from there
        if _key(board.ranking()[0].candidate) == _key(winner.candidate):
            return


def _confirm(board: _Board) -> None:
    """Try those that cannot be told apart again, in turns, and a new winner beside the planned."""
    planned = _settings_key({})
    for _ in range(_ROUNDS):
        ranked = board.ranking()
        if not ranked:
            return
        close = [_key(tried.candidate) for tried in ranked if tried.rate.high >= ranked[0].rate.low]
        again = close[:3]
        if ranked[0].rung == 0 and planned in board.tried and planned not in again:
            again.append(planned)
        if len(again) < 2 or _alike([board.tried[key] for key in again]):
            return
        for key in again:
            if key in board.tried:
                board.attempt(board.tried[key].candidate, len(RUNGS) - 1)


def _alike(rivals: Sequence[Tried]) -> bool:
    """Whether all are so close, and so well known, that it does not matter which is taken."""
    best = rivals[0].rate
    spread = max(t.rate.high for t in rivals) - min(t.rate.low for t in rivals)
    return spread <= TIE * best.value


def _chosen_first(board: _Board) -> list[Tried]:
    """By rate; but among those as fast as the best, the one with the fewest changes."""
    ranked = board.ranking()
    if not ranked:
        return []
    best = ranked[0].rate
    tied = [
        tried
        for tried in ranked
        if tried.rate.high >= best.low and tried.rate.value >= best.value * (1 - TIE)
    ]
    chosen = min(tied, key=lambda tried: len(tried.candidate.settings))
    return [chosen, *(tried for tried in ranked if tried is not chosen)]


def _key(candidate: TrialCandidate) -> str:
    return _settings_key(candidate.settings)


def _settings_key(settings: object) -> str:
    assert isinstance(settings, dict)
    return repr(sorted(settings.items()))
