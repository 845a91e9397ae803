"""Optimizers: which weights decay, and updates that are made once or not at all.

AdamW has its state before the first step, and its operations are taken one at a time, so that an
update survives running out of memory. Any other optimizer is asked for its own step().
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.adamw import adamw

from trainfit.core.errors import BadInput, OutOfMemory, reason
from trainfit.engine.fsdp import local
from trainfit.engine.loop_settings import OptimizerSettings, optimizer_classes
from trainfit.engine.memory_errors import is_out_of_memory, retried, write_once

_HALF = (torch.bfloat16, torch.float16)


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Make the optimizer of the trained weights, wherever the model is."""
    keep_trained_in_float32(model)
    name = settings.kind.removesuffix("_fused")
    groups = parameter_groups(model, settings.weight_decay, settings.decay_embeddings)
    options: dict[str, Any] = {"lr": settings.learning_rate}
    if name == "adamw":
        options |= {"betas": settings.betas, "eps": settings.eps}
    if name == "muon":
        return _muon(model, groups, options, settings.options)
    kind = optimizer_classes()[name]
    if settings.kind.endswith("_fused"):
        options["fused"] = True
    elif not settings.options.get("fused"):
        # torch's default is foreach, whose temporaries are as large as the model.
        options["foreach"] = False
    return adopt(model, _made(kind, groups, options | settings.options))


def adopt(model: nn.Module, optimizer: object) -> torch.optim.Optimizer:
    """Check that an optimizer updates the trained weights, all and only these; give AdamW state."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"the optimizer is a {type(optimizer).__name__}"
        raise BadInput(what, "return a torch.optim.Optimizer")
    _check_usable(optimizer)
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
    if is_plain_adamw(optimizer):
        create_state(optimizer)
    return optimizer


def _check_usable(optimizer: torch.optim.Optimizer) -> None:
    """Raise BadInput where the loop cannot call step() or set the learning rate."""
    needed = inspect.signature(optimizer.step).parameters.values()
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in needed):
        what = f"{type(optimizer).__name__}.step() needs a closure"
        raise BadInput(what, "use an optimizer that computes the loss once per step")
    if any("lr" not in group for group in optimizer.param_groups):
        what = f"a parameter group of {type(optimizer).__name__} has no lr"
        raise BadInput(what, "give each group one: the schedule scales it")


def is_plain_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether `update_once` can take the optimizer's operations one at a time."""
    groups = optimizer.param_groups
    return (
        type(optimizer) is torch.optim.AdamW
        and len({bool(group["fused"]) for group in groups}) == 1
        and all(group["fused"] or group["foreach"] is False for group in groups)
        and not any(isinstance(group["lr"], Tensor) and not group["fused"] for group in groups)
        and not any(group[name] for group in groups for name in _UNUSUAL)
    )


_UNUSUAL = ("amsgrad", "maximize", "capturable", "differentiable")


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


class Combined(torch.optim.Optimizer):
    """Several optimizers that are used as one, each for weights of its own."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        """Share the parameter groups of `optimizers`."""
        self.optimizers = optimizers
        super().__init__([p for one in optimizers for p in trained_parameters(one)], {})
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update with each of them."""
        for optimizer in self.optimizers:
            _update_whole(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Collect the states of all of them, by number."""
        return {str(n): one.state_dict() for n, one in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[str(number)])
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]


def _muon(
    model: nn.Module,
    groups: list[dict[str, Any]],
    options: dict[str, Any],
    muon_options: dict[str, Any],
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
        (torch.optim.AdamW, others, options | {"foreach": False}),
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


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the parameters that the optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
    """Make the learning rates tensors, which a captured update reads anew at each replay."""
    for group in optimizer.param_groups:
        group["lr"] = torch.full((), group["lr"], device=group["params"][0].device)


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create AdamW's state; torch would in the first step, where memory may run out."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count = torch.tensor(0.0, dtype=torch.float32)
            optimizer.state[parameter] = {
                "step": count.to(parameter.device) if group["fused"] else count,
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


@torch.no_grad()
def update_once(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Update every parameter that has a gradient, once, or none where it is not `finite`.

    AdamW's fused kernel reads `finite` on the device; others make the CPU wait for the answer.
    Memory may run out at any operation: torch's own step() would then have updated some parameters
    and counted others, so AdamW's operations are taken one at a time here.
    """
    plain = is_plain_adamw(optimizer)
    if plain and optimizer.param_groups[0]["fused"]:
        found_inf = retried(lambda: (~finite).float())
        counted = retried(lambda: finite.float())
        for group in optimizer.param_groups:
            for parameters in _alike(group["params"]):
                states = [optimizer.state[parameter] for parameter in parameters]
                _update_fused(parameters, states, group, found_inf, counted)
    elif isinstance(finite, FakeTensor) or retried(lambda: bool(finite)):
        if not plain:
            _update_whole(optimizer)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update_one(parameter, optimizer.state[parameter], group)


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


def _alike(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Group the parameters that have a gradient by device and dtype, as a fused kernel needs."""
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
    """Update by one fused kernel, then count the step."""
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
            found_inf=found_inf,
            **_options(group),
        )
    )
    write_once(counts, lambda left: torch._foreach_add_(left, [counted] * len(left)))


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


def take_workspaces() -> None:
    """Make cuBLAS allocate its workspaces, by a product forward and backward.

    cuBLAS allocates a workspace with the first product of each thread (here the program's and
    autograd's) and keeps it. In the middle of a step it would take a piece of a large free block,
    whose segment could then never be freed: more than a gigabyte with a GPT's logits. Taken first,
    it has a segment of its own.
    """
    one = torch.ones(8, 8, requires_grad=True)
    (one @ one).sum().backward()  # type: ignore[no-untyped-call]
