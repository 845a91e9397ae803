"""The optimizer step: micro-batches forward and backward, clip, update.

A step's loss is divided by the weight of the whole step, which is known beforehand, so its gradient
does not depend on how it is cut. Nothing here waits for the device: the loss and the norm stay
tensors. The planner runs the same code on fake tensors to predict memory.
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
from trainfit.engine.memory_errors import retried, write_once
from trainfit.engine.updates import trained_parameters, update_once
from trainfit.kernels.saved_on_host import SavedOnHost

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE = 2.0**16
_GROW_AFTER = 2000


def autocast(device_type: str, precision: Precision) -> AbstractContextManager[object]:
    """Context of the forward pass: autocast, or nothing for fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type, dtype=_HALF[precision])


class LossScale:
    """Scale of an fp16 loss: halved when gradients overflow, doubled after 2,000 steps without.

    Works like torch's GradScaler, but reuses the norm that clipping computes, stays on the device
    with any optimizer, and lets a step be repeated.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.factor = torch.tensor(_FIRST_SCALE, device=device)
        self.quiet_steps = torch.tensor(0.0, device=device)

    def reset(self) -> None:
        """Begin anew, in the same memory."""
        self.factor.fill_(_FIRST_SCALE)
        self.quiet_steps.zero_()

    def follow(self, finite: Tensor) -> None:
        """Adapt the scale after a step; `finite` says that its gradients did not overflow."""
        # Without torch.where, which copies its numbers from the host; in place, for captured steps.
        kept = finite.float()
        self.quiet_steps.add_(1).mul_(kept)
        grows = (self.quiet_steps >= _GROW_AFTER).float()
        self.factor.mul_((kept + 1) / 2).mul_(grows + 1)
        self.quiet_steps.mul_(1 - grows)


def loss_scale(precision: Precision, device: torch.device | str) -> LossScale | None:
    """Make a loss scale for fp16; None for other precisions."""
    return LossScale(device) if precision == "fp16" else None


Loss = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""TrainTask.loss: the summed loss of a micro-batch."""
Batch = TypeVar("Batch")


class StepNumbers(NamedTuple):
    """Loss and gradient norm of a step, still on the device."""

    loss: Tensor
    """Loss per unit of weight."""
    grad_norm: Tensor
    """Norm before clipping. The step was skipped where this or the loss is not finite."""


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
    saved: Callable[[], SavedOnHost] | None = None,
) -> StepNumbers:
    """Take a whole optimizer step on one process, without recovery."""
    how: Any = {"device_type": device_type, "precision": precision, "scale": scale, "saved": saved}
    total = accumulate(model, loss, batches, weight, **how)
    return finish(optimizer, total, max_grad_norm=max_grad_norm, scale=scale)


def accumulate(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Mapping[str, Any]],
    weight: float | Tensor,
    *,
    device_type: str,
    precision: Precision = "fp32",
    scale: LossScale | None = None,
    saved: Callable[[], SavedOnHost] | None = None,
) -> Tensor:
    """Run forward and backward for each micro-batch; returns the loss per unit of `weight`.

    `weight` is the weight of the whole step, over all micro-batches and ranks. `saved` makes the
    place where activations wait for the backward pass; None: on the device.
    """
    # A fixed dtype, also without micro-batches, because ranks sum it.
    total = torch.zeros((), dtype=torch.float32, device=next(model.parameters()).device)
    for batch in batches:
        elsewhere = nullcontext() if saved is None else saved().saving()
        with elsewhere, autocast(device_type, precision):
            share = loss(model, batch) / weight
        (share if scale is None else share * scale.factor).backward()  # type: ignore[no-untyped-call]
        total = total + share.detach().float()
    return total


def out_of_graphs(
    model: nn.Module, batches: Iterable[Batch], *, copied: bool = False
) -> Iterator[Batch]:
    """Yield the micro-batches of a model that is replayed as CUDA graphs.

    A graph writes to the same memory each time, and the first gradient of a step is that memory
    itself: unless `copied` already, it is copied before the second one is added to it. Each
    micro-batch is marked as a new beginning; otherwise torch takes every compiled block for one,
    and does not replay them straight away.
    """
    for number, batch in enumerate(batches):
        if number == 1 and not copied:
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
    """Clip the gradients, update the weights, and clear the gradients.

    Nothing is updated where the loss or the gradient is not finite. If memory runs out in here, a
    finer cut would not help: the rest is done after the cache is freed. Where each rank has a shard
    of the gradient, `join` combines their norms.
    """
    gradients = [local(p.grad) for p in trained_parameters(optimizer) if p.grad is not None]
    norm = retried(lambda: _norm(gradients, scale, join))
    finite = retried(lambda: torch.isfinite(norm) & torch.isfinite(loss))
    factor = retried(lambda: _factor(norm, max_grad_norm, scale))
    if factor is not None:
        write_once(gradients, lambda left: torch._foreach_mul_(left, factor))
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
    """Factor on the gradients that clips and unscales them in one pass."""
    clip = None
    if max_grad_norm is not None:
        clip = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    if scale is None:
        return clip
    return scale.factor.reciprocal() if clip is None else clip / scale.factor


class Reading(NamedTuple):
    """Loss and gradient norm of a step as Python numbers."""

    step: int
    loss: float
    grad_norm: float


class Readings:
    """Losses and norms on their way from the device, in order; reading them makes no step wait."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, step: int, numbers: StepNumbers) -> None:
        """Copy the numbers of a step to the host, after the work that is queued."""
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
        """Return the readings that arrived since the last call; with `wait`, all of them."""
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


_Gap = tuple[torch.cuda.Event, torch.cuda.Event, float]


class Waits:
    """Adds up the time that a window of steps waited for data."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._last: torch.cuda.Event | None = None
        self._gaps: list[_Gap] = []

    def begin(self, waited: float) -> None:
        """Note the start of a step whose data took `waited` seconds to arrive."""
        if not self._on_gpu:
            self._seconds += waited
        elif self._last is not None:
            self._gaps.append((self._last, _mark(), waited))

    def end(self) -> None:
        """Note that the step's work is queued on the device."""
        if self._on_gpu:
            self._last = _mark()

    def take(self) -> float:
        """Return the seconds waited since the last call; the device must be idle."""
        for end, begin, waited in self._gaps:
            idle = end.elapsed_time(begin) / 1e3
            self._seconds += min(waited, idle)
        seconds, self._seconds = self._seconds, 0.0
        self._last, self._gaps = None, []
        return seconds


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
