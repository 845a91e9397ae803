"""A compiled block on fake tensors: what torch.compile would keep, allocate and run.

AOTAutograd traces the block for real, here on fakes, and its partitioner decides what is kept for
the backward pass. What Inductor then does with the two graphs is modelled: kernels of libraries
(matrix products, attention) and reductions have buffers, as has whatever those read and whatever
leaves the graph; all else is fused into its readers and never in memory.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.flop_counter import flop_registry

from trainfit.planning.recorder import Recorder
from trainfit.planning.timing import Work
from trainfit.planning.work import tensor_bytes

aten = torch.ops.aten
_REDUCTIONS = frozenset(
    {
        aten.sum,
        aten.mean,
        aten.amax,
        aten.amin,
        aten.var_mean,
        aten.var,
        aten.prod,
        aten.any,
        aten.max,
        aten.min,
        aten.argmax,
        aten.index_put,
        aten.cumsum,
        aten.sort,
    }
)
"""What ends a fused kernel, or is one of its own: its result has a buffer."""
_VIEWS = frozenset({aten.reshape, aten._unsafe_view, aten.alias, aten.lift_fresh, aten.detach})
_MOST_READS = 4
"""Inductor gives a shared value a buffer rather than read so many others over again."""


def simulate(blocks: Iterable[nn.Module], carriers: Iterable[type] = ()) -> None:
    """Have the blocks run as compiled ones do; those that are alike are traced once.

    `carriers` are dataclasses that bring tensors to a block among its arguments.
    """
    for kind in carriers:
        _register(kind)
    # The backward graph is copied before it is handed over, and fake constants cannot be.
    setattr(fx.GraphModule, "__deepcopy__", lambda graph, _memo: graph)  # noqa: B010
    for block in blocks:
        block._compiled_call_impl = _call(block)


def _register(kind: type) -> None:
    if kind in pytree.SUPPORTED_NODES:
        return
    names = [field.name for field in dataclasses.fields(kind)]
    pytree.register_pytree_node(
        kind,
        lambda item: ([getattr(item, name) for name in names], None),
        lambda values, _context: kind(*values),
    )


@cache
def _traced() -> dict[Any, Callable[..., Any]]:
    """What was traced in this process, by what decides the graph."""
    return {}


def _call(block: nn.Module) -> Callable[..., Any]:
    traced = _traced()
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
            traced[key] = _trace(block, names, constants, places, spec)
            _trace_now(traced[key], weights, tensors)
        return traced[key](weights, tensors)

    return call


def _trace_now(
    function: Callable[..., Any], weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> None:
    """Call it once, unseen: the first call traces it, and keeps what it was called with."""
    # Checkpointing counts what is kept, so what this call keeps must not reach it.
    kept = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with _disable_current_modes(), detect_fake_mode([*weights, *tensors]) or nullcontext(), kept:
        function(weights, [_like(one).requires_grad_(one.requires_grad) for one in tensors])


def _signature(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def _trace(
    block: nn.Module, names: list[str], constants: list[Any], places: list[int], spec: Any
) -> Callable[..., Any]:
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def plain(weights: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        flat = list(constants)
        for at, tensor in zip(places, tensors, strict=True):
            flat[at] = tensor
        args, kwargs = pytree.tree_unflatten(flat, spec)
        with stateless._reparametrize_module(block, dict(zip(names, weights, strict=True))):
            return block._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return aot_function(
        plain,
        fw_compiler=lambda graph, _inputs: _Fused(graph),
        bw_compiler=lambda graph, _inputs: _Fused(graph),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


class _Fused:
    """One of the two graphs, run node by node; only buffers are made, and seen by the recorder.

    What is fused away has no value: nobody reads it but what is fused as well.
    """

    _boxed_call = True  # the caller gives its arguments away, so that they can be freed

    def __init__(self, graph: fx.GraphModule) -> None:
        self._module = graph
        self._nodes = list(graph.graph.nodes)
        self._buffers = _buffers(self._nodes)
        self._made = self._buffers | _views_in_use(self._nodes)
        self._ends = _ends(self._nodes, self._buffers)
        self._reads = _reads(self._nodes, self._buffers)

    def __call__(self, args: list[Any]) -> Any:
        recorder = _recorder()
        values: dict[fx.Node, Any] = {}
        inputs = deque(args)
        args.clear()
        for at, node in enumerate(self._nodes):
            if node.op == "placeholder":
                values[node] = inputs.popleft()
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], values.__getitem__)
            elif node.op == "get_attr" or node in self._made:
                values[node] = self._run(node, values, recorder)
            for ended in self._ends.get(at, ()):
                values.pop(ended, None)
        raise AssertionError("a graph without an output")

    def _run(self, node: fx.Node, values: dict[fx.Node, Any], recorder: Recorder | None) -> Any:
        if node.op == "get_attr":
            return getattr(self._module, str(node.target))
        if _is_library(node) or _is_view(node):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            seen = recorder if _is_library(node) else None
            with self._unseen() if seen is None else seen.compiled():
                return node.target(*args, **kwargs)  # type: ignore[operator]
        with self._unseen():
            result = pytree.tree_map_only(torch.Tensor, _like, node.meta["val"])
        if recorder is not None:
            recorder.follow(t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
            recorder.note(self._fused_work(node, result, values))
        return result

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """In the fakes' own mode, which is not that of the step that the graph was traced for."""
        modes = _get_current_dispatch_mode_stack()
        fakes = next((mode for mode in modes if isinstance(mode, FakeTensorMode)), None)
        with _disable_current_modes(), fakes or nullcontext():
            yield

    def _fused_work(self, node: fx.Node, result: Any, values: dict[fx.Node, Any]) -> Work:
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        leaves = [values.get(leaf) for leaf in self._reads[node]]
        read = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return Work(
            kind="copy",
            flops=0,
            skipped=0,
            nbytes=sum(map(tensor_bytes, outputs)) + sum(map(tensor_bytes, read)),
            half=True,
            aligned=True,
            backward=torch._C._current_graph_task_id() != -1,
            update=False,
            compiled=True,
        )


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _recorder() -> Recorder | None:
    """The one that is at work, if any."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in modes if isinstance(mode, Recorder)), None)


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "_overloadpacket", None)


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return (
        target is operator.getitem
        or bool(getattr(target, "is_view", False))
        or _packet(node) in _VIEWS
    )


def _is_library(node: fx.Node) -> bool:
    """Whether Inductor calls a kernel that it did not make."""
    if node.op != "call_function" or _is_view(node):
        return False
    namespace = getattr(node.target, "namespace", "aten")
    return _packet(node) in flop_registry or namespace not in ("aten", "prims")


def _base(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _buffers(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes whose results are in memory."""
    buffers: set[fx.Node] = set()
    for node in nodes:
        if _is_library(node):
            buffers |= {node, *map(_base, node.all_input_nodes)}
        elif _packet(node) in _REDUCTIONS:
            buffers.add(node)
        elif node.op == "output":
            buffers |= set(map(_base, node.all_input_nodes))
    for node in nodes:
        shared = node.op == "call_function" and len(node.users) > 1 and not _is_view(node)
        if shared and node not in buffers and len(_leaves(node, buffers)) > _MOST_READS:
            buffers.add(node)
    return {node for node in buffers if node.op == "call_function"}


def _views_in_use(nodes: list[fx.Node]) -> set[fx.Node]:
    """The views that a library's kernel reads or that leave the graph; the others are fused."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        read = any(user.op == "output" or user in found or _is_library(user) for user in node.users)
        if read and node.op == "call_function" and _is_view(node):
            found.add(node)
    return found


def _leaves(node: fx.Node, buffers: set[fx.Node]) -> set[fx.Node]:
    """What is read from memory to compute a node."""
    found: set[fx.Node] = set()
    left = list(node.all_input_nodes)
    seen: set[fx.Node] = set()
    while left:
        each = _base(left.pop())
        if each in seen:
            continue
        seen.add(each)
        if each in buffers or each.op == "placeholder":
            found.add(each)
        else:
            left += each.all_input_nodes
    return found


def _ends(nodes: list[fx.Node], buffers: set[fx.Node]) -> dict[int, list[fx.Node]]:
    """Where each value is needed for the last time; a fused one is needed where it is read."""
    place = {node: at for at, node in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        reached = [
            place[user] if user in buffers or user.op == "output" else last[user]
            for user in node.users
        ]
        last[node] = max(reached, default=place[node])
    ends: dict[int, list[fx.Node]] = {}
    for node, at in last.items():
        ends.setdefault(at, []).append(node)
    return ends


def _reads(nodes: list[fx.Node], buffers: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """What a fused kernel has to read: what it has not just computed itself."""
    phase = 0
    phases: dict[fx.Node, int] = {}
    reads: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        library = _is_library(node)
        phase += library
        phases[node] = -1 if library or node.op == "placeholder" else phase
        if node in buffers and not library:
            reads[node] = [leaf for leaf in _leaves(node, buffers) if phases[leaf] != phase]
    return reads
