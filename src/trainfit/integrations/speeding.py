"""`trainfit.speed_up(trainer)`: faster steps of the same numbers, for a trainer that is there.

A trainer is transformers' Trainer or a subclass, such as those of sentence-transformers; a model
or a LightningModule is taken too.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import RuntimeSettings
from trainfit.integrations.batches_ahead import fetch_ahead
from trainfit.integrations.body_blocks import BodyBlocks
from trainfit.integrations.body_graphs import BodyGraphs
from trainfit.integrations.host_batches import keep_host_batches
from trainfit.integrations.speedups import AROUND, COMPILED, GRAPHS, WITHOUT, SpeedUp, chosen
from trainfit.integrations.unpadded_calls import Unpadding
from trainfit.integrations.unpadding import facts_in, foreign_in, unpadded
from trainfit.runtime import apply

TrainerT = TypeVar("TrainerT")

_PLAIN_ADAMW = "adamw_torch"
_WATCHED = 8
"""Batches in which heads of a script are watched: it may train several of them in turn."""
_OURS = "_trainfit_changed"
"""Mark of a function of a trainer that was replaced: each of its trainings comes here again."""


def speed_up(
    trainer: TrainerT,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    quiet: bool = False,
) -> TrainerT:
    """Make the steps of a trainer faster, with the same batches, rate and losses.

    Returns the same trainer and prints one line of what was done and what was not. `only` and
    `without` choose among `unpadded`, `graphs` (of unpadded passes, on a GPU), `compile` (blocks
    inside of the graphs), `ahead` (batches of a loader without workers), `nowait` (Trainer's check
    of each loss, done on the GPU), `fused` (AdamW) and `tf32`. The last and `compile`, which takes
    half a minute that nobody here knows to be won back, must be named in `only`.
    """
    found = apply_speedups(trainer, chosen(only, [*without, *([] if only else ["compile"])]))
    if not quiet:
        print(found.line())
    return trainer


def apply_speedups(trainer: Any, names: Collection[str]) -> SpeedUp:
    """Make the named changes to a trainer, a LightningModule or a model."""
    model = trainer if isinstance(trainer, nn.Module) else getattr(trainer, "model", None)
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"{type(trainer).__name__} has no model",
            "give a Trainer of transformers, a LightningModule or a model",
        )
    done: list[str] = []
    left: list[str] = []
    if "unpadded" in names:
        _unpad(trainer, model, done, left, names)
    elif "graphs" in names:
        left.append(f"{GRAPHS} (they need unpadded)")
    if "ahead" in names and torch.cuda.is_available():  # a CPU has no time to fetch meanwhile
        fetch_ahead()
        done.append("batches fetched ahead")
    if "nowait" in names and not isinstance(trainer, nn.Module):
        _check_there(trainer, done)
    if "fused" in names and not isinstance(trainer, nn.Module):
        _fuse(trainer, done, left)
    if "tf32" in names:
        apply(RuntimeSettings(tf32=True))
        done.append("TF32")
    return SpeedUp(done=tuple(done), left=tuple(left))


def _unpad(
    trainer: Any, model: nn.Module, done: list[str], left: list[str], names: Collection[str]
) -> None:
    graphs, gpu = "graphs" in names, torch.cuda.is_available()
    if (why := foreign_in(model)) is not None:
        left.append(f"{WITHOUT} ({why})")
        return

    def changed(one: nn.Module) -> nn.Module:
        for facts in facts_in(unpadded(one)):
            _prepare(facts, names if gpu else ())
        return one

    try:
        changed(model)
    except BadInput as error:
        left.append(f"{WITHOUT} ({error.what})")
        return
    keep_host_batches()
    done.append(f"{type(model).__name__} {WITHOUT}")
    if graphs:
        (done if gpu else left).append(GRAPHS if gpu else f"{GRAPHS} (no GPU)")
    if "compile" in names and gpu:
        (done if graphs else left).append(COMPILED if graphs else f"{COMPILED} (they need graphs)")
    build = getattr(trainer, "model_init", None)
    if build is not None and not hasattr(build, _OURS):  # train() builds the model again

        @wraps(build)
        def built(*args: Any, **kwargs: Any) -> Any:
            return changed(build(*args, **kwargs))

        setattr(built, _OURS, True)
        trainer.model_init = built


def _prepare(facts: Unpadding, names: Collection[str]) -> None:
    """Set up one model of a script that is not known."""
    if facts.reads == "outside":  # it may read padding before it trains
        facts.reads = "unknown"
    if facts.wait == 1:
        facts.wait = _WATCHED
    if "graphs" in names:
        facts.graphs = facts.graphs or BodyGraphs()
        if "compile" in names:
            facts.graphs.blocks = facts.graphs.blocks or BodyBlocks()


def _check_there(trainer: Any, done: list[str]) -> None:
    """Filter losses that are not finite on the GPU, where Trainer would wait for each of them."""
    arguments: Any = getattr(trainer, "args", None)
    method: Any = getattr(trainer, "training_step", None)
    filters = getattr(arguments, "logging_nan_inf_filter", False)
    filters = filters and arguments.device.type == "cuda"
    if not filters or not hasattr(trainer, "add_callback") or hasattr(method, _OURS):
        return
    from transformers import TrainerCallback

    class Restore(TrainerCallback):
        def on_step_end(self, *_: Any, **_rest: Any) -> None:
            arguments.logging_nan_inf_filter = True

        on_substep_end = on_step_end

    @wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        loss, total = method(*args, **kwargs), getattr(trainer, "_tr_loss", None)
        off = total is None or not isinstance(loss, Tensor) or AROUND.off
        arguments.logging_nan_inf_filter = off
        if off or total is None:
            return loss
        # Trainer's own rule: such a loss counts as the mean of those since the last log.
        since = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        return torch.where(torch.isfinite(loss), loss, total / since)

    setattr(step, _OURS, True)
    trainer.training_step = step
    trainer.add_callback(Restore())
    done.append("no wait for each loss")


def _fuse(trainer: Any, done: list[str], left: list[str]) -> None:
    arguments: Any = getattr(trainer, "args", None)
    kind = getattr(arguments, "optim", None)
    if kind is None:
        return
    name = str(getattr(kind, "value", kind))
    if name == f"{_PLAIN_ADAMW}_fused":
        return
    if name != _PLAIN_ADAMW or trainer.optimizer is not None:
        left.append("fused AdamW (the script has an optimizer of its own)")
    elif arguments.device.type != "cuda":
        left.append("fused AdamW (no GPU)")
    else:
        arguments.optim = type(kind)(f"{_PLAIN_ADAMW}_fused")
        done.append("fused AdamW")
