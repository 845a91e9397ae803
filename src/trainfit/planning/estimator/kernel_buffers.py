"""Bytes that kernels allocate while they run, by operation and GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention.varlen  # makes the operation known

from trainfit.core.libraries import has
from trainfit.kernels import disentangled, efficient_packed, quantized  # noqa: F401 - known by it

aten = torch.ops.aten
_THREADS = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "12.0": 1536, "12.1": 1536}
"""Threads per SM by compute capability, where they are not 2048."""
_HALF = (torch.bfloat16, torch.float16)
_SUMS = 4 << 20
"""Partial sums of a convolution's weight gradient: 1 to 8 MiB were recorded."""
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward
_VARLEN_BACKWARD = (torch.ops.torch_attn._varlen_attn_backward, aten._flash_attention_backward)
_MUCH_SHARED = ("8.0", "9.0", "10.0")
"""Compute capabilities whose shared memory holds the largest tiles."""
_EFFICIENT = torch.ops.trainfit.efficient_attention
_EFFICIENT_BACKWARD = torch.ops.trainfit.efficient_attention_backward
_DISENTANGLED = torch.ops.trainfit.disentangled_attention
_DISENTANGLED_BACKWARD = torch.ops.trainfit.disentangled_attention_backward
_BITSANDBYTES = has("bitsandbytes")  # before it is hidden
_REDUCTIONS = {aten.sum.dim_IntList: 1, aten.mean.dim: 1, aten.linalg_vector_norm.default: 2}
"""Reductions over some dimensions, and which of their arguments names these."""
_QUANTIZED = (torch.ops.trainfit.quantized_linear, torch.ops.trainfit.quantized_linear_backward)


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


def _disentangled_backward(args: tuple[Any, ...]) -> int:
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
    _FLASH_BACKWARD: lambda args, _: _attention_backward(args[1]),
    **dict.fromkeys(_VARLEN_BACKWARD, _varlen),
    _EFFICIENT: lambda args, _: _efficient_forward(args[0]),
    _EFFICIENT_BACKWARD: lambda args, device: _efficient_backward(
        query=args[1], starts=args[4], longest=args[7], device=device
    ),
    _DISENTANGLED: lambda args, _: _distance_products(query=args[0], positions=args[3]),
    _DISENTANGLED_BACKWARD: lambda args, _: _disentangled_backward(args),
    **dict.fromkeys(_QUANTIZED, _quantized),
}
"""Bytes of the kernels of operations, by their arguments."""
