"""AdamW: which weights decay, state that exists before the first step, updates all or nothing."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.adamw import adamw

from trainfit.core.errors import BadInput
from trainfit.engine.fsdp import local
from trainfit.engine.memory_errors import once, retried
from trainfit.engine.settings import OptimizerSettings

_HALF = (torch.bfloat16, torch.float16)


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """The optimizer of the trained weights, with its state, wherever the model is."""
    keep_trained_in_float32(model)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay, settings.decay_embeddings),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=settings.kind == "adamw_fused",
        # Else torch takes foreach, whose temporaries are as large as the model.
        foreach=False,
    )
    create_state(optimizer)
    return optimizer


def keep_trained_in_float32(model: nn.Module) -> None:
    """Give trained weights of 16 bits 32: a small update to them would round to nothing.

    They are the master weights; autocast makes the copies that the matrix products read.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in _HALF:
            parameter.data = parameter.data.float()


def parameter_groups(
    model: nn.Module, weight_decay: float, decay_embeddings: bool = True
) -> list[dict[str, Any]]:
    """Matrices decay; biases, norms and (if so wished) embeddings do not."""
    tables = {
        id(weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
    }
    decayed: list[Tensor] = []
    kept: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = parameter.dim() >= 2 and (decay_embeddings or id(parameter) not in tables)
            (decayed if decays else kept).append(parameter)
    if not decayed and not kept:
        raise BadInput("the model has no weight that is trained", "unfreeze a part of it")
    groups = [(decayed, weight_decay), (kept, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What the optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def create_state(optimizer: torch.optim.AdamW) -> None:
    """Make the state that torch would make in the first step, where memory may run out half-way."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count = torch.tensor(0.0, dtype=torch.float32)
            optimizer.state[parameter] = {
                "step": count.to(parameter.device) if group["fused"] else count,
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


@torch.no_grad()
def update_once(optimizer: torch.optim.AdamW, finite: Tensor) -> None:
    """Update every parameter that has a gradient, once, or none where it is not `finite`.

    The fused kernel asks `finite` on the device; without it the CPU waits for the answer. Memory
    may run out at any operation: torch's own step() would then have updated some parameters and
    counted others, so its operations are taken one at a time here.
    """
    if optimizer.param_groups[0]["fused"]:
        found_inf = retried(lambda: (~finite).float())
        counted = retried(lambda: finite.float())
        for group in optimizer.param_groups:
            for parameters in _alike(group["params"]):
                states = [optimizer.state[parameter] for parameter in parameters]
                _update_fused(parameters, states, group, found_inf, counted)
    elif isinstance(finite, FakeTensor) or retried(lambda: bool(finite)):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update_one(parameter, optimizer.state[parameter], group)


def _alike(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Those with a gradient, by what a kernel takes together: one device and one dtype."""
    alike: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(alike.values())


def _update_fused(
    parameters: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
    found_inf: Tensor,
    counted: Tensor,
) -> None:
    """One kernel, which is done or not begun; then the count of steps."""
    counts = [state["step"] for state in states]
    this_step = retried(lambda: torch._foreach_add(counts, 1))
    retried(
        lambda: torch._fused_adamw_(
            [local(parameter) for parameter in parameters],
            [local(cast(Tensor, parameter.grad)) for parameter in parameters],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            list(this_step),
            amsgrad=False,
            maximize=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            found_inf=found_inf,
        )
    )
    once(counts, lambda left: torch._foreach_add_(left, [counted] * len(left)))


def _update_one(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Many operations, with a copy to go back to where memory runs out between them."""
    weight, gradient = local(parameter), local(cast(Tensor, parameter.grad))
    mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
    written = [weight, mean, square, state["step"]]

    def work() -> None:
        before = [tensor.clone() for tensor in written]
        try:
            adamw(
                [weight],
                [gradient],
                [mean],
                [square],
                [],
                [state["step"]],
                foreach=False,
                fused=False,
                amsgrad=False,
                maximize=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )
        except Exception:
            for tensor, copy in zip(written, before, strict=True):
                retried(partial(tensor.copy_, copy))
            raise

    retried(work)


def take_workspaces() -> None:
    """Multiply once on torch's default device, forward and backward.

    cuBLAS takes a workspace for each thread that calls it, here the program's and autograd's, with
    the thread's first product, and keeps it. In the middle of a step that is a piece of whatever
    large block is free, and the rest of its segment can never be given back: with a GPT's logits
    more than a gigabyte. Taken first, it has a segment of its own.
    """
    one = torch.ones(8, 8, requires_grad=True)
    (one @ one).sum().backward()  # type: ignore[no-untyped-call]
