"""State of a model that a captured pass holds for, and its compiled blocks while a pass runs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trainfit.core import caches
from trainfit.core.errors import TrainfitWarning
from trainfit.core.files import cache_folder
from trainfit.runtime import compile_blocks, compiled_folder, forget_if_full, repeated_blocks

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Attributes of peft's layers that a pass reads."""
_RATES = ("p", "attention_dropout", "dropout")
"""Attributes of layers that hold the rate of a dropout."""

Table = dict[str, Any]


class BodyState(NamedTuple):
    """The state of a body: a key of all that its passes read, and its weights that learn."""

    key: list[Any]
    sizes: list[int]
    """Number of attributes of each module inside: one more may be a forward that was replaced."""
    inner: list[Table]
    """Attributes of each module inside of the body, whose own ones lead here: a cycle would keep
    its memory until garbage is collected."""
    weights: list[nn.Parameter]
    """Weights that learn, each once."""
    places: list[tuple[Table, str, nn.Parameter]]
    """Table, name and weight of every place that such a weight stands in."""


def body_state(body: Any, known: BodyState | None = None) -> BodyState | str:
    """Read the state of a body; return the reason where its passes cannot be captured.

    It is read before every step: if nothing has changed since, the `known` one is returned.
    """
    if (why := _process_obstacle(body)) is not None:
        return why
    same = known is not None and known.sizes == [*map(len, known.inner)]
    if known is not None and same and known.key == _key([body.__dict__, *known.inner]):
        return known
    found = list(_walk(body))
    for module in found:
        if (why := _module_obstacle(module, outermost=module is body)) is not None:
            return why
    tables = [module.__dict__ for module in found]
    places = [
        (table["_parameters"], name, weight)
        for table in tables
        for name, weight in table["_parameters"].items()
        if weight is not None and weight.requires_grad
    ]
    weights = {id(weight): weight for _, _, weight in places}
    inner = tables[1:]  # around the outermost one nothing is captured
    return BodyState(_key(tables), [*map(len, inner)], inner, list(weights.values()), places)


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those inside of it, a shared one at each of its places."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child)


def _key(modules: list[Table]) -> list[Any]:
    first, second, third, fourth = HOOKS
    weights = [one for own in modules for one in own["_parameters"].values() if one is not None]
    buffers = [one for own in modules if own["_buffers"] for one in own["_buffers"].values()]
    adapted = [own for own in modules if "_active_adapter" in own]
    return [
        # The modules themselves: one that replaces a freed one may have its address.
        [one for own in modules for one in own["_modules"].values()],
        [own["training"] for own in modules],
        [own.get(name) for name in _RATES for own in modules],
        [own.get("gradient_checkpointing") for own in modules],
        [bool(own[first] or own[second] or own[third] or own[fourth]) for own in modules[1:]],
        [id(one) for one in weights],
        [one.data_ptr() for one in weights],
        [one.requires_grad for one in weights],
        [one.data_ptr() for one in buffers if one is not None],
        [str(own.get(name)) for own in adapted for name in _ADAPTERS],
    ]


def _module_obstacle(module: nn.Module, *, outermost: bool) -> str | None:
    """Reason that lies in one module; hooks around the outermost one are not captured."""
    own = module.__dict__
    if own.get("gradient_checkpointing"):
        return "gradient checkpointing is on"
    odd = [type(one) for one in own["_parameters"].values() if one is not None]
    for kind in odd:
        if kind is not nn.Parameter:
            return f"weights of the class {kind.__name__}"
    if outermost:
        return None
    if any(own[name] for name in HOOKS):
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


_LOG = logging.getLogger("trainfit")


@dataclass(eq=False, repr=False)
class BodyBlocks:
    """Compiled calls of a body's repeated blocks, for any number of tokens, while a pass runs.

    They are its own calls again after each pass, so that evaluation, copies and whatever looks at
    the model see nothing of them.
    """

    backend: str | Callable[..., Any] = "inductor"
    off: bool = False
    """True while blocks are to run as they are."""
    obstacle: str | None = None
    """Reason why nothing is compiled from here on."""
    code: str = ""
    """Facts that decide the compiled code, as text."""
    _calls: dict[nn.Module, Any] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        """Copy and pickle as an empty one: a copy has blocks of its own."""
        return BodyBlocks, (self.backend, self.off)

    @property
    def on(self) -> bool:
        return not self.off and self.obstacle is None

    @contextmanager
    def inside(self, body: nn.Module) -> Iterator[None]:
        """Run the blocks of a body compiled inside of a `with`."""
        if not self._calls:
            self._calls = self._compiled(body)
        for block, call in self._calls.items():
            block._compiled_call_impl = call
        try:
            yield
        finally:
            for block in self._calls:
                block._compiled_call_impl = None

    def _compiled(self, body: nn.Module) -> dict[nn.Module, Any]:
        """Prepare the calls; torch compiles at the first one."""
        blocks = repeated_blocks(body)
        if not blocks:
            self.stop("it has no repeated blocks")
            return {}
        forget_if_full()
        compile_blocks(body, dynamic=True, backend=self.backend, failed=self.stop)
        return {block: block._compiled_call_impl for block in blocks}

    @property
    def place(self) -> Path | None:
        """File that tells that this code was compiled here, while torch has it in its cache."""
        if self.backend == "inductor" and (folder := compiled_folder()) is not None:
            facts = repr((self.code, folder, caches.libraries()))
            digest = hashlib.sha256(facts.encode()).hexdigest()[:32]
            with suppress(TrainfitWarning):  # of no cache; some scripts have warnings as errors
                return cache_folder() / "compiled" / f"{digest}.json"
        return None

    def stop(self, why: str) -> None:
        """Compile nothing from here on; say why."""
        self.obstacle = why
        _LOG.warning("compile: blocks run as they are from here on: %s", why)
