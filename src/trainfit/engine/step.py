"""The step: micro-batches forward and backward, clip, update.

A step's loss is divided by the step's whole weight, which is known beforehand, so its gradient
does not depend on how it is cut. Nothing here waits for the device: the loss and the norm stay
tensors. The planner runs the same code on fake tensors to know what it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from trainfit.core.plan_records import Precision
from trainfit.engine.fsdp import local
from trainfit.engine.memory_errors import once, retried
from trainfit.engine.optimizer import trained_parameters, update_once

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE = 2.0**16
_GROW_AFTER = 2000


def autocast(device_type: str, precision: Precision) -> AbstractContextManager[object]:
    """What the forward pass runs in."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type, dtype=_HALF[precision])


class LossScale:
    """The factor on an fp16 loss: halved when gradients overflow, doubled after a long quiet.

    It follows torch's GradScaler, but decides by the norm that clipping computes anyway, stays on
    the device with any optimizer, and a step can be taken again from its beginning.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.factor = torch.tensor(_FIRST_SCALE, device=device)
        self.quiet_steps = torch.tensor(0.0, device=device)

    def follow(self, finite: Tensor) -> None:
        """Take note of a step whose gradients were `finite`, or not."""
        quiet = torch.where(finite, self.quiet_steps + 1, 0.0)
        grows = quiet >= _GROW_AFTER
        self.factor = self.factor * torch.where(finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.quiet_steps = torch.where(grows, 0.0, quiet)


def loss_scale(precision: Precision, device: torch.device | str) -> LossScale | None:
    """The scaling that `precision` needs: fp16 alone."""
    return LossScale(device) if precision == "fp16" else None


Loss = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""TrainTask.loss: the summed loss of a micro-batch."""
Batch = TypeVar("Batch")


class StepNumbers(NamedTuple):
    """What came of a step, still on the device."""

    loss: Tensor
    """Per unit of weight."""
    grad_norm: Tensor
    """Before clipping. The step was skipped where this or the loss is not finite."""


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batches: Iterable[Mapping[str, Any]],
    weight: float,
    *,
    device_type: str,
    precision: Precision = "fp32",
    max_grad_norm: float | None = None,
    scale: LossScale | None = None,
) -> StepNumbers:
    """A whole optimizer step on one process, as the loop does it when nothing goes wrong."""
    total = accumulate(
        model, loss, batches, weight, device_type=device_type, precision=precision, scale=scale
    )
    return finish(optimizer, total, max_grad_norm=max_grad_norm, scale=scale)


def accumulate(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Mapping[str, Any]],
    weight: float,
    *,
    device_type: str,
    precision: Precision = "fp32",
    scale: LossScale | None = None,
) -> Tensor:
    """Forward and backward through each micro-batch; the loss of all, per unit of `weight`.

    `weight` is that of the whole step, over all micro-batches and all ranks.
    """
    # Of one dtype, also where there is no micro-batch: ranks sum it.
    total = torch.zeros((), dtype=torch.float32, device=next(model.parameters()).device)
    for batch in batches:
        with autocast(device_type, precision):
            share = loss(model, batch) / weight
        (share if scale is None else share * scale.factor).backward()  # type: ignore[no-untyped-call]
        total = total + share.detach().float()
    return total


def out_of_graphs(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The micro-batches of a model whose passes are replayed as CUDA graphs.

    A graph writes to the same memory each time, and the first gradient of a step is that memory
    itself. Before the second is added to it, it gets memory of its own. Each micro-batch is marked
    as a new beginning: else torch takes every compiled block for one, and replays none of them
    straight away.
    """
    for number, batch in enumerate(batches):
        if number == 1:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        yield batch


def finish(
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    *,
    max_grad_norm: float | None = None,
    scale: LossScale | None = None,
    join: Callable[[Tensor], Tensor] | None = None,
) -> StepNumbers:
    """Clip and update with the gradients there are, and clear them.

    Where the loss or the gradient is not finite, nothing is updated. Memory that runs out in here
    is no matter of the cut: what was left undone is done after the cache was given back. Where
    each rank has a shard of the gradient, `join` makes one norm of theirs.
    """
    gradients = [local(p.grad) for p in trained_parameters(optimizer) if p.grad is not None]
    norm = retried(lambda: _norm(gradients, scale, join))
    finite = retried(lambda: torch.isfinite(norm) & torch.isfinite(loss))
    factor = retried(lambda: _factor(norm, max_grad_norm, scale))
    if factor is not None:
        once(gradients, lambda left: torch._foreach_mul_(left, factor))
    update_once(optimizer, finite)
    if scale is not None:
        retried(lambda: scale.follow(finite))
    optimizer.zero_grad(set_to_none=True)
    return StepNumbers(loss, norm)


def _norm(
    gradients: list[Tensor], scale: LossScale | None, join: Callable[[Tensor], Tensor] | None
) -> Tensor:
    norm = nn.utils.get_total_norm(gradients)
    if join is not None:
        norm = join(norm)
    return norm if scale is None else norm / scale.factor


def _factor(norm: Tensor, max_grad_norm: float | None, scale: LossScale | None) -> Tensor | None:
    """What the gradients are multiplied by before the update, in one pass."""
    clip = None
    if max_grad_norm is not None:
        clip = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    if scale is None:
        return clip
    return scale.factor.reciprocal() if clip is None else clip / scale.factor


class Reading(NamedTuple):
    """The numbers of a step."""

    step: int
    loss: float
    grad_norm: float


class Readings:
    """Steps whose numbers are under way, in their order."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, step: int, numbers: StepNumbers) -> None:
        """Send for the numbers of a step."""
        pair = torch.stack([numbers.loss.double(), numbers.grad_norm.double()])
        if pair.device.type != "cuda":
            self._under_way.append((step, pair, None))
            return
        copy = torch.empty(2, dtype=torch.float64, pin_memory=True)
        copy.copy_(pair, non_blocking=True)
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrival.record()
        self._under_way.append((step, copy, arrival))

    def arrived(self, *, wait: bool = False) -> list[Reading]:
        """What has come in since the last call; with `wait`, all of it."""
        readings = []
        while self._under_way:
            step, pair, arrival = self._under_way[0]
            if arrival is not None and not arrival.query():  # type: ignore[no-untyped-call]
                if not wait:
                    break
                arrival.synchronize()
            self._under_way.popleft()
            readings.append(Reading(step, *pair.tolist()))
        return readings
