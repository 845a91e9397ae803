"""Steps of a training with and without each change, in turns: what it gives, on the way.

All ways give the same numbers, so that the training is not disturbed. If a change makes steps
slower, as for a model that is too small to gain, the rest of the training goes without it.
Compiling takes time that a short training does not win back: it comes last, where enough is left.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median, stdev
from typing import Any, NamedTuple

from trainfit.integrations.body_blocks import BodyBlocks
from trainfit.integrations.speedups import AROUND, Switch
from trainfit.integrations.unpadded_calls import Unpadding

PADDED, UNPADDED, GRAPHS, COMPILED = range(4)
"""Ways of a step, from the script's own to that with all changes."""
WARM_UP = 10
"""Optimizer steps before the first turn; twice as many with graphs, which are captured in them."""
_BLOCK = 5
"""Steps of a turn; the first is not counted, as its memory is of the other kind.

The others are timed together: a wait for the GPU after each would hide what runs beside it.
"""
_TURNS, _MOST_TURNS = 4, 12
"""Turns of each way, and the most where sizes are still captured in many of them."""
_FEWEST = 2
"""Timed turns that a way needs."""
_DRAWS = 200
_COMPILING = 20.0
"""Seconds that compiling and capturing again may take."""
_SAVED = 0.15
"""Share of a step that compiling is expected to save."""


class Gain(NamedTuple):
    """How many times as fast one way is as another, and the standard error of that."""

    times: float
    error: float
    steps: int


class Turns:
    """Switches changes on and off between optimizer steps, and times the steps."""

    def __init__(
        self, clock: Callable[[], float] | None = None, *, switch: Switch = AROUND
    ) -> None:
        self.facts: list[Unpadding] = []
        self.seconds: dict[int, list[float]] = {way: [] for way in range(4)}
        """Seconds of a step in each turn, by their way."""
        self.gain: Gain | None = None
        """Gain of all changes over the script's own steps."""
        self.alone: Gain | None = None
        """Gain of unpadding without graphs, where there are graphs."""
        self.added: Gain | None = None
        """Gain of graphs over unpadding."""
        self.compiled: Gain | None = None
        """Gain of compiled blocks over graphs alone."""
        self.uncompiled = "the training was too short for it"
        """Reason why blocks were not compiled, where they could be."""
        self.left: Callable[[], int | None] = lambda: None
        """Optimizer steps that the training has still to go, where that is known."""
        self._clock = clock or _synchronised
        self._switched = switch
        self._ways: tuple[int, ...] = ()
        self._begins = 0
        """Step after which the turns of these ways begin."""
        self._current = GRAPHS
        self._ended = False
        self._step = 0
        self._last = 0.0
        self._other = 0
        self._handle: Any = None

    def begin(
        self, facts: Sequence[Unpadding], left: Callable[[], int | None] = lambda: None
    ) -> None:
        """Follow the optimizer steps of this process, for these models."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.facts += facts
        self.left = left
        self._switch(self._current)  # as an earlier training of this process found it
        if self._handle is None and self.facts:
            self._handle = register_optimizer_step_post_hook(lambda *_: self.stepped())

    def _graphs(self) -> list[Any]:
        return [one.graphs for one in self.facts if one.graphs is not None]

    def _blocks(self) -> list[BodyBlocks]:
        return [one.blocks for one in self._graphs() if one.blocks is not None]

    def stepped(self) -> None:
        """Note the end of an optimizer step, and choose the way of the next one."""
        self._step += 1
        if not self._ways and not self._ended:
            self._consider()
        if not self._ways or (done := self._step - self._begins) < 0:
            return
        turn, place = divmod(done - 1, _BLOCK)
        other = sum(one.eager + one.captured for one in self._graphs())
        if place == 0:
            self._last, self._other = self._clock(), other
        elif done > 0 and place == _BLOCK - 1:
            now, way = self._clock(), self._way(turn)
            if way < GRAPHS or other == self._other:
                self.seconds[way].append((now - self._last) / place)
        if done % _BLOCK == 0 and done > 0 and self._enough(done // _BLOCK):
            self._end()
        elif done % _BLOCK == 0:
            self._switch(self._way(done // _BLOCK))

    def _enough(self, turns: int) -> bool:
        """Tell if all ways have had their turns, and enough of them could be timed."""
        each, rest = divmod(turns, len(self._ways))
        timed = all(len(self.seconds[way]) >= _FEWEST for way in self._ways)
        return rest == 0 and each >= (_TURNS if timed else _MOST_TURNS)

    def _consider(self) -> None:
        """Begin the first comparison, or that with compiled blocks where it pays."""
        if self.gain is None:
            self._ways = (PADDED, UNPADDED, GRAPHS) if self._graphs() else (PADDED, UNPADDED)
            self._begins = WARM_UP * (len(self._ways) - 1)
        elif self.compiled is None and self._pays():
            self._ways, self._begins = (GRAPHS, COMPILED), self._step + 2 * WARM_UP
            self._switch(COMPILED)

    def _pays(self) -> bool:
        """Tell if the rest of the training wins the time of compiling back.

        A training of unknown length is expected to last as long again as it has lasted so far.
        """
        if not self._blocks() or len(self.seconds[GRAPHS]) < _FEWEST:
            return False
        steps = self.left()
        seconds = (self._step if steps is None else steps) * median(self.seconds[GRAPHS])
        if seconds * _SAVED > _COMPILING:
            return True
        if steps is not None:
            self.uncompiled = f"the {seconds:.0f} s that were left are too short for it"
            self._leave()
        return False

    def _way(self, turn: int) -> int:
        """Way of a turn: there and back again, so that none is always the later one."""
        count = len(self._ways)
        place = turn % (2 * count)
        return self._ways[min(place, 2 * count - 1 - place)]

    def _switch(self, way: int) -> None:
        self._current = way
        self._switched.off = way == PADDED
        for one in self.facts:
            one.off = way == PADDED
        for graphs in self._graphs():
            graphs.off = way < GRAPHS
        for blocks in self._blocks():
            blocks.off = way != COMPILED

    def _end(self) -> None:
        """Compare the ways, and leave the fastest on."""
        compiling, self._ways = COMPILED in self._ways, ()
        way = self._best_compiled() if compiling else self._best()
        self.gain = gain_of(self.seconds[PADDED], self.seconds[way])
        slower = self.gain.times < 1
        self._switch(PADDED if slower else way)
        if compiling or slower or way != GRAPHS or not self._blocks():
            self._leave()

    def _best(self) -> int:
        if len(self.seconds[GRAPHS]) < _FEWEST:
            return UNPADDED
        self.alone = gain_of(self.seconds[PADDED], self.seconds[UNPADDED])
        self.added = gain_of(self.seconds[UNPADDED], self.seconds[GRAPHS])
        return UNPADDED if self.added.times < 1 else GRAPHS

    def _best_compiled(self) -> int:
        enough = all(len(self.seconds[way]) >= _FEWEST for way in (GRAPHS, COMPILED))
        whys = [one.obstacle for one in self._blocks() if one.obstacle is not None]
        if whys or not enough:
            self.uncompiled = whys[0] if whys else "new sizes came too often to time it"
            return GRAPHS
        self.compiled = gain_of(self.seconds[GRAPHS], self.seconds[COMPILED])
        way = GRAPHS if self.compiled.times < 1 else COMPILED
        for graphs in self._graphs():
            graphs.keep(compiled=way == COMPILED)
        return way

    def _leave(self) -> None:
        self._ended = True
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
