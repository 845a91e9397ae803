"""Recorder of a step on fake tensors: allocations and frees in order, work, and unknown values.

A value that a step reads from a tensor without values is taken as zero, and counted.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.attention.varlen  # makes the operation known
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trainfit.kernels import disentangled
from trainfit.planning.estimator.allocator import Event
from trainfit.planning.estimator.step_time import Work
from trainfit.planning.estimator.step_work import attach, compute, work_of

aten = torch.ops.aten
_THREADS = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "12.0": 1536, "12.1": 1536}
"""Threads per SM by compute capability, where they are not 2048."""
_HALF = (torch.bfloat16, torch.float16)
_SUMS = 4 << 20
"""Partial sums of a convolution's weight gradient: 1 to 8 MiB were recorded."""
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward
_VARLEN_BACKWARD = (torch.ops.torch_attn._varlen_attn_backward, aten._flash_attention_backward)
_DISENTANGLED = torch.ops.trainfit.disentangled_attention
_DISENTANGLED_BACKWARD = torch.ops.trainfit.disentangled_attention_backward


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
    if func is aten.sum.dim_IntList:
        return _column_sums(args[0], args[1], device)
    if func._overloadpacket is aten.convolution:
        return _convolution(args[0], args[1], args[3], args[8])
    if func._overloadpacket is aten.convolution_backward:
        return _convolution(args[1], args[2], args[4], args[9]) + _SUMS
    if func._overloadpacket is _FLASH_BACKWARD:
        return _attention_backward(args[1])
    if func._overloadpacket in _VARLEN_BACKWARD:
        return _varlen_backward(query=args[1], key=args[2], starts=args[6])
    if func._overloadpacket is _DISENTANGLED:
        return _distance_products(query=args[0], positions=args[3])
    if func._overloadpacket is _DISENTANGLED_BACKWARD:
        # Two gradients of positions are summed from parts, beside the products.
        products = _distance_products(query=args[1], positions=args[4])
        return products + 4 * (disentangled.SPLITS + 1) * int(args[4].numel())
    return 0


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


def _distance_products(query: torch.Tensor, positions: torch.Tensor) -> int:
    """Bytes of one product per token, head, distance and side of a pair."""
    tokens, heads, _ = query.shape
    return positions.shape[0] * positions.shape[1] * heads * tokens * query.element_size()


def _column_sums(x: torch.Tensor, dims: list[int] | None, device: Device) -> int:
    """Bytes of partial sums of a reduction over the leading dimensions, as in a bias's gradient.

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


HANDLES = 2
"""Threads that call cuBLAS, each with a workspace: the program's and autograd's."""
_INDEXING = frozenset({aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_})
_MATRIX_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that logs every storage that is made and freed."""

    def __init__(self, devices: Sequence[Device]) -> None:
        """Record for each of the `devices`, whose kernels' buffers differ."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: Counter[Work] = Counter()
        """Operations of the step, counted by kind and size."""
        self._log: list[tuple[int, int | tuple[int, ...]]] = []
        self.unknown: Counter[str] = Counter()
        """Number of unknown values that were read, by operation."""
        self.masks = 0
        """Masks whose values were not known; every element was taken as True."""
        self.live_bytes = 0
        self.peak_bytes = 0
        self.gradient_bytes = 0
        """Bytes of all gradients of one step."""
        self.gradients_at_peak = 0
        self._gradients: dict[int, int] = {}
        self._devices = devices
        self._handles: set[bool] = set()
        self._live: dict[int, weakref.ref[Any]] = {}
        self._names = 0
        self._compiled = False

    @property
    def length(self) -> int:
        """Number of events so far."""
        return len(self._log)

    def events(self, device: int = 0, since: int = 0) -> list[Event]:
        """Log of allocations and frees on one of the devices."""
        return [
            (name, size if isinstance(size, int) else size[device])
            for name, size in self._log[since:]
        ]

    def workspace_bytes(self, device: int) -> int:
        """Bytes of cuBLAS's workspaces on one of the devices."""
        return len(self._handles) * self._devices[device].blas_workspace

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Log storages that were made outside of the recording."""
        for tensor in tensors:
            self._follow(tensor)

    def watch_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Count the gradients among the live bytes from now on."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._gradient
                )

    def _gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            storage = parameter.grad.untyped_storage()
            self._gradients[storage._cdata] = storage.nbytes()
            self.gradient_bytes = max(self.gradient_bytes, sum(self._gradients.values()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on fakes, and on values where they are known."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a look at a tensor's device, and most of the calls
            fake = func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)
            return args[0].fake_device if fake else func(*args, **kwargs)
        args = self._without_masks(func, args)
        if func is aten.masked_select.default:
            x, mask = torch.broadcast_tensors(*args)  # type: ignore[no-untyped-call]
            func, args = aten.index.Tensor, (x, self._rows_of(mask))
        known, values = compute(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return values if known else self._guess(func, args[0])
        if func is aten.nonzero.default:
            rows = len(values) if known else self._guess_rows(args[0])
            out = torch.empty_strided((rows, args[0].dim()), (1, max(rows, 1)), dtype=torch.long)
        else:
            out = func(*args, **kwargs)
        if func._overloadpacket in _MATRIX_PRODUCTS:
            self._take_workspace()
        attach(out, values if known else None)
        for item in tree_iter(out):
            if isinstance(item, torch.Tensor):
                self._follow(item)
        self._pass_through(tuple(temporary_bytes(func, args, device) for device in self._devices))
        work = work_of(func, args, kwargs, out)
        if work is not None:
            self.note(replace(work, compiled=True) if self._compiled else work)
        return out

    def note(self, work: Work) -> None:
        """Count an operation."""
        self.work[work] += 1

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Mark the work of the block as launched by compiled code."""
        self._compiled = True
        try:
            yield
        finally:
            self._compiled = False

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._names += 1
        name, size = self._names, storage.nbytes()

        def gone(_: Any) -> None:
            del self._live[key]
            self._gradients.pop(key, None)
            self._log.append((name, -1))
            self.live_bytes -= size

        self._live[key] = weakref.ref(storage, gone)
        self._take(name, size)

    def _take(self, name: int, size: int) -> None:
        self._log.append((name, size))
        self._count(size)

    def _count(self, size: int) -> None:
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.gradients_at_peak = sum(self._gradients.values())

    def _pass_through(self, sizes: tuple[int, ...]) -> None:
        """Log memory that a kernel allocates and frees."""
        if any(sizes):
            self._names += 1
            self._log += [(self._names, sizes), (self._names, -1)]
            self._count(sizes[0])
            self.live_bytes -= sizes[0]

    def _take_workspace(self) -> None:
        """Log the workspace that a thread keeps from its first call of cuBLAS on."""
        backward = torch._C._current_graph_task_id() != -1
        if backward not in self._handles:
            self._handles.add(backward)
            self._names += 1
            self._log.append((self._names, tuple(d.blas_workspace for d in self._devices)))
            self._count(self._devices[0].blas_workspace)

    def _guess(self, func: Any, tensor: torch.Tensor) -> Any:
        self.unknown[str(func)] += 1
        return tensor.dtype != torch.bool and (0.0 if tensor.is_floating_point() else 0)

    def _guess_rows(self, tensor: torch.Tensor) -> int:
        """Number of elements that are not zero: at the most all of them."""
        self.masks += 1
        return tensor.numel()

    def _without_masks(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace boolean masks by the places of their True elements, as CUDA's kernels do."""
        if func._overloadpacket not in _INDEXING:
            return args
        indices: list[Any] = []
        for index in args[1]:
            masks = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            indices += self._rows_of(index) if masks else [index]
        return args[0], indices, *args[2:]

    def _rows_of(self, mask: torch.Tensor) -> list[torch.Tensor]:
        rows = self.__torch_dispatch__(aten.nonzero.default, (), (mask,))
        return list(rows.unbind(1))
