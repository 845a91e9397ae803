"""Updates that are made once or not at all, also where memory runs out in the middle.

AdamW has its state before the first step, and its operations are taken one at a time. Adafactor and
Muon update one weight at a time, from a copy. Any other optimizer is asked for its own step().
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.adamw import adamw

from trainfit.core.errors import OutOfMemory
from trainfit.engine.fsdp import local
from trainfit.engine.host_moments import HostMoments
from trainfit.engine.memory_errors import is_out_of_memory, retried, write_once
from trainfit.engine.small_states import Piece, SmallAdamW, launch, small_moments
from trainfit.kernels.small_adamw import takes_lists


def is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether `update_once` can take the optimizer's operations one at a time."""
    groups = optimizer.param_groups
    return isinstance(optimizer, SmallAdamW) or (
        type(optimizer) is torch.optim.AdamW
        and len({bool(group["fused"]) for group in groups}) == 1
        and all(group["fused"] or group["foreach"] is False for group in groups)
        and not any(isinstance(group["lr"], Tensor) and not group["fused"] for group in groups)
        and not any(group[name] for group in groups for name in _UNUSUAL)
    )


_UNUSUAL = ("amsgrad", "maximize", "capturable", "differentiable")


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the parameters that the optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Combined(torch.optim.Optimizer):
    """Several optimizers that are used as one, each for weights of its own."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        """Share the parameter groups of `optimizers`."""
        self.optimizers = optimizers
        super().__init__([p for one in optimizers for p in trained_parameters(one)], {})
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update with each of them."""
        where = trained_parameters(self)[0].device
        update_once(self, torch.ones((), dtype=torch.bool, device=where))

    def state_dict(self) -> dict[str, Any]:
        """Collect the states of all of them, by number."""
        return {str(n): one.state_dict() for n, one in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[str(number)])
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]


def create_state(optimizer: torch.optim.Optimizer, *, offload: bool = False) -> None:
    """Create AdamW's state; torch would in the first step, where memory may run out.

    With `offload` the moments are in the host's memory.
    """
    groups = optimizer.param_groups
    host = None
    if offload:
        half = groups[0].get("moments") == "bf16"
        host = HostMoments(groups, torch.bfloat16 if half else torch.float32)
        setattr(optimizer, "host_moments", host)  # noqa: B010
        setattr(optimizer, "moment_slots", host.slots)  # noqa: B010
    for group in groups:
        for parameter in group["params"]:
            count = torch.tensor(0.0, dtype=torch.float32)
            optimizer.state[parameter] = {
                "step": count.to(parameter.device) if group["fused"] else count,
                **(_moments(parameter, group) if host is None else host.of(parameter)),
            }


def host_moments(optimizer: torch.optim.Optimizer) -> HostMoments | None:
    """Return the moments in the host's memory; None where they are on the device."""
    return getattr(optimizer, "host_moments", None)


def _moments(parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    if "moments" in group:
        return small_moments(parameter, group["moments"])
    return {
        name: torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for name in ("exp_avg", "exp_avg_sq")
    }


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
    """Have an optimizer other than AdamW make its update."""
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
                    "go on with --resume from the newest checkpoint, with a smaller batch or model",
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
        numbers = _numbers(optimizer)
        for alike in _alike(optimizer, parameters):
            pieces = [_piece(p, optimizer.state[p], numbers[p]) for p in alike]
            update(pieces, alike)
    write_once(counts, lambda left: torch._foreach_add_(left, [counted] * len(left)))


def _numbers(optimizer: torch.optim.Optimizer) -> dict[Tensor, int]:
    return {p: number for number, p in enumerate(trained_parameters(optimizer))}


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
