"""Steps that recover when memory runs out.

The step is repeated after the cache is freed; if memory runs out again, it is cut into smaller
micro-batches. Each try starts from the beginning: same sequences, random state and buffers
restored, no gradients. A finer cut changes only memory use. It is kept and recorded, so that a run
can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from trainfit.core.errors import OutOfMemory, RunFailed
from trainfit.core.records import TrainTask
from trainfit.data.batches import Batch, LoadedStep, StepLoader, to_device
from trainfit.engine import saved_state
from trainfit.engine.captured import CapturedSteps, StepNumbers
from trainfit.engine.distributed import Verdict, World, communicating, lost_rank, vote
from trainfit.engine.loop_settings import LoopSettings
from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory
from trainfit.engine.parallel import GradientBuckets, joined_norm, sum_over_ranks, synchronised
from trainfit.engine.relaunch import RestartChanges, restarts_left
from trainfit.engine.step import LossScale, accumulate, finish, out_of_graphs
from trainfit.kernels.saved_on_host import SavedOnHost


class CannotGoOn(RunFailed):
    """The run cannot continue, but all ranks are at the same step and can save a checkpoint."""


class NotFinite(CannotGoOn):
    """The model's weights or losses are not finite, and a checkpoint would be useless."""


NONFINITE_FIX = "lower the learning rate, look for bad labels, or use bf16 or fp32 instead of fp16"
"""Fix for numbers that are not finite."""


class NoFinerCut(CannotGoOn, OutOfMemory):
    """Memory ran out with the last cut of the ladder."""


class MustRestart(OutOfMemory):
    """Memory ran out on this rank while others wait for it; the run must restart."""

    def __init__(self, what: str, fix: str = "", change: RestartChanges | None = None) -> None:
        """Set the changes for the next start."""
        again = "torchrun starts it again" if restarts_left() > 0 else "continue with --resume"
        super().__init__(what, fix or f"{again} from the newest checkpoint")
        self.change = change or RestartChanges()


class Buffers:
    """Copies of the model's buffers; only buffers that may have changed are copied again.

    torch counts the writes to a tensor, except those of a norm's kernel to its running statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[Tensor, tuple[int, Tensor]] = {}
        norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
        self._uncounted = {buffer for norm in norms for buffer in norm.buffers(recurse=False)}

    def keep(self) -> None:
        """Copy the current values."""
        kept, self._copies = self._copies, {}
        for buffer in self._model.buffers():
            version, copy = kept.get(buffer, (None, buffer))
            same = version == buffer._version and buffer not in self._uncounted
            self._copies[buffer] = buffer._version, copy if same else buffer.detach().clone()

    def forget(self) -> None:
        """Drop the copies: a replayed graph writes without being counted."""
        self._copies.clear()

    def put_back(self) -> None:
        """Restore the copied values."""
        for buffer, (version, copy) in self._copies.items():
            if buffer._version != version or buffer in self._uncounted:
                buffer.copy_(copy)
                self._copies[buffer] = buffer._version, copy


TellMemory = Callable[[str, Mapping[str, int]], None]
"""Takes the text and the figures of an event after memory ran out."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Model, optimizer, data and settings of a run in this process."""

    task: TrainTask
    settings: LoopSettings
    model: nn.Module
    buffers: Buffers
    optimizer: torch.optim.Optimizer
    scale: LossScale | None
    loader: StepLoader
    world: World
    device: torch.device
    rates: tuple[float, ...]
    """Full learning rate of each parameter group; the schedule scales them."""
    sharded: bool = False
    """Each rank holds a shard of the model (FSDP2)."""
    gradients: GradientBuckets | None = None
    """Sums of gradients over ranks; None for one rank, and where the model is sharded."""
    indivisible: str | None = None
    """Reason why a step must be one micro-batch; None where it can be cut."""
    captured: CapturedSteps = field(default_factory=CapturedSteps)
    """Whole steps as CUDA graphs, where they are captured."""

    @property
    def whole(self) -> bool:
        """True where this rank is the only one, with whole weights."""
        return self.world.size == 1 and not self.sharded

    def saved_weights(self) -> dict[str, Tensor]:
        """Return the weights and buffers that a checkpoint holds."""
        frozen = saved_state.changes_frozen(self.task)
        return saved_state.model_tensors(self.model, frozen=frozen)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of a successful step."""

    numbers: StepNumbers
    rung: int
    """Index of the cut that was used; later steps use it too."""
    stop: bool
    """True where any rank was asked to stop."""


def take_step(
    parts: Parts,
    loaded: LoadedStep,
    weight: float,
    rung: int,
    *,
    stop: bool,
    tell: TellMemory,
    captured: bool = True,
) -> StepOutcome:
    """Take a step on all ranks, with the cut of `rung` or a finer one; `captured` if it can be."""
    cuts, batches = parts.settings.cuts, loaded.batches
    work = partial(_whole_step, parts)
    numbers = parts.captured.take(work, batches, weight) if captured else None
    if numbers is not None:
        parts.buffers.forget()
        return StepOutcome(numbers, rung, stop)
    start = saved_state.take(parts.device)
    parts.buffers.keep()
    again = False
    while True:
        loss, own = _try(parts, batches, weight, stop)
        agreed = vote(parts.world, own)
        if not agreed.out_of_memory:
            break
        if parts.gradients is not None:
            with communicating():
                parts.gradients.drop()
        parts.optimizer.zero_grad(set_to_none=True)
        if parts.captured.held:
            parts.captured.stop("memory ran out beside them")
        give_back_memory()
        saved_state.put_back(start, parts.device)
        parts.buffers.put_back()
        if again:
            rung = _next_rung(parts, rung)
            batches = parts.loader.load(loaded.sequences, cuts[rung])
            pieces = cuts[rung].micro_batches
            text = f"memory ran out again: steps are cut into {pieces} from here"
            tell(text, {"micro_batches": pieces})
        else:
            tell("memory ran out: the cache was given back and the step is taken again", {})
        again = not again
    if parts.gradients is not None:
        with communicating():
            parts.gradients.finish(agreed.used)
    sum_over_ranks(parts.world, [loss])
    return StepOutcome(_finish(parts, loss), rung, agreed.stop)


def _try(parts: Parts, batches: list[Batch], weight: float, stop: bool) -> tuple[Tensor, Verdict]:
    """Compute this rank's share of a step, forward and backward; returns loss and flags.

    An out-of-memory error is dropped here, to free the frames that hold activations. Whatever
    happens, this rank starts the sum of each bucket, because the others wait for it.
    """
    there = to_device(batches, parts.device)
    gradients = parts.gradients
    try:
        if parts.settings.graphs:
            there = out_of_graphs(parts.model, there, copied=gradients is not None)
        if gradients is not None:
            there = gradients.watched(there, len(batches))
        loss = _accumulate(parts, there, weight)
        return loss, Verdict(stop=stop, used=_sum_rest(parts))
    except Exception as error:
        if not is_out_of_memory(error):
            vote(parts.world, Verdict(failed=True, used=_sum_rest(parts)))
            raise
    give_back_memory()
    return torch.zeros(()), Verdict(out_of_memory=True, stop=stop, used=_sum_rest(parts))


def _sum_rest(parts: Parts) -> tuple[bool, ...]:
    if parts.gradients is None:
        return ()
    with communicating():
        return parts.gradients.sum_rest()


def _whole_step(parts: Parts, batches: Sequence[Batch], weight: Tensor) -> StepNumbers:
    """Take a step on one rank to be captured; one that fails leaves no gradients behind."""
    try:
        return _finish(parts, _accumulate(parts, batches, weight))
    except Exception:
        parts.optimizer.zero_grad(set_to_none=True)
        raise


def _accumulate(parts: Parts, batches: Iterable[Batch], weight: float | Tensor) -> Tensor:
    if isinstance(weight, float) and parts.device.type == "cuda":
        # A captured step divides by a tensor; by a number, the GPU would round differently.
        weight = torch.full((), weight, device=parts.device)
    return accumulate(
        parts.model,
        parts.task.loss,
        batches,
        weight,
        device_type=parts.device.type,
        precision=parts.settings.precision,
        scale=parts.scale,
        saved=SavedOnHost if parts.settings.offload_activations else None,
    )


def _finish(
    parts: Parts, loss: Tensor, join: Callable[[Tensor], Tensor] | None = None
) -> StepNumbers:
    most = parts.settings.optimizer.max_grad_norm
    return finish(parts.optimizer, loss, max_grad_norm=most, scale=parts.scale, join=join)


def _next_rung(parts: Parts, rung: int) -> int:
    if rung + 1 < len(parts.settings.cuts):
        return rung + 1
    raise NoFinerCut(*nothing_finer(parts))


def nothing_finer(parts: Parts) -> tuple[str, str]:
    """Message and fix where memory ran out with the finest cut."""
    if parts.indivisible is not None:
        return (
            f"memory ran out, and the step cannot be cut: {parts.indivisible}",
            "take a smaller batch or a smaller model, or checkpoint activations, "
            "and continue with --resume",
        )
    tokens = parts.settings.cuts[-1].tokens
    fix = getattr(
        parts.task,
        "memory_fix",
        "shorten the sequences (data.max_length), checkpoint activations "
        "(model.use_gradient_checkpointing) or take a smaller model",
    )
    what = f"memory ran out with the finest cut, {tokens} tokens at a time"
    return what, f"{fix}, and continue with --resume"


def copies(settings: LoopSettings, world: World) -> int:
    """Number of copies of a sharded model: one per machine where sharding is hybrid."""
    return world.machines if settings.sharding == "hybrid" else 1


def take_sharded_step(
    parts: Parts, loaded: LoadedStep, weight: float, rung: int, *, stop: bool
) -> StepOutcome:
    """Take a step of a sharded model on all ranks, with the cut of `rung`.

    After memory ran out once, gradients are kept as shards between micro-batches.
    """
    batches = to_device(loaded.batches, parts.device)
    try:
        batches = synchronised(parts.model, batches, len(loaded.batches), once=rung == 0)
        loss = _accumulate(parts, batches, weight)
    except Exception as error:
        if is_out_of_memory(error):
            raise _out_of_memory(parts, rung) from None
        if lost := lost_rank(error):
            raise lost from None
        raise
    agreed = vote(parts.world, Verdict(stop=stop))
    sum_over_ranks(parts.world, [loss])
    shards = parts.world.size // copies(parts.settings, parts.world)
    join = partial(joined_norm, shards=shards)
    return StepOutcome(_finish(parts, loss, join), rung, agreed.stop)


def _out_of_memory(parts: Parts, rung: int) -> OutOfMemory:
    cuts = parts.settings.cuts
    if rung + 1 == len(cuts):
        return OutOfMemory(*nothing_finer(parts))
    pieces = cuts[rung + 1].micro_batches
    return MustRestart(
        f"memory ran out on rank {parts.world.rank}: steps are to be cut into {pieces}",
        change=RestartChanges(rung=rung + 1),
    )
