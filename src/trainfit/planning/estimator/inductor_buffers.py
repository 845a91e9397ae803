"""Which results of a compiled graph are in memory, and how long.

Kernels of libraries (matrix products, attention) and reductions have buffers, as has whatever those
read and whatever leaves the graph; all else is fused into its readers and never in memory.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

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
"""Operations that end a fused kernel, so that their result gets a buffer."""
_VIEWS = frozenset({aten.reshape, aten._unsafe_view, aten.alias, aten.lift_fresh, aten.detach})
_MOST_READS = 4
"""Number of buffers read for a shared value from which Inductor stores it in one of its own."""


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "_overloadpacket", None)


def is_view(node: fx.Node) -> bool:
    """True if the result shares the memory of an input."""
    target = node.target
    return (
        target is operator.getitem
        or bool(getattr(target, "is_view", False))
        or _packet(node) in _VIEWS
    )


def is_library(node: fx.Node) -> bool:
    """True if Inductor calls a library's kernel for the node."""
    if node.op != "call_function" or is_view(node):
        return False
    namespace = getattr(node.target, "namespace", "aten")
    return _packet(node) in flop_registry or namespace not in ("aten", "prims")


def _base(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def find_buffers(nodes: list[fx.Node]) -> set[fx.Node]:
    """Find the nodes whose results Inductor puts into memory."""
    buffers: set[fx.Node] = set()
    for node in nodes:
        if is_library(node):
            buffers |= {node, *map(_base, node.all_input_nodes)}
        elif _packet(node) in _REDUCTIONS:
            buffers.add(node)
        elif node.op == "output":
            buffers |= set(map(_base, node.all_input_nodes))
    for node in nodes:
        shared = node.op == "call_function" and len(node.users) > 1 and not is_view(node)
        if shared and node not in buffers and len(_leaves(node, buffers)) > _MOST_READS:
            buffers.add(node)
    return {node for node in buffers if node.op == "call_function"}


def views_in_use(nodes: list[fx.Node]) -> set[fx.Node]:
    """Find the views that a library's kernel reads or that leave the graph; others are fused."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        read = any(user.op == "output" or user in found or is_library(user) for user in node.users)
        if read and node.op == "call_function" and is_view(node):
            found.add(node)
    return found


def _leaves(node: fx.Node, buffers: set[fx.Node]) -> set[fx.Node]:
    """Find the buffers and inputs that are read to compute a node."""
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


def last_uses(nodes: list[fx.Node], buffers: set[fx.Node]) -> dict[int, list[fx.Node]]:
    """Group values by the place of their last use; a fused value is used where it is read."""
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


def kernel_reads(nodes: list[fx.Node], buffers: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Buffers that each fused kernel reads, without those that it computes itself."""
    phase = 0
    phases: dict[fx.Node, int] = {}
    reads: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        library = is_library(node)
        phase += library
        phases[node] = -1 if library or node.op == "placeholder" else phase
        if node in buffers and not library:
            reads[node] = [leaf for leaf in _leaves(node, buffers) if phases[leaf] != phase]
    return reads


def overwritten(
    nodes: list[fx.Node], buffers: set[fx.Node], ends: dict[int, list[fx.Node]]
) -> dict[fx.Node, fx.Node]:
    """Map buffers to the ones whose memory they reuse, as their last reader.

    Inductor writes in place if every element is computed from its own place. Inputs of the graph
    are never reused: the caller may still hold them.
    """
    found: dict[fx.Node, fx.Node] = {}
    for at, node in enumerate(nodes):
        if node not in buffers or not _is_pointwise(node):
            continue
        in_place = _read_in_place(node, buffers)
        ended = [each for each in ends.get(at, ()) if each in in_place and _same_type(each, node)]
        if ended:
            found[node] = ended[0]
    return found


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and not is_library(node)


def _same_type(one: fx.Node, other: fx.Node) -> bool:
    same: bool = one.meta["val"].dtype == other.meta["val"].dtype
    return same


def _read_in_place(node: fx.Node, buffers: set[fx.Node]) -> set[fx.Node]:
    """Find the buffers of which a node reads only the elements at the places that it writes."""
    found: dict[fx.Node, bool] = {}
    left = [(node, True)]
    seen: set[tuple[fx.Node, bool]] = set()
    while left:
        reader, in_place = left.pop()
        for given in reader.all_input_nodes:
            step = (given, in_place and _keeps_places(given, reader))
            if given in buffers:
                found[given] = found.get(given, True) and step[1]
            elif step not in seen:
                seen.add(step)
                left.append(step)
    return {each for each, in_place in found.items() if in_place}


def _keeps_places(given: fx.Node, reader: fx.Node) -> bool:
    """True if each element of the result lies where the element it is computed from lies."""
    read, made = given.meta.get("val"), reader.meta.get("val")
    if not isinstance(read, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    if is_view(reader):
        return read.numel() == made.numel()
    same = (read.shape, read.stride()) == (made.shape, made.stride())
    return same and _is_pointwise(reader)
