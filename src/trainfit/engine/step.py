"""The optimizer step: micro-batches forward and backward, clip, update.

A step's loss is divided by the weight of the whole step, which is known beforehand, so its gradient
does not depend on how it is cut. Nothing here waits for the device: the loss and the norm stay
tensors. The planner runs the same code on fake tensors to predict memory.

AdamW has its state before the first step, and its operations are taken one at a time. Adafactor and
Muon update one weight at a time, from a copy. Any other optimizer is asked for its own step().
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.adamw import adamw

from trainfit.core.errors import OutOfMemory
from trainfit.core.plan_records import Precision
from trainfit.engine.adamw_moments import Piece, SmallAdamW, launch
from trainfit.engine.captured import StepNumbers
from trainfit.engine.memory_errors import is_out_of_memory, retried, write_once
from trainfit.engine.optimizer import Combined, host_moments, is_adamw, trained_parameters
from trainfit.engine.parallel import local
from trainfit.kernels.fused_ops import takes_lists
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
        """Set the scale to its first value, in the same memory."""
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


# ── the update of the weights: once or not at all, also where memory runs out in the middle ───────


@torch.no_grad()
def update_once(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Update every parameter that has a gradient, once, or none where it is not `finite`.

    AdamW's fused kernels read `finite` on the device; others make the CPU wait for the answer.
    Memory may run out at any operation: torch's own step() would then have updated some parameters
    and counted others, so AdamW's operations are taken one at a time here.
    """
    plain = is_adamw(optimizer)
    if plain and optimizer.param_groups[0]["fused"]:
        found_inf = retried(lambda: (~finite).float())
        counted = retried(lambda: finite.float())
        for number in range(len(optimizer.param_groups)):
            _update_fused(optimizer, number, found_inf, counted)
    elif isinstance(finite, FakeTensor) or retried(lambda: bool(finite)):
        if not plain:
            _update_foreign(optimizer, finite)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update_one(parameter, optimizer.state[parameter], group)


_ALONE = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers that can update one weight without the others."""


def _update_foreign(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Update with an optimizer other than AdamW."""
    if isinstance(optimizer, Combined):
        for part in optimizer.optimizers:
            update_once(part, finite)
    elif type(optimizer) in _ALONE:
        _update_singly(optimizer)
    else:
        _update_whole(optimizer)


def _update_singly(optimizer: torch.optim.Optimizer) -> None:
    """Call step() for one weight at a time, from a copy again where memory runs out in between."""
    groups = optimizer.param_groups
    try:
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    optimizer.param_groups = [group | {"params": [parameter]}]
                    retried(partial(_step_or_restore, optimizer, parameter))
    finally:
        optimizer.param_groups = groups


def _step_or_restore(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    state = optimizer.state.get(parameter, {})
    written = [parameter, *(v for v in state.values() if isinstance(v, Tensor))]
    before = [tensor.clone() for tensor in written]
    try:
        optimizer.step()
    except Exception:
        for tensor, copy in zip(written, before, strict=True):
            retried(partial(tensor.copy_, copy))
        if not state:
            optimizer.state.pop(parameter, None)  # it may be incomplete
        raise


def _update_whole(optimizer: torch.optim.Optimizer) -> None:
    """Call step(), again only where memory ran out before anything was written."""
    before = set(optimizer.state)
    state = [value for values in optimizer.state.values() for value in values.values()]
    watched = [t for t in (*trained_parameters(optimizer), *state) if isinstance(t, Tensor)]
    versions = [tensor._version for tensor in watched]

    def work() -> None:
        try:
            optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if versions != [tensor._version for tensor in watched]:
                raise OutOfMemory(
                    "memory ran out in the middle of an update, which cannot be undone",
                    "continue with --resume from the newest checkpoint, with a smaller batch",
                ) from None
            for parameter in [p for p in optimizer.state if p not in before]:
                del optimizer.state[parameter]  # it may be incomplete
            raise

    retried(work)


def _alike(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> list[list[Tensor]]:
    """Group parameters by device and dtype, and by those of their moments, as a kernel needs.

    Small moments are updated one weight at a time where no kernel takes many.
    """
    alike: dict[Any, list[Tensor]] = {}
    for number, parameter in enumerate(parameters):
        moments = optimizer.state[parameter]["exp_avg"].dtype
        many = not isinstance(optimizer, SmallAdamW) or takes_lists(local(parameter))
        key = (parameter.device, parameter.dtype, moments, None if many else number)
        alike.setdefault(key, []).append(parameter)
    return list(alike.values())


def _update_fused(
    optimizer: torch.optim.Optimizer, number: int, found_inf: Tensor, counted: Tensor
) -> None:
    """Update a group by fused kernels, then count the step."""
    group, host = optimizer.param_groups[number], host_moments(optimizer)
    parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
    if not parameters:
        return
    counts = [optimizer.state[parameter]["step"] for parameter in parameters]
    this_step = retried(lambda: torch._foreach_add(counts, 1))
    steps = dict(zip(parameters, this_step, strict=True))

    def update(pieces: list[Piece], of: list[Tensor]) -> None:
        retried(lambda: launch(pieces, [steps[p] for p in of], group, found_inf))

    if host is not None:
        host.update(number, update)
    else:
        numbers = {p: number for number, p in enumerate(trained_parameters(optimizer))}
        for alike in _alike(optimizer, parameters):
            pieces = [_piece(p, optimizer.state[p], numbers[p]) for p in alike]
            update(pieces, alike)
    write_once(counts, lambda left: torch._foreach_add_(left, [counted] * len(left)))


def _piece(parameter: Tensor, state: dict[str, Tensor], number: int) -> Piece:
    moments = {name: local(value) for name, value in state.items() if name != "step"}
    return Piece(local(parameter), local(cast(Tensor, parameter.grad)), moments, number)


def _update_one(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Update one parameter, from a copy again where memory runs out in between."""
    weight, gradient = local(parameter), local(cast(Tensor, parameter.grad))
    mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
    written = [weight, mean, square, state["step"]]

    def work() -> None:
        before = [tensor.clone() for tensor in written]
        try:
            counts, options = [state["step"]], _options(group) | {"foreach": False, "fused": False}
            adamw([weight], [gradient], [mean], [square], [], counts, **options)
        except Exception:
            for tensor, copy in zip(written, before, strict=True):
                retried(partial(tensor.copy_, copy))
            raise

    retried(work)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that AdamW's two functions share."""
    beta1, beta2 = group["betas"]
    same = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    return {"beta1": beta1, "beta2": beta2, **same}
