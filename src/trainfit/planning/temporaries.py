"""Memory that CUDA's kernels take while they run, and that no tensor of the program shows.

It is gone when the kernel ends, but it can raise the peak, and more often what is reserved. The
sizes are those that the allocator was asked for on a GPU (torch 2.11); what is not here was too
small to matter there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention.varlen  # makes the operation known

from trainfit.kernels import disentangled

aten = torch.ops.aten
_THREADS = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "12.0": 1536, "12.1": 1536}
"""Threads that an SM holds, by compute capability; 2048 elsewhere."""
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward
_VARLEN_BACKWARD = torch.ops.torch_attn._varlen_attn_backward
_DISENTANGLED = torch.ops.trainfit.disentangled_attention
_DISENTANGLED_BACKWARD = torch.ops.trainfit.disentangled_attention_backward


@dataclass(frozen=True, slots=True)
class Device:
    """What of a GPU decides the size of a kernel's buffers."""

    sm_count: int
    compute_capability: str

    @property
    def threads_per_sm(self) -> int:
        """Threads that one SM holds at a time."""
        return _THREADS.get(self.compute_capability, 2048)

    @property
    def blas_workspace(self) -> int:
        """What cuBLAS keeps for each thread that calls it."""
        return 32 << 20 if self.compute_capability.startswith(("9.", "10.")) else 8519680


def temporary_bytes(func: Any, args: tuple[Any, ...], device: Device) -> int:
    """What the kernel of an operation takes while it runs."""
    if func is aten.sum.dim_IntList:
        return _column_sums(args[0], args[1], device)
    if func._overloadpacket is _FLASH_BACKWARD:
        return _attention_backward(args[1])
    if func._overloadpacket is _VARLEN_BACKWARD:
        return _varlen_backward(query=args[1], key=args[2], starts=args[6])
    if func._overloadpacket is _DISENTANGLED:
        return _distance_products(query=args[0], positions=args[3])
    if func._overloadpacket is _DISENTANGLED_BACKWARD:
        # Beside the products, the parts that each of the two gradients of positions is summed of.
        products = _distance_products(query=args[1], positions=args[4])
        return products + 4 * (disentangled.SPLITS + 1) * int(args[4].numel())
    return 0


def _attention_backward(query: torch.Tensor) -> int:
    """The query's gradient is summed in fp32, beside one number per row."""
    batch, heads, length, head = query.shape
    return 4 * batch * heads * length * (_multiple(head, 32) + 1) + 256


def _varlen_backward(query: torch.Tensor, key: torch.Tensor, starts: torch.Tensor) -> int:
    """The same over a packed row, where each sequence may take up to 128 rows more.

    Grouped keys and values first get a gradient for each head of the query.
    """
    tokens, heads, head = query.shape
    rows = tokens + 128 * (len(starts) - 1)
    grouped = key.shape[1] != heads
    expanded = 2 * key.shape[0] * heads * head * key.element_size() if grouped else 0
    return 4 * rows * heads * (_multiple(head, 32) + 1) + expanded


def _distance_products(query: torch.Tensor, positions: torch.Tensor) -> int:
    """For each token and head, and for each side of a pair, one product per distance."""
    tokens, heads, _ = query.shape
    return positions.shape[0] * positions.shape[1] * heads * tokens * query.element_size()


def _column_sums(x: torch.Tensor, dims: list[int] | None, device: Device) -> int:
    """Sums over the leading dimensions, as a bias's gradient, are split over many blocks.

    Each block leaves its part in a buffer. The arithmetic is that of torch's reduction kernels:
    128 threads of four outputs each, as many blocks as the GPU holds, at least 16 values each.
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
