"""Evaluation that changes neither the random state nor the model, and gives its memory back.

It is divided over ranks by whole batches, so that its figures are those of one rank. A task that
divides its evaluation computes `own_batches` and puts the results of all ranks together by
`collect`, where ranks vote first: if memory ran out on one of them, it runs out on all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from trainfit.core import codec
from trainfit.core.errors import BadInput, OutOfMemory, did_you_mean
from trainfit.engine.distributed import Verdict, World, first_says, gather_rows, vote
from trainfit.engine.memory_errors import give_back_cache, give_back_memory, is_out_of_memory
from trainfit.engine.parallel import reshard
from trainfit.engine.recovery import MustRestart, Parts, TellMemory
from trainfit.engine.relaunch import RestartChanges
from trainfit.engine.saved_state import protected
from trainfit.engine.step import autocast
from trainfit.packing.steps import divide_up
from trainfit.runs import timeline
from trainfit.runtime import eagerly


@dataclass(slots=True)
class _Share:
    """Part of this rank in the running evaluation."""

    world: World
    sharded: bool
    waited_for: bool = False
    """Other ranks wait for the results of this one, or will."""

    def divides(self, count: int) -> bool:
        return count >= self.world.size > 1


_ALONE = _Share(World(), False)
_NOW: ContextVar[_Share] = ContextVar("evaluation")
"""Share of this thread; another may score a model at the same time."""


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


@timeline.stage("evaluation")
def evaluate(parts: Parts, batch_size: int, tell: TellMemory) -> tuple[dict[str, float], int]:
    """Evaluate the model; returns the metrics and the batch size that fitted in memory.

    Ranks share the batches of a task that divides them, and else evaluate all of them: a rank that
    only waited would save no time. The first rank's metrics are used.
    """
    # CUDA graphs overwrite outputs that an evaluation may keep.
    without_graphs = eagerly(parts.model) if parts.settings.graphs else nullcontext()
    with protected(parts.device), without_graphs:
        parts.model.eval()
        try:
            metrics, batch_size = _halving(parts, batch_size, tell)
        finally:
            parts.model.train()
            if parts.sharded:
                reshard(parts.model)
            if parts.device.type == "cuda" and _is_tight(parts.device):
                give_back_cache()
    text = first_says(parts.world, json.dumps(codec.encode(metrics)))
    return codec.decode(dict[str, float], json.loads(text)), batch_size


def _is_tight(device: torch.device) -> bool:
    """True where training may need the memory that an evaluation leaves in the cache."""
    free, total = torch.cuda.mem_get_info(device)
    return free < total / 2


def _halving(parts: Parts, batch_size: int, tell: TellMemory) -> tuple[dict[str, float], int]:
    """Evaluate, again from the start with half the batch each time memory runs out."""
    while True:
        try:
            with (
                torch.no_grad(),
                autocast(parts.device.type, parts.settings.precision),
                divided(parts.world, sharded=parts.sharded),
            ):
                found = parts.task.evaluate(parts.model, batch_size)
            return {name: float(value) for name, value in found.items()}, batch_size
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            crowded = parts.captured.held
            if batch_size == 1 and not crowded:
                raise OutOfMemory(
                    "memory ran out in an evaluation of one sequence at a time",
                    "shorten the sequences (data.max_length) or take a smaller model",
                ) from None
        if crowded:  # the graphs' memory is worth less than a larger evaluation batch
            parts.captured.stop("memory ran out in an evaluation beside them")
            give_back_memory()
            continue
        batch_size //= 2
        if parts.sharded:  # the other ranks wait in the middle of a layer
            raise MustRestart(
                f"memory ran out in an evaluation: {batch_size} sequences are to go at a time",
                change=RestartChanges(eval_batch_size=batch_size),
            )
        give_back_memory()
        text = f"memory ran out in an evaluation: {batch_size} sequences at a time from here"
        tell(text, {"eval_batch_size": batch_size})


def is_better(
    metrics: Mapping[str, float], best: Mapping[str, float], name: str, greater: bool
) -> bool:
    """Compare the deciding metric with the best so far; NaN is never better."""
    if name not in metrics:
        known = f"use one of {', '.join(sorted(metrics))}"
        raise BadInput(f"there is no metric {name!r}", did_you_mean(name, metrics, known))
    value = metrics[name]
    if math.isnan(value) or name not in best:
        return not math.isnan(value)
    return value > best[name] if greater else value < best[name]


def nonfinite_loss(metrics: Mapping[str, float]) -> str | None:
    """Name of a loss among the metrics that is not finite; None where there is none."""
    return next(
        (n for n, v in metrics.items() if n.endswith("loss") and not math.isfinite(v)), None
    )
