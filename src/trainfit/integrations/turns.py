"""Steps of a training with and without each change, in turns: what it gives, on the way.

All ways give the same numbers, so that the training is not disturbed. If a change makes steps
slower, as for a model that is too small to gain, the rest of the training goes without it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median, stdev
from typing import Any, NamedTuple

from trainfit.integrations.batches_ahead import ahead_switch
from trainfit.integrations.speedups import NOWAIT
from trainfit.integrations.unpadded_calls import Unpadding

PADDED, UNPADDED, GRAPHS = range(3)
"""Ways of a step, from the script's own to that with all changes."""
WARM_UP = 10
"""Optimizer steps before the first turn; twice as many with graphs, which are captured in them."""
_BLOCK = 5
"""Steps of a turn; the first is not counted, as its memory is of the other kind.

The others are timed together: a wait for the GPU after each would hide what runs beside it.
"""
_TURNS = 4
"""Turns of each way."""
_FEWEST = 2
"""Timed turns that a way needs."""
_DRAWS = 200


class Gain(NamedTuple):
    """How many times as fast one way is as another, and the standard error of that."""

    times: float
    error: float
    steps: int


class Turns:
    """Switches changes on and off between optimizer steps, and times the steps."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.facts: list[Unpadding] = []
        self.seconds: dict[int, list[float]] = {way: [] for way in (PADDED, UNPADDED, GRAPHS)}
        """Seconds of a step in each turn, by their way."""
        self.gain: Gain | None = None
        """Gain of all changes over the script's own steps."""
        self.alone: Gain | None = None
        """Gain of unpadding without graphs, where there are graphs."""
        self.added: Gain | None = None
        """Gain of graphs over unpadding."""
        self._clock = clock or _synchronised
        self._step = 0
        self._last = 0.0
        self._other = 0
        self._handle: Any = None

    def begin(self, facts: Sequence[Unpadding]) -> None:
        """Follow the optimizer steps of this process, for these models."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.facts += facts
        if self._handle is None and self.facts:
            self._handle = register_optimizer_step_post_hook(lambda *_: self.stepped())

    @property
    def _ways(self) -> int:
        return 3 if any(one.graphs is not None for one in self.facts) else 2

    def stepped(self) -> None:
        """Note the end of an optimizer step, and choose the way of the next one."""
        self._step += 1
        done = self._step - WARM_UP * (self._ways - 1)
        if done < 0 or self.gain is not None:
            return
        turn, place = divmod(done - 1, _BLOCK)
        graphs = [one.graphs for one in self.facts if one.graphs is not None]
        other = sum(one.eager + one.captured for one in graphs)
        if place == 0:
            self._last, self._other = self._clock(), other
        elif done > 0 and place == _BLOCK - 1:
            now, way = self._clock(), self._way(turn)
            if way != GRAPHS or other == self._other:
                self.seconds[way].append((now - self._last) / place)
        if done == self._ways * _TURNS * _BLOCK:
            self._end()
        elif done % _BLOCK == 0:
            self._switch(self._way(done // _BLOCK))

    def _way(self, turn: int) -> int:
        """Way of a turn: there and back again, so that none is always the later one."""
        place = turn % (2 * self._ways)
        return min(place, 2 * self._ways - 1 - place)

    def _switch(self, way: int) -> None:
        NOWAIT.off = way == PADDED
        if (ahead := ahead_switch()) is not None:
            ahead.off = way == PADDED
        for one in self.facts:
            one.off = way == PADDED
            if one.graphs is not None:
                one.graphs.off = way != GRAPHS

    def _end(self) -> None:
        """Compare the ways, and leave the fastest on."""
        way = UNPADDED
        if len(self.seconds[GRAPHS]) >= _FEWEST:
            self.alone = gain_of(self.seconds[PADDED], self.seconds[UNPADDED])
            self.added = gain_of(self.seconds[UNPADDED], self.seconds[GRAPHS])
            way = UNPADDED if self.added.times < 1 else GRAPHS
        self.gain = gain_of(self.seconds[PADDED], self.seconds[way])
        self._switch(PADDED if self.gain.times + self.gain.error < 1 else way)
        if self._handle is not None:
            self._handle.remove()


def gain_of(before: Sequence[float], after: Sequence[float]) -> Gain:
    """Compare the medians of both; the error is a bootstrap's."""
    draw = random.Random(0)

    def again(seconds: Sequence[float]) -> float:
        return median(draw.choices(seconds, k=len(seconds)))

    drawn = [again(before) / again(after) for _ in range(_DRAWS)]
    times = median(before) / median(after)
    return Gain(times, stdev(drawn), (len(before) + len(after)) * (_BLOCK - 1))


def _synchronised() -> float:
    """Read the clock once the GPU, if there is one in use, has done its work."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
