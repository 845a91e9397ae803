"""Optimizers of a model: classes, options and state, which weights decay, and learning rates."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainfit.core.errors import BadInput, reason
from trainfit.engine.adamw_moments import SMALL, HostMoments, SmallAdamW, small_moments
from trainfit.engine.loop_settings import OptimizerSettings, optimizer_classes

_HALF = (torch.bfloat16, torch.float16)


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Make the optimizer of the trained weights, wherever the model is."""
    keep_trained_in_float32(model)
    name, offload = settings.kind.removesuffix("_fused"), settings.offload
    groups = parameter_groups(model, settings.weight_decay, settings.decay_embeddings)
    options: dict[str, Any] = {"lr": settings.learning_rate}
    if name.startswith("adamw"):
        options |= {"betas": settings.betas, "eps": settings.eps}
    if name in SMALL:
        return adopt(model, SmallAdamW(groups, SMALL[name], **options), offload=offload)
    if name == "muon":
        adam = {"betas": settings.betas, "eps": settings.eps}
        return _muon(model, groups, options, settings.options, adam)
    if name == "adafactor":  # steps of the learning rate, not of the weights' own size times it
        options["eps"] = (None, 1.0)
    kind = optimizer_classes()[name]
    if settings.kind.endswith("_fused"):
        if any(weight.is_complex() for weight in model.parameters()):
            what = f"the model has complex weights, which {settings.kind} does not take"
            raise BadInput(what, "set optimization.optimizer=adamw")
        options["fused"] = True
    elif not settings.options.get("fused"):
        # torch's default is foreach, whose temporaries are as large as the model.
        options["foreach"] = False
    return adopt(model, _made(kind, groups, options | settings.options), offload=offload)


def adopt(model: nn.Module, optimizer: object, *, offload: bool = False) -> torch.optim.Optimizer:
    """Check that an optimizer updates the trained weights, all and only these; give AdamW state."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"the optimizer is a {type(optimizer).__name__}"
        raise BadInput(what, "return a torch.optim.Optimizer")
    check_usable(optimizer)
    held = {id(parameter) for parameter in trained_parameters(optimizer)}
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if left_out := [name for key, name in trained.items() if key not in held]:
        raise BadInput(
            f"the optimizer leaves out {len(left_out)} trained weights, such as {left_out[0]}",
            "give them to it, or freeze them (requires_grad_(False))",
        )
    if foreign := held - trained.keys():
        raise BadInput(
            f"the optimizer holds {len(foreign)} weights that the model does not train",
            "make them parameters of the model, whose checkpoints then have them",
        )
    for part in optimizer.optimizers if isinstance(optimizer, Combined) else [optimizer]:
        if is_adamw(part):
            create_state(part, offload=offload)
    return optimizer


def check_usable(optimizer: torch.optim.Optimizer) -> None:
    """Raise BadInput where the loop cannot call step() or set the learning rate."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        what = f"{type(optimizer).__name__} has a scheduler of torch, but the loop sets its rate"
        raise BadInput(what, "leave it out, and choose training.scheduler and warmup_ratio")
    needed = inspect.signature(optimizer.step).parameters.values()
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in needed):
        what = f"{type(optimizer).__name__}.step() needs a closure"
        raise BadInput(what, "use an optimizer that computes the loss once per step")
    if any("lr" not in group for group in optimizer.param_groups):
        what = f"a parameter group of {type(optimizer).__name__} has no lr"
        raise BadInput(what, "give each group one: the schedule scales it")


def _made(
    kind: Callable[..., torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    options: dict[str, Any],
) -> torch.optim.Optimizer:
    try:
        return kind(groups, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        what = f"torch.optim.{getattr(kind, '__name__', kind)} does not take these options"
        raise BadInput(f"{what} ({reason(error)})", "change optimizer.options") from None


def _muon(
    model: nn.Module,
    groups: list[dict[str, Any]],
    options: dict[str, Any],
    muon_options: dict[str, Any],
    adam_options: dict[str, Any],
) -> torch.optim.Optimizer:
    """Muon for the matrices of hidden layers, AdamW for embeddings, biases and norms.

    Muon's update is scaled to the size of AdamW's, so that one learning rate serves both.
    """
    tables = _embeddings(model)
    parts: list[list[dict[str, Any]]] = [[], []]
    for group in groups:
        for part, is_hidden in zip(parts, (True, False), strict=True):
            chosen = [
                p for p in group["params"] if (p.dim() == 2 and id(p) not in tables) is is_hidden
            ]
            if chosen:
                part.append(group | {"params": chosen})
    matrices, others = parts
    muon_options = {"adjust_lr_fn": "match_rms_adamw"} | muon_options
    makers = [
        (torch.optim.Muon, matrices, options | muon_options),
        (torch.optim.AdamW, others, options | adam_options | {"fused": True}),
    ]
    made = [_made(kind, part, chosen) for kind, part, chosen in makers if part]
    return adopt(model, made[0] if len(made) == 1 else Combined(*made))


def keep_trained_in_float32(model: nn.Module) -> None:
    """Convert trained 16-bit weights to 32 bits: small updates to them would round to zero.

    They are the master weights; autocast makes 16-bit copies for matrix products.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in _HALF:
            parameter.data = parameter.data.float()


def parameter_groups(
    model: nn.Module, weight_decay: float, decay_embeddings: bool = True
) -> list[dict[str, Any]]:
    """Group parameters by weight decay: biases, norms and optionally embeddings do not decay."""
    tables = _embeddings(model)
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


def _embeddings(model: nn.Module) -> set[int]:
    """Identities of the weights of embeddings."""
    return {
        id(weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
    }


def set_rates(optimizer: torch.optim.Optimizer, rates: list[float]) -> None:
    """Set the learning rate of each parameter group.

    For a fused kernel on a GPU it is rounded to float32, as the tensor of a captured step holds it.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            on_gpu = group["params"][0].is_cuda
            group["lr"] = float(np.float32(rate)) if on_gpu and group.get("fused") else rate


def keep_rates_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Make the learning rates tensors, which a captured update reads at each replay."""
    for group in optimizer.param_groups:
        group["lr"] = torch.full((), group["lr"], device=group["params"][0].device)


def take_workspaces() -> None:
    """Make cuBLAS allocate its workspaces, by a product forward and backward.

    cuBLAS allocates a workspace with the first product of each thread (here the program's and
    autograd's) and keeps it. In the middle of a step it would take a piece of a large free block,
    whose segment could then never be freed: more than a gigabyte with a GPT's logits. Taken first,
    it has a segment of its own.
    """
    one = torch.ones(8, 8, requires_grad=True)
    (one @ one).sum().backward()  # type: ignore[no-untyped-call]


# ── what an optimizer holds ─────────────────────────────────────────────────────────────────────


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
        from trainfit.engine.step import update_once

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
