"""Follow a step on fake tensors: what it allocates and frees, in order, and what it asks.

Fake tensors have no values, yet model code asks for some ("is anything padded?"). So the values of
small integer and bool tensors, and of single numbers made from them, are computed for real beside
the fakes; what is asked of any other
tensor is answered with zero, and counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from trainfit.planning.allocator import Event
from trainfit.planning.temporaries import Device, temporary_bytes

aten = torch.ops.aten
_MAX_VALUES = 1 << 22
"""The largest tensor whose values are worth computing beside its fake."""
_VALUES, _STALE = "_trainfit_values", "_trainfit_stale"
_MATRIX_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every storage that comes and goes, while it is the outermost mode."""

    def __init__(self, device: Device) -> None:
        """Record as if on `device`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.unknown: Counter[str] = Counter()
        """Values that were asked for and not known, by operation."""
        self.live_bytes = 0
        self.peak_bytes = 0
        self.workspace_bytes = 0
        self.gradient_bytes = 0
        """Of one step, all of them."""
        self.gradients_at_peak = 0
        self._gradients: dict[int, int] = {}
        self._device = device
        self._handles: set[bool] = set()
        self._live: dict[int, weakref.ref[Any]] = {}
        self._names = 0

    def follow(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count storages that were made before recording; returns their bytes."""
        before = self.live_bytes
        for tensor in tensors:
            self._follow(tensor)
        return self.live_bytes - before

    def watch_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Know from now on how much of what is live are gradients."""
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
        """Run one operation on the fakes, and its values where they are known."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a look at a tensor's device, and most of the calls
            return func(*args, **kwargs)
        known, values = _values(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return values if known else self._guess(func, args[0])
        if func is aten.nonzero.default:
            rows = values if known else self._guess_rows(func, args[0])
            out = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype)
        else:
            out = func(*args, **kwargs)
        if func._overloadpacket in _MATRIX_PRODUCTS:
            self._take_workspace()
        _attach(out, values if known else None)
        for item in tree_iter(out):
            if isinstance(item, torch.Tensor):
                self._follow(item)
        self._pass_through(temporary_bytes(func, args, self._device))
        return out

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
            self.events.append((name, -1))
            self.live_bytes -= size

        self._live[key] = weakref.ref(storage, gone)
        self._take(name, size)

    def _take(self, name: int, size: int) -> None:
        self.events.append((name, size))
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.gradients_at_peak = sum(self._gradients.values())

    def _pass_through(self, size: int) -> None:
        """Memory that a kernel takes and gives back."""
        if size:
            self._names += 1
            self._take(self._names, size)
            self.events.append((self._names, -1))
            self.live_bytes -= size

    def _take_workspace(self) -> None:
        """Each thread that calls cuBLAS gets one: the program's and autograd's."""
        backward = torch._C._current_graph_task_id() != -1
        if backward not in self._handles:
            self._handles.add(backward)
            self._names += 1
            self.workspace_bytes += self._device.blas_workspace
            self._take(self._names, self._device.blas_workspace)

    def _guess(self, func: Any, tensor: torch.Tensor) -> Any:
        self.unknown[str(func)] += 1
        return tensor.dtype != torch.bool and (0.0 if tensor.is_floating_point() else 0)

    def _guess_rows(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        self.unknown[str(func)] += 1
        with _disable_current_modes():
            return torch.zeros(0, tensor.dim(), dtype=torch.long)


def _values(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Compute the operation for real where it is about small integers whose values are known."""
    tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    if not _about_integers(func, tensors, kwargs) or any(_real(t) is None for t in tensors):
        return False, None
    real_args, real_kwargs = tree_map(_real, (args, kwargs))
    with _disable_current_modes():
        return True, func(*real_args, **real_kwargs)


def _about_integers(func: Any, tensors: list[torch.Tensor], kwargs: Any) -> bool:
    """Whether to compute it: tensors stay integers, and what is made from nothing is one."""
    dtype = kwargs.get("dtype")
    if tensors:
        return dtype is None or not dtype.is_floating_point
    counts = func._overloadpacket is aten.arange and dtype is None
    return counts or dtype in (torch.long, torch.int32, torch.bool)


def _real(item: Any) -> Any:
    """The values beside a fake tensor, or None; whatever else, a literal too, is its own value."""
    if not isinstance(item, FakeTensor):
        return item
    values = getattr(item, _VALUES, None)
    if values is None:
        return item.constant  # torch keeps those of single numbers itself
    return None if getattr(values.untyped_storage(), _STALE, False) else values


def _attach(out: Any, values: Any) -> None:
    """Leave the values on the fakes they belong to."""
    fakes = [t for t in tree_iter(out) if isinstance(t, torch.Tensor)]
    reals: list[Any] = [t for t in tree_iter(values) if isinstance(t, torch.Tensor)]
    if len(fakes) != len(reals):
        reals = [None] * len(fakes)
    for fake, real in zip(fakes, reals, strict=True):
        if real is not None and real.numel() <= (1 if real.is_floating_point() else _MAX_VALUES):
            setattr(fake, _VALUES, real)
        elif hasattr(fake, _VALUES):  # written to by something unknown, and so are its aliases
            setattr(getattr(fake, _VALUES).untyped_storage(), _STALE, True)
