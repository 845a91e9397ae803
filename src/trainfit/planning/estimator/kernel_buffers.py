"""Bytes that kernels allocate while they run, and the results that compiled graphs allocate."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention.varlen  # makes the operation known
from torch import fx
from torch.utils.flop_counter import flop_registry

from trainfit.core.libraries import has
from trainfit.kernels import disentangled, efficient_packed, quantized  # noqa: F401 - known by it

aten, own = torch.ops.aten, torch.ops.trainfit
_THREADS = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "12.0": 1536, "12.1": 1536}
"""Threads per SM by compute capability, where they are not 2048."""
_HALF = (torch.bfloat16, torch.float16)
_SUMS = 4 << 20
"""Partial sums of a convolution's weight gradient: 1 to 8 MiB were recorded."""
_MUCH_SHARED = ("8.0", "9.0", "10.0")
"""Compute capabilities whose shared memory holds the largest tiles."""
_BITSANDBYTES = has("bitsandbytes")  # before it is hidden
_REDUCTIONS = {aten.sum.dim_IntList: 1, aten.mean.dim: 1, aten.linalg_vector_norm.default: 2}
"""Reductions over some dimensions, and which of their arguments names these."""


@dataclass(frozen=True, slots=True)
class Device:
    """Properties of a GPU that decide the size of kernels' buffers."""

    sm_count: int
    compute_capability: str

    @property
    def threads_per_sm(self) -> int:
        """Threads that one SM runs at a time."""
        return _THREADS.get(self.compute_capability, 2048)

    @property
    def blas_workspace(self) -> int:
        """Bytes that cuBLAS keeps for each thread that calls it."""
        return 32 << 20 if self.compute_capability.startswith(("9.", "10.")) else 8519680


def temporary_bytes(func: Any, args: tuple[Any, ...], device: Device) -> int:
    """Bytes that the kernel of an operation allocates while it runs."""
    if func in _REDUCTIONS:
        dims = args[_REDUCTIONS[func] :]  # without any, a reduction to one number
        return _column_sums(args[0], dims[0] if dims else None, device)
    found = _BUFFERS.get(func._overloadpacket)
    return 0 if found is None else found(args, device)


def _widened(shape: list[int], itemsize: int) -> int:
    """Bytes of a quantized weight in the dtype of its product.

    Without bitsandbytes a slice of it is looked up by indices of four bytes, in fp32.
    """
    slices = 0 if _BITSANDBYTES else 12 * min(quantized.SLICE, math.prod(shape) // 2)
    return quantized.widened_bytes(shape, itemsize) + slices


def _convolution(x: torch.Tensor, weight: torch.Tensor, stride: list[int], groups: int) -> int:
    """Workspace of the algorithm that cuDNN's heuristics choose, without benchmark mode.

    cuDNN multiplies in channels-last layout with padded channels, and converts tensors that are not
    so. This fits what was recorded on an H200; a product in disguise and a depthwise convolution
    need no conversion.
    """
    product = weight.shape[2:].numel() == 1 and set(stride) == {1}
    if x.dim() < 3 or product or groups == x.shape[1]:
        return 0
    pixels = x.shape[2:].numel() // math.prod(stride)
    unit = 16 // x.element_size() if x.dtype in _HALF else 4
    last = any(t.dim() == 4 and _is_channels_last(t) for t in (x, weight))
    made = x.shape[0] * weight.shape[0] * pixels
    converted = [
        elements // channels * _multiple(channels, unit)
        for channels, elements in ((x.shape[1], x.numel()), (weight.shape[0], made))
        if not last or channels % unit
    ]
    return x.element_size() * (sum(converted) + (weight.numel() if converted else 0))


def _is_channels_last(x: torch.Tensor) -> bool:
    last = x.is_contiguous(memory_format=torch.channels_last)
    return last and not x.is_contiguous()


def _attention_backward(query: torch.Tensor) -> int:
    """Bytes of the query's gradient in fp32, and one number per row."""
    batch, heads, length, head = query.shape
    return 4 * batch * heads * length * (_multiple(head, 32) + 1) + 256


def _varlen_backward(query: torch.Tensor, key: torch.Tensor, starts: torch.Tensor) -> int:
    """Bytes of attention's backward pass on a packed row, with up to 128 rows more per sequence.

    Grouped keys and values first get a gradient for each head of the query.
    """
    tokens, heads, head = query.shape
    rows = tokens + 128 * (len(starts) - 1)
    grouped = key.shape[1] != heads
    expanded = 2 * key.shape[0] * heads * head * key.element_size() if grouped else 0
    return 4 * rows * heads * (_multiple(head, 32) + 1) + expanded


def _efficient_forward(query: torch.Tensor) -> int:
    """Bytes of the result in fp32, which heads above 128 in half precision are summed in."""
    return 4 * query.numel() if query.dtype in _HALF and query.shape[-1] > 128 else 0


def _efficient_backward(
    query: torch.Tensor, starts: torch.Tensor, longest: int, device: Device
) -> int:
    """Bytes that the memory-efficient backward pass allocates on a packed row.

    The query's gradient is summed in fp32 tiles, each with a lock, and every sequence has as many
    tiles as the longest. Gradients of keys and values that do not fit the registers have tiles too.
    One number per row and head is stored besides; in fp32 a product of the query's size is first.
    """
    tokens, heads, head = query.shape
    half, pairs = query.dtype in _HALF, (starts.shape[0] - 1) * heads
    large = half and head <= 128 and device.compute_capability in _MUCH_SHARED
    height, width = (64, 64) if head <= 64 else (128 if large else 64, 128)
    tiles = math.ceil(longest / height) * math.ceil(head / width)
    sums = tiles * (16 + 4 * height * width)
    if half and head > height:
        splits = max(1, min(math.ceil(longest / 64), 200 // pairs))
        sums += 2 * 4 * splits * 64 * _multiple(head, 64)
    product = 0 if half else 4 * query.numel()
    return max(pairs * sums + 4 * tokens * heads, product)


def _distance_products(query: torch.Tensor, positions: torch.Tensor) -> int:
    """Bytes of one product per token, head, distance and side of a pair."""
    tokens, heads, _ = query.shape
    return positions.shape[0] * positions.shape[1] * heads * tokens * query.element_size()


def _column_sums(x: torch.Tensor, dims: list[int] | None, device: Device) -> int:
    """Bytes of partial sums of a reduction over the leading dimensions.

    A bias's gradient is one, and so are the columns' norms in Adafactor's update.

    The arithmetic is that of torch's reduction kernels: 128 threads of four outputs each, as many
    blocks as the GPU holds, at least 16 values each.
    """
    leading = dims and sorted(d % x.dim() for d in dims) == list(range(x.dim() - 1))
    outputs = x.shape[-1] if x.dim() else 0
    if not leading or outputs < 128 or outputs % 4:
        return 0
    width, height = 32, 4
    values = math.ceil(x.numel() // outputs / height)
    columns = math.ceil(outputs / (4 * width))
    room = device.sm_count * (device.threads_per_sm // (width * height))
    if values < 16 * height or columns > room:
        return 0
    blocks = max(min(math.ceil(room / columns), math.ceil(values / 16)), math.ceil(values / 256))
    return 4 * outputs * blocks * 4 * width if blocks > 1 else 0


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _disentangled_backward(args: tuple[Any, ...], _device: Device) -> int:
    """Bytes of the products, and of the parts that two gradients of positions are summed from."""
    products = _distance_products(query=args[1], positions=args[4])
    return products + 4 * (disentangled.SPLITS + 1) * int(args[4].numel())


def _varlen(args: tuple[Any, ...], _device: Device) -> int:
    return _varlen_backward(query=args[1], key=args[2], starts=args[6])


def _quantized(args: tuple[Any, ...], _device: Device) -> int:
    return _widened(args[-1], args[0].element_size())


_BUFFERS: dict[Any, Callable[[tuple[Any, ...], Device], int]] = {
    aten.convolution: lambda args, _: _convolution(args[0], args[1], args[3], args[8]),
    aten.convolution_backward: lambda args, _: (
        _convolution(args[1], args[2], args[4], args[9]) + _SUMS
    ),
    aten._scaled_dot_product_flash_attention_backward: lambda args, _: _attention_backward(args[1]),
    aten._flash_attention_backward: _varlen,
    torch.ops.torch_attn._varlen_attn_backward: _varlen,
    own.efficient_attention: lambda args, _: _efficient_forward(args[0]),
    own.efficient_attention_backward: lambda args, device: _efficient_backward(
        query=args[1], starts=args[4], longest=args[7], device=device
    ),
    own.disentangled_attention: lambda args, _: _distance_products(args[0], positions=args[3]),
    own.disentangled_attention_backward: _disentangled_backward,
    own.quantized_linear: _quantized,
    own.quantized_linear_backward: _quantized,
}
"""Bytes of the kernels of operations, by their arguments."""


# ── compiled graphs ──────────────────────────────────────────────────────────────────────────────
# Kernels of libraries (matrix products, attention) and reductions have buffers, as has whatever
# those read and whatever leaves the graph; all else is fused into its readers and never in memory.

_ENDING = "sum mean amax amin var_mean var prod any max min argmax index_put cumsum sort"
_ENDS_KERNEL = frozenset(getattr(aten, name) for name in _ENDING.split())
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
        elif _packet(node) in _ENDS_KERNEL:
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
