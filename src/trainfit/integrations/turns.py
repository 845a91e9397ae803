"""Steps of a training with and without padding, in turns: how much faster it is, on the way.

Both ways give the same numbers, so that the training is not disturbed. If padding is the faster
way, as for a model that is too small to gain, the rest of the training has it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median, stdev
from typing import Any, NamedTuple

from trainfit.integrations.unpadded_calls import Unpadding

WARM_UP = 10
"""Optimizer steps before the first turn."""
_BLOCK = 5
"""Steps of a turn; the first is not counted, as its memory is of the other kind."""
_TURNS = 8
_DRAWS = 200


class Gain(NamedTuple):
    """How many times as fast steps without padding are, and the standard error of that."""

    times: float
    error: float
    steps: int


class Turns:
    """Switches padding on and off between optimizer steps, and times them."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.facts: list[Unpadding] = []
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        """Seconds of steps with padding (True) and without."""
        self.gain: Gain | None = None
        self._clock = clock or _synchronised
        self._step = 0
        self._last = 0.0
        self._handle: Any = None

    def begin(self, facts: Sequence[Unpadding]) -> None:
        """Follow the optimizer steps of this process, for these models."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.facts += facts
        if self._handle is None and self.facts:
            self._handle = register_optimizer_step_post_hook(lambda *_: self.stepped())

    def stepped(self) -> None:
        """Note the end of an optimizer step, and choose the way of the next one."""
        self._step += 1
        done = self._step - WARM_UP
        if done < 0 or self.gain is not None:
            return
        now = self._clock()
        turn, place = divmod(done - 1, _BLOCK)
        if done > 0 and place > 0:
            self.seconds[_pads(turn)].append(now - self._last)
        if done == _TURNS * _BLOCK:
            self._end()
            return
        self._switch(_pads(done // _BLOCK))
        self._last = now

    def _switch(self, pads: bool) -> None:
        for one in self.facts:
            one.off = pads

    def _end(self) -> None:
        self.gain = gain_of(self.seconds[True], self.seconds[False])
        self._switch(self.gain.times + self.gain.error < 1)
        if self._handle is not None:
            self._handle.remove()


def _pads(turn: int) -> bool:
    """Tell if a turn has padding: every other one, the first of each two by turns."""
    return turn % 4 in (0, 3)


def gain_of(padded: Sequence[float], unpadded: Sequence[float]) -> Gain:
    """Compare the medians of both; the error is a bootstrap's."""
    draw = random.Random(0)

    def again(seconds: Sequence[float]) -> float:
        return median(draw.choices(seconds, k=len(seconds)))

    drawn = [again(padded) / again(unpadded) for _ in range(_DRAWS)]
    times = median(padded) / median(unpadded)
    return Gain(times, stdev(drawn), len(padded) + len(unpadded))


def _synchronised() -> float:
    """Read the clock once the GPU, if there is one in use, has done its work."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
