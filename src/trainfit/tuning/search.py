"""Search for the fastest candidate within a time budget.

Rung 0 times the most promising candidates for a few steps. Those that could still be the best are
timed again, longer and in turns, so that a GPU that warms up slows all alike; each rung keeps half.
Then the winner's neighbours, which differ in one setting each, are tried while time is left. The
search ends early when nothing is left to try and the best is clearly ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trainfit.core.records import Scalar
from trainfit.measuring.timing import median_interval
from trainfit.tuning.children import RunTrial, mode_of
from trainfit.tuning.tuned_cache import Interval, Trial, TrialCandidate

WARM_UP = 4
"""Untimed steps before a trial's timed ones; CUDA graphs are recorded in the third."""
RUNGS = ((20, 2.0), (40, 4.0), (60, 6.0))
"""Per rung: timed steps, and the seconds after which three timed steps are enough."""
TIE = 0.01
"""Relative difference that counts as a tie; then the candidate with fewer changes wins."""
_LEAST_LIMIT = 20.0
_SHARE = 0.5
"""Largest share of the time budget that one trial may take."""
_CLEARLY = 0.97
"""A candidate below this share of another's rate, intervals apart, is dropped."""
_ROUNDS = 3
"""Rounds in which candidates with overlapping intervals are timed again."""

Ended = Literal["finished", "time is up", "interrupted"]
Neighbours = Callable[[TrialCandidate], Iterable[TrialCandidate | Trial]]
"""Candidates that differ in one setting; a Trial stands for one that was skipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A candidate with all its measurements."""

    candidate: TrialCandidate
    rates: tuple[float, ...]
    """Samples per second of every timed step."""
    rate: Interval
    """Median over all its trials, with a 95% interval."""
    rung: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Result of a search."""

    tried: tuple[Tried, ...]
    """Measured candidates, the best first."""
    trials: tuple[Trial, ...]
    ended: Ended


@dataclass
class _Board:
    """State of a running search."""

    run: RunTrial
    seconds: float
    tell: Callable[[Trial], None]
    clock: Callable[[], float]
    tried: dict[str, Tried] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    trials: list[Trial] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)
    """Seconds of a trial: the last of each candidate, and the longest of each compile mode."""
    out_of_time: bool = False
    """True once a trial was left out for lack of time."""

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left(self) -> float:
        return self.began + self.seconds - self.clock()

    def note(self, trial: Trial) -> None:
        """Record a trial and report it."""
        self.trials.append(trial)
        self.tell(trial)

    def attempt(self, candidate: TrialCandidate, rung: int, reserve: float = 0.0) -> None:
        """Run a candidate, unless trials like it took longer than the time that is left."""
        key, mode = _key(candidate.settings), mode_of(candidate.plan)
        left = self.left - reserve
        # A compile mode that was not tried yet takes at least as long as the default one.
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
            self.tried.pop(key, None)  # a candidate that fails even once cannot win
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
        """Candidates that could still be the best, best first; at least two where there are."""
        ranked = self.ranking()
        close = [tried for tried in ranked if tried.rate.high >= ranked[0].rate.low]
        return close if len(close) > 1 else ranked[:2]

    def lost(self, candidate: TrialCandidate) -> bool:
        """Tell if one of its changes failed or was clearly slower with fewer other changes."""
        return any(
            self._is_worse({**other.candidate.settings, name: value}, other)
            for name, value in candidate.settings.items()
            for other in self.tried.values()
            if name not in other.candidate.settings
            and other.candidate.settings.items() <= candidate.settings.items()
        )

    def _is_worse(self, settings: dict[str, Scalar], than: Tried) -> bool:
        key = _key(settings)
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
    """Find the fastest candidate; the first of `first` is the planner's own plan.

    Ctrl-C ends the search with the measurements so far.
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
    """Try a candidate that was not tried before, or record once why it is skipped."""
    key = _key(each.settings)
    if key in board.known:
        return
    if isinstance(each, Trial):
        board.known.add(key)
        board.note(each)
    elif not board.lost(each):
        board.attempt(each, 0, reserve)


def _halve(board: _Board) -> None:
    """Time the better half of the rivals again, longer, rung by rung.

    At least two are timed again, and the planner's own plan, so that a moment in which the machine
    was busy does not decide.
    """
    planned = board.tried.get(_key({}))
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
    """Try the winner's neighbours until the winner stays the same.

    Enough time to confirm a new winner against the planner's own plan is reserved.
    """
    while board.tried and board.left > 0:
        winner = board.ranking()[0]
        held = 2 * board.costs[_key(winner.candidate.settings)]
        for each in neighbours(winner.candidate):
            _try(board, each, held)
            best = board.ranking()[0]
            if best is not winner and best.rate.low > winner.rate.high:
                break  # clearly better: go on from there
        if _key(board.ranking()[0].candidate.settings) == _key(winner.candidate.settings):
            return


def _confirm(board: _Board) -> None:
    """Time ties again in turns, and a new winner beside the planner's own plan."""
    planned = _key({})
    for _ in range(_ROUNDS):
        ranked = board.ranking()
        if not ranked:
            return
        close = [tried for tried in ranked if tried.rate.high >= ranked[0].rate.low]
        again = [_key(tried.candidate.settings) for tried in close[:3]]
        if ranked[0].rung == 0 and planned in board.tried and planned not in again:
            again.append(planned)
        if len(again) < 2 or _alike([board.tried[key] for key in again]):
            return
        for key in again:
            if key in board.tried:
                board.attempt(board.tried[key].candidate, len(RUNGS) - 1)


def _alike(rivals: Sequence[Tried]) -> bool:
    """Tell if all intervals together are narrower than a tie."""
    best = rivals[0].rate
    spread = max(t.rate.high for t in rivals) - min(t.rate.low for t in rivals)
    return spread <= TIE * best.value


def _chosen_first(board: _Board) -> list[Tried]:
    """Sort by rate; among ties with the best, the one with the fewest changes comes first."""
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


def _key(settings: Mapping[str, Scalar]) -> str:
    return repr(sorted(settings.items()))
