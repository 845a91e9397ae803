"""State of a model that a captured pass holds for: weights, modes, and what else it reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_UNTOUCHED = frozenset(("gradient_checkpointing", "forward", "_compiled_call_impl"))
"""Attributes of a module that may stand in the way."""
_READ = ("p", "_active_adapter", "_disable_adapters", "merged_adapters")
"""Attributes that passes read: the rate of a dropout, and the adapters of peft."""


class BodyState(NamedTuple):
    """The state of a body, as a key, and its weights that learn."""

    key: list[Any]
    learning: dict[int, nn.Parameter]
    """Weights that learn, by their identity."""
    places: list[tuple[dict[str, Any], str, nn.Parameter]]
    """Table, name and weight of every place that such a weight stands in."""

    @property
    def weights(self) -> list[nn.Parameter]:
        """Weights that learn, each once."""
        return list(self.learning.values())


def body_state(body: Any) -> BodyState | str:
    """Read the state of a body; return the reason where its passes cannot be captured.

    It is read before every step, so that it walks the modules by itself.
    """
    if (why := _process_obstacle(body)) is not None:
        return why
    state = BodyState([], {}, [])
    modules = [body]
    while modules:
        module = modules.pop()
        own = module.__dict__
        touched = not own.keys().isdisjoint(_UNTOUCHED)
        if touched or own[_HOOKS[0]] or own[_HOOKS[1]] or own[_HOOKS[2]] or own[_HOOKS[3]]:
            why = _module_obstacle(module, outermost=module is body)
            if why is not None:
                return why
        state.key.extend((id(module), own["training"]))
        if "p" in own or "_active_adapter" in own:
            state.key.extend([str(own.get(name)) for name in _READ])
        if own["_parameters"] and (why := _add_weights(state, own["_parameters"])) is not None:
            return why
        if own["_buffers"]:
            state.key.extend(
                [one.data_ptr() for one in own["_buffers"].values() if one is not None]
            )
        modules += [one for one in own["_modules"].values() if one is not None]
    return state


def _add_weights(state: BodyState, table: dict[str, Any]) -> str | None:
    for name, weight in table.items():
        if weight is None:
            continue
        if type(weight) is not nn.Parameter:
            return f"weights of the class {type(weight).__name__}"
        learns = weight.requires_grad
        state.key.extend((weight.data_ptr(), learns))
        if learns:
            state.learning[id(weight)] = weight
            state.places.append((table, name, weight))
    return None


def _module_obstacle(module: nn.Module, *, outermost: bool) -> str | None:
    """Reason that lies in one module; what is around the outermost one is not captured."""
    own = module.__dict__
    if own.get("gradient_checkpointing"):
        return "gradient checkpointing is on"
    if outermost:
        return None
    if any(own[name] for name in _HOOKS):
        return f"a hook on {type(module).__name__} inside of the model"
    if "forward" in own:
        return f"the forward of {type(module).__name__} inside of the model is replaced"
    if own.get("_compiled_call_impl") is not None:
        return f"{type(module).__name__} inside of the model is compiled"
    return None


def _process_obstacle(body: Any) -> str | None:
    """Reason that lies around a body."""
    if getattr(body, "_is_replica", False):
        return "it is a replica of DataParallel"
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1:
        return "several processes train together"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "the script captures a graph of its own"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is active"
    if torch._C._current_graph_task_id() != -1:
        return "the forward pass is computed again in the backward pass"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "tensors that are saved for the backward pass are watched, as by checkpointing"
    if getattr(body.config, "layerdrop", 0.0):
        return "layers are left out at random"
    if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return "a hook on all modules"
    return None
