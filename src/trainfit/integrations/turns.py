"""Steps of a training with and without each change, in turns: what it gives, on the way.

All ways give the same numbers, so that the training is not disturbed. If a change makes steps
slower, as for a model that is too small to gain, the rest of the training goes without it.
Compiling takes time that a short training does not win back: it comes last, where enough is left.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from statistics import median, stdev
from typing import Any, NamedTuple
from weakref import WeakSet

from trainfit.hardware.host import allowed_by_affinity
from trainfit.integrations.body_state import BodyBlocks
from trainfit.integrations.host_batches import AROUND, Switch
from trainfit.integrations.unpadded_calls import Unpadding
from trainfit.planning.execution import family_compiling
from trainfit.runtime import start_compilers

PADDED, UNPADDED, GRAPHS, COMPILED = range(4)
"""Ways of a step, from the script's own to that with all changes."""
WARM_UP = 10
"""Optimizer steps before the first turn; twice as many with graphs, which are captured in them."""
_OWN = 2
"""First steps where there are graphs, by the script's own way: none is captured before it is known
how much memory that way needs, and the optimizer makes its state in the first one."""
_BLOCK = 3
"""Steps of a turn; the first is not counted, as its memory is of the other kind.

The others are timed together: a wait for the GPU after each would hide what runs beside it.
"""
_TURNS, _MOST_TURNS = 4, 12
"""Turns of each way, and the most where sizes are still captured in many of them."""
_APART = {2: 1.3, 3: 1.1}
"""Times that all turns of a way must be as slow as those of another for it to be left after that
many turns. Batches differ, and two turns that fell on long ones are not to decide."""
_FEWEST = 2
"""Timed turns that a way needs."""
_DRAWS = 200
_FIRST, _AGAIN = 1.4, 0.4
"""Time of compiling between a script's steps, over that of a run of trainfit's own, which starts
the compilers ahead: 7 s for BERT beside an H200, and 2 s another time, from torch's cache."""


class Gain(NamedTuple):
    """How many times as fast one way is as another, and the standard error of that."""

    times: float
    error: float
    steps: int


class Turns:
    """Switches changes on and off between optimizer steps, and times the steps."""

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        *,
        switch: Switch = AROUND,
        compilers: Callable[[], bool] = start_compilers,
    ) -> None:
        self._compilers = compilers
        """Starts torch's compiling processes, and tells if they are ready."""
        self.facts: WeakSet[Unpadding] = WeakSet()
        """Models of the script, which may free them."""
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
        self.steps: Counter[int] = Counter()
        """Optimizer steps that went each way."""
        self._ways: tuple[int, ...] = ()
        """Ways that are compared, without those that were clearly slower."""
        self._queue: list[int] = []
        """Ways of the next turns."""
        self._back = False
        self._had: Counter[int] = Counter()
        """Turns of each way in this comparison."""
        self._from: dict[int, int] = {}
        """Number of turns that were timed before this comparison, by their way."""
        self._worth = False
        """True once compiling was found to pay."""
        self._starting = 0.0
        """Seconds that the start of torch's compiling processes took."""
        self._begins = 0
        """Step after which the turns of these ways begin."""
        self._current = GRAPHS
        self.ended = False
        """True once nothing is left to be compared."""
        self._step = 0
        self._last = 0.0
        self._other = 0
        self._aside = 0.0
        self._least = inf
        """Fewest batches of evaluations in a turn: one with more of them is not timed."""
        self._handle: Any = None
        self.kinds: set[Any] = set()
        """Kinds of models whose steps these turns are."""

    def begin(
        self, facts: Sequence[Unpadding], left: Callable[[], int | None] = lambda: None
    ) -> None:
        """Follow the optimizer steps of this process, for these models."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.facts.update(facts)
        self.left = left
        self._aside = -inf  # the turn in which a training begins is not timed
        if self._step < _OWN and self._graphs():
            self._current = PADDED
        self._switch(self._current)  # as an earlier training of this process found it
        if self._handle is None and self.facts:
            self._handle = register_optimizer_step_post_hook(lambda *_: self.stepped())

    def pause(self) -> None:
        """Follow no optimizer steps until the next `begin`."""
        if not self.ended:
            self._switch(GRAPHS)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _graphs(self) -> list[Any]:
        return [one.graphs for one in self.facts if one.graphs is not None]

    def _blocks(self) -> list[BodyBlocks]:
        return [one.blocks for one in self._graphs() if one.blocks is not None]

    def stepped(self) -> None:
        """Note the end of an optimizer step, and choose the way of the next one."""
        self._step += 1
        self.steps[self._current] += 1
        if self._step == _OWN:
            self._switch(GRAPHS)
        if not self._ways and not self.ended:
            self._consider()
        if not self._ways or self._step < self._begins:
            return
        place = (self._step - self._begins) % _BLOCK
        if place == 1:
            self._last, self._other = self._clock(), self._untimed()
            self._aside = self._evaluated()
        elif place == 0:
            if self._step > self._begins:
                self._end_turn()
            if self._over():
                self._end()
            else:
                self._switch(self._next())

    def _untimed(self) -> int:
        """Count passes that are not the usual ones of graphs: a turn with one is not timed."""
        return sum(one.eager + one.captured for one in self._graphs())

    def _evaluated(self) -> int:
        return sum(one.tally.aside for one in self.facts)

    def _end_turn(self) -> None:
        """Note the time of a turn, and leave the ways that are clearly slower."""
        now, way = self._clock(), self._current
        self._had[way] += 1
        aside = self._evaluated() - self._aside
        if 0 <= aside < self._least:  # below 0 a model was freed
            self._least = aside
            for one in self._ways:  # turns before this one had an evaluation in them
                del self.seconds[one][self._from[one] :]
        if aside == self._least < inf and (way < GRAPHS or self._untimed() == self._other):
            self.seconds[way].append((now - self._last) / (_BLOCK - 1))
        self._ways = tuple(one for one in self._ways if not self._clearly_slower(one))
        self._queue = [one for one in self._queue if one in self._ways]

    def _clearly_slower(self, way: int) -> bool:
        own = self.seconds[way][self._from[way] :]
        for other in self._ways:
            faster = self.seconds[other][self._from[other] :]
            turns = min(len(own), len(faster))
            if turns >= _FEWEST and min(own) > _APART.get(turns, 1.0) * max(faster):
                return True
        return False

    def _over(self) -> bool:
        """Tell if one way is left, or all of them have had their turns."""
        if len(self._ways) == 1:
            return True
        timed = all(len(self.seconds[way]) - self._from[way] >= _FEWEST for way in self._ways)
        most = _TURNS if timed else _MOST_TURNS
        return not self._queue and all(self._had[way] >= most for way in self._ways)

    def _next(self) -> int:
        """Choose the next way: there and back again, so that none is always the later one."""
        if not self._queue:
            self._queue = list(self._ways[::-1] if self._back else self._ways)
            self._back = not self._back
        return self._queue.pop(0)

    def _consider(self) -> None:
        """Begin the first comparison, or that with compiled blocks where it pays."""
        if self.gain is None:
            ways = (GRAPHS, UNPADDED, PADDED) if self._graphs() else (UNPADDED, PADDED)
            self._compare(ways, WARM_UP * (len(ways) - 1))
        elif self.compiled is None and self._pays():
            self._compare((COMPILED, GRAPHS), self._step + 2 * WARM_UP)
            self._switch(COMPILED)

    def _compare(self, ways: tuple[int, ...], begins: int) -> None:
        """Compare ways from a step on; the first is expected to be the fastest."""
        self._ways, self._begins = ways, begins
        self._queue, self._back = [], False
        self._had.clear()
        self._from = {way: len(self.seconds[way]) for way in ways}

    def _pays(self) -> bool:
        """Tell if the rest of the training wins the time of compiling back, and it can begin.

        A training of unknown length is expected to last as long again as it has lasted so far.
        """
        if not self._blocks() or len(self.seconds[GRAPHS]) < _FEWEST:
            return False
        if not self._worth:
            steps, cores = self.left(), allowed_by_affinity()
            seconds = (self._step if steps is None else steps) * median(self.seconds[GRAPHS])
            found = [family_compiling(name, cores) for name in {one.family for one in self.facts}]
            saved = seconds * min(share for _, share in found)
            known = all((place := one.place) and place.exists() for one in self._blocks())
            self._worth = saved > (_AGAIN if known else _FIRST) * sum(cost for cost, _ in found)
            if not self._worth and steps is not None:
                self.uncompiled = f"the {seconds:.0f} s that were left are too short for it"
                self._leave()
        began = time.perf_counter()
        # Steps go on meanwhile: without those processes compiling takes half as long again.
        ready = self._worth and self._compilers()
        self._starting += time.perf_counter() - began
        return ready

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
        compiling, self._ways = COMPILED in self._from, ()
        way = self._best_compiled() if compiling else self._best()
        if min(len(self.seconds[PADDED]), len(self.seconds[way])) < _FEWEST:
            self._switch(way)  # something came between the steps of all turns
            self._leave()
            return
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
        self.ended = True
        if self._current < GRAPHS:
            for graphs in self._graphs():
                graphs.free()

    def saved(self) -> float | None:
        """Seconds that all steps would have taken more by the script's own way, if it was timed.

        The start of compilers is taken off. Steps of a way that was not timed count as those
        without padding.
        """
        if self.gain is None:
            return None
        each = {way: median(found) for way, found in self.seconds.items() if len(found) >= _FEWEST}
        own, plain = each[PADDED], each.get(UNPADDED, each[PADDED])
        gained = sum(count * (own - each.get(way, plain)) for way, count in self.steps.items())
        return gained - self._starting


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

    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if in_use and not torch.cuda.is_current_stream_capturing():  # a graph of the script's own
        torch.cuda.synchronize()
    return time.perf_counter()
