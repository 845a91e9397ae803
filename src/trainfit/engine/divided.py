"""Evaluation divided over ranks by whole batches, so that its figures are those of one rank.

A task that divides its evaluation computes `own_batches` and puts the results of all ranks together
by `collect`, where ranks vote first: if memory ran out on one of them, it runs out on all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from trainfit.engine.distributed import Verdict, World, gather_rows, vote
from trainfit.engine.memory_errors import is_out_of_memory
from trainfit.packing.steps import divide_up


@dataclass(slots=True)
class _Share:
    """Part of this rank in the evaluation under way."""

    world: World
    sharded: bool
    waited_for: bool = False
    """Other ranks wait for the results of this one, or will."""

    def divides(self, count: int) -> bool:
        return count >= self.world.size > 1


_ALONE = _Share(World(), False)
_NOW: ContextVar[_Share] = ContextVar("evaluation")
"""Of this thread: another may judge a model beside the evaluation."""


@contextmanager
def divided(world: World, *, sharded: bool) -> Iterator[None]:
    """Divide the evaluations of a block; on an error, tell the ranks that wait for this one."""
    share = _Share(world, sharded)
    token = _NOW.set(share)
    try:
        yield
    except Exception as error:
        if share.waited_for and not sharded:
            short = is_out_of_memory(error)
            vote(world, Verdict(out_of_memory=short, failed=not short))
        raise
    finally:
        _NOW.reset(token)


def own_batches(count: int) -> list[tuple[int, bool]]:
    """Numbers of this rank's batches; False for one that is computed only to keep in step.

    The layers of a sharded model communicate, so there all ranks compute the same number.
    """
    share = _NOW.get(_ALONE)
    if not share.divides(count):
        return [(number, True) for number in range(count)]
    rank, size = share.world.rank, share.world.size
    mine = [(number, True) for number in range(rank, count, size)]
    share.waited_for = True
    return mine + [(0, False)] * (divide_up(count, size) - len(mine) if share.sharded else 0)


def collect(count: int, *results: Tensor) -> list[Tensor]:
    """Put the rows of all ranks' results together, on the CPU, one rank after the other."""
    here, share = [result.cpu() for result in results], _NOW.get(_ALONE)
    if not share.divides(count):
        return here
    share.waited_for = False
    if vote(share.world, Verdict()).out_of_memory:
        raise torch.OutOfMemoryError("memory ran out on another rank")
    return [torch.cat(gather_rows(share.world, result)) for result in here]
