"""Compiled code on fake tensors: the allocations and kernels that torch.compile would make.

AOTAutograd traces a block on fakes, and its partitioner decides what is kept for the backward pass.
Inductor's treatment of the two graphs is modelled by kernel_buffers.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from itertools import count
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import traceback
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from trainfit.kernels.saved_on_host import LEAST_BUDGET, keep_random
from trainfit.planning.estimator.fused_graphs import FusedGraph, like

traced_blocks: Counter[str] = Counter()
"""How calls of torch.compile were followed in this process: traced, eager, or with graphs."""
_UNTRACEABLE = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, LookupError)
_GRAPHS = ("reduce-overhead", "max-autotune")


def install() -> None:
    """Replace torch.compile in this process: modules are traced, functions stay eager."""
    setattr(torch, "compile", _compile)  # noqa: B010
    setattr(nn.Module, "compile", lambda module, **options: _compile(module, **options))  # noqa: B010


def _compile(model: Any = None, **options: Any) -> Any:
    if model is None:
        return lambda function: _compile(function, **options)
    if options.get("mode") in _GRAPHS:
        traced_blocks["graphs"] += 1
    if not isinstance(model, nn.Module):
        return _eager(model)
    simulate([model])
    whole: Any = model._compiled_call_impl

    def attempt(*args: Any, **kwargs: Any) -> Any:
        try:
            return whole(*args, **kwargs)
        except _UNTRACEABLE:  # Dynamo would break the graph, which is not followed
            traced_blocks.pop("traced", None)
            model._compiled_call_impl = _eager(model._call_impl)
            return model._compiled_call_impl(*args, **kwargs)

    model._compiled_call_impl = attempt
    return model


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        traced_blocks["eager"] += 1
        return function(*args, **kwargs)

    return call


def simulate(
    blocks: Iterable[nn.Module], carriers: Iterable[type] = (), budget: float = 1.0
) -> None:
    """Make blocks run as compiled ones; those that are alike are traced once.

    `carriers` are dataclasses that bring tensors to a block among its arguments. `budget` is the
    share of the activations that is kept for the backward pass.
    """
    traced_blocks["traced"] += 1
    for kind in carriers:
        _register(kind)
    # The backward graph is copied before it is handed over, and fake constants cannot be.
    setattr(fx.GraphModule, "__deepcopy__", lambda graph, _memo: graph)  # noqa: B010
    traced: dict[Any, Callable[..., Any]] = {}
    for block in blocks:
        block._compiled_call_impl = _call(block, traced, budget)


def _register(kind: type) -> None:
    if kind in pytree.SUPPORTED_NODES:
        return
    names = [field.name for field in dataclasses.fields(kind)]
    pytree.register_pytree_node(
        kind,
        lambda item: ([getattr(item, name) for name in names], None),
        lambda values, _context: kind(*values),
    )


def _call(
    block: nn.Module, traced: dict[Any, Callable[..., Any]], budget: float
) -> Callable[..., Any]:
    """Return the call of a compiled block; `traced` is shared by the blocks of one model.

    They differ by their weights alone. Blocks of another model may differ in dropout or
    checkpointing, which no tensor shows.
    """
    parameters = dict(block.named_parameters())
    names, weights = list(parameters), list(parameters.values())

    def call(*args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        places = [at for at, item in enumerate(flat) if isinstance(item, torch.Tensor)]
        tensors = [flat[at] for at in places]
        key = (
            _signature([*weights, *tensors]),
            type(block),
            block.training,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        )
        if key not in traced:
            constants = [None if at in places else item for at, item in enumerate(flat)]
            traced[key] = _trace(block, names, constants, places, spec, budget)
            _trace_now(traced[key], weights, tensors)
        return traced[key](weights, tensors)

    return call


def _trace_now(
    function: Callable[..., Any], weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> None:
    """Call it once outside of the recording: the first call traces, and keeps its inputs."""
    # Checkpointing counts saved tensors, so it must not see those of this call.
    kept = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    mode = detect_fake_mode([*weights, *tensors]) or nullcontext()
    # No Python is written for the graphs, since FusedGraph calls their nodes.
    with _disable_current_modes(), mode, kept, _use_lazy_graph_module(True):
        function(weights, [like(one).requires_grad_(one.requires_grad) for one in tensors])


def _signature(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def _trace(
    block: nn.Module,
    names: list[str],
    constants: list[Any],
    places: list[int],
    spec: Any,
    budget: float,
) -> Callable[..., Any]:
    _import_matcher()
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table

    def plain(weights: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        flat = list(constants)
        for at, tensor in zip(places, tensors, strict=True):
            flat[at] = tensor
        args, kwargs = pytree.tree_unflatten(flat, spec)
        named = dict(zip(names, weights, strict=True))
        with stateless._reparametrize_module(block, named), _marking_checkpoints():
            return block._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return aot_function(
        plain,
        fw_compiler=lambda graph, _inputs: FusedGraph(graph),
        bw_compiler=lambda graph, _inputs: FusedGraph(graph),
        partition_fn=functools.partial(_partition, budget=budget),
        decompositions=select_decomp_table(),
    )


def _import_matcher() -> None:
    """Import Inductor's pattern matcher, which the partitioner needs, without its lowerings.

    They are 150 modules, for one function that only patterns of Inductor call.
    """
    name = "torch._inductor.lowering"
    if name in sys.modules:
        return
    stand_in: Any = ModuleType(name)
    stand_in.fallback_node_due_to_unsupported_type = None
    sys.modules[name] = stand_in
    with suppress(ImportError):  # another torch needs more of it
        import_module("torch._inductor.pattern_matcher")
    del sys.modules[name]


@contextmanager
def _marking_checkpoints() -> Iterator[None]:
    """Mark checkpointed operations inside a block for the partitioner, as torch.compile does.

    Traced plainly, a checkpoint would compute everything twice in one graph, and duplicates are
    merged.
    """
    numbers = count()

    def marked(*_arguments: Any, **_named: Any) -> Iterator[None]:
        with traceback.preserve_node_meta():  # and they are put back after it
            traceback.current_meta["recompute"] = checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
            traceback.current_meta["ac_graph_id"] = next(numbers)
            yield

    with _exchanged(checkpoint, "_checkpoint_without_reentrant_generator", marked):
        yield


def _partition(joint: fx.GraphModule, inputs: Any, *, budget: float, **options: Any) -> Any:
    """Split into forward and backward graph with torch's partitioner."""
    from torch._functorch import config, partitioners

    def unchanged(_joint: Any, forward: Any, backward: Any, *_rest: Any) -> tuple[Any, Any]:
        return forward, backward

    # On a GPU the random state of recomputed operations is in a generator, not in a tensor.
    with (
        _exchanged(partitioners, "functionalize_rng_ops", unchanged),
        config.patch(activation_memory_budget=max(budget, LEAST_BUDGET)),
    ):
        if budget < 1:
            keep_random(joint.graph)
        return partitioners.min_cut_rematerialization_partition(joint, inputs, **options)


@contextmanager
def _exchanged(module: Any, name: str, other: Any) -> Iterator[None]:
    own = getattr(module, name)
    setattr(module, name, other)
    try:
        yield
    finally:
        setattr(module, name, own)
