"""Recorder of a step on fake tensors: allocations and frees in order, work, and unknown values.

A value that a step reads from a tensor without values is taken as zero, and counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_iter

from trainfit.planning.estimator import step_work
from trainfit.planning.estimator.allocator import Event
from trainfit.planning.estimator.kernel_buffers import Device, temporary_bytes
from trainfit.planning.estimator.quick_fakes import Call, QuickFakes, Recipe, describe, learn
from trainfit.planning.estimator.step_time import Work

aten = torch.ops.aten
HANDLES = 2
"""Threads that call cuBLAS, each with a workspace: the program's and autograd's."""
_INDEXING = frozenset({aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_})
_MATRIX_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm}) | step_work.QUANTIZED
_BY_LENGTHS = (aten._pack_padded_sequence.default, aten._ctc_loss.Tensor)
"""Operations whose result is as large as lengths say, which are integers."""
_BY_VALUE = (
    _INDEXING
    | {aten.masked_select, aten.nonzero, aten._local_scalar_dense}
    | {func.overloadpacket for func in _BY_LENGTHS}
    | set(step_work.BY_SHAPE)
)
"""Operations whose result may depend on values, or whose values are known."""
_HOST = "trainfit::host_zeros"
"""Makes a tensor in the host's memory."""
Entry = tuple[int, int | tuple[int, ...]]
"""(name, bytes) or (name, bytes on each device) for an allocation, (name, -1) for its end."""


class _Seen(NamedTuple):
    """An operation that ran before, on other tensors of the same shapes."""

    recipe: Recipe
    product: bool
    buffers: tuple[int, ...]
    """Bytes that its kernel allocates while it runs, by device."""
    works: tuple[Work, ...]


@cache
def _seen_on(_devices: tuple[Device, ...]) -> tuple[dict[Any, _Seen], dict[Any, _Seen]]:
    """Return the caches of operations seen in forward and in backward passes, by their call."""
    return {}, {}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that logs every storage that is made and freed."""

    def __init__(self, devices: Sequence[Device], mode: QuickFakes) -> None:
        """Record for each of the `devices`, whose kernels' buffers differ; `mode` has the fakes."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self._seen = _seen_on(tuple(devices))
        self.work: Counter[Work] = Counter()
        """Operations of the step, counted by kind and size."""
        self._log: list[Entry] = []
        self.unknown: Counter[str] = Counter()
        """Number of unknown values that were read, by operation."""
        self.updating = False
        """True in an optimizer's update, which scales by values and takes no size from them."""
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
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        """Name and storage by the address of the storage."""
        self._heard: list[Work] | None = None
        self._elsewhere: dict[int, torch.UntypedStorage] = {}
        """Storages in the host's memory."""
        self._names = 0
        self._compiled = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to say so takes time in every operation

    @property
    def live_gradients(self) -> int:
        """Bytes of the gradients that were not freed."""
        return sum(self._gradients.values())

    @property
    def length(self) -> int:
        """Number of events so far."""
        return len(self._log)

    @property
    def guesses(self) -> int:
        """Number of unknown values and masks so far."""
        return self.masks + self.unknown.total()

    def entries(self, first: int, end: int) -> list[Entry]:
        """Return the entries of the log from `first` up to `end`."""
        return self._log[first:end]

    def name_of(self, tensor: torch.Tensor) -> int | None:
        """Name of a tensor's storage in the log."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[0]

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

    def is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Tell a tensor in the host's memory."""
        return tensor.untyped_storage()._cdata in self._elsewhere

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
            self.gradient_bytes = max(self.gradient_bytes, self.live_gradients)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on fakes, and on values where they are known."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a look at a tensor's device, and most of the calls
            fake = func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)
            return args[0].fake_device if fake else func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            odd = func._overloadpacket in _BY_VALUE or func.name() == _HOST
            call = None if odd else describe(func, args, kwargs)
            if call is None:
                return self._run(func, args, kwargs)[0]
            seen_before = self._seen[step_work.in_backward()]
            seen = seen_before.get(call.key)
            if seen is not None:
                return self._repeat(seen, call)
            out, works, buffers = self._run(func, args, kwargs)
            recipe = learn(out, call, describe(func, args, kwargs))
            if recipe is not None:
                seen_before[call.key] = _Seen(
                    recipe, func._overloadpacket in _MATRIX_PRODUCTS, buffers, works
                )
            return out

    def _repeat(self, seen: _Seen, call: Call) -> Any:
        """Make the result of an operation, and log the work of its first run again."""
        out, made = seen.recipe.make(call.fakes, self.mode)
        if seen.product:
            self._take_workspace()
        self.follow(made)
        self.pass_through(seen.buffers)
        for work in seen.works:
            self.note(work)
        return out

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Work, ...], tuple[int, ...]]:
        """Run an operation; return its result, its work and its kernel's buffers."""
        args = self._without_masks(func, args)
        if func is aten.masked_select.default:
            x, mask = torch.broadcast_tensors(*args)  # type: ignore[no-untyped-call]
            func, args = aten.index.Tensor, (x, self._rows_of(mask))
        if func is aten.bincount.default and args[2:] and step_work.known(args[0]) is None:
            return self._counted(*args), (), ()
        if func in _BY_LENGTHS:
            return self._by_lengths(func, *args), (), ()
        told, values = step_work.compute(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return values if told else self._guess(func, args[0]), (), ()
        if func is aten.nonzero.default:
            self.masks += not told
            rows = len(values) if told else args[0].numel()  # at the most all are not zero
            out = torch.empty_strided((rows, args[0].dim()), (1, max(rows, 1)), dtype=torch.long)
        else:
            out = func(*args, **kwargs)
        if func.name() == _HOST:
            self._elsewhere[out.untyped_storage()._cdata] = out.untyped_storage()
        if func._overloadpacket in _MATRIX_PRODUCTS:
            self._take_workspace()
        step_work.attach(out, values if told else None)
        self.follow(item for item in tree_iter(out) if isinstance(item, torch.Tensor))
        buffers = tuple(temporary_bytes(func, args, device) for device in self._devices)
        self.pass_through(buffers)
        works = step_work.works_of(func, args, kwargs, out)
        for work in works:
            self.note(work)
        return out, works, buffers

    def note(self, work: Work) -> None:
        """Add an operation to the work of the step."""
        if self._compiled:
            work = replace(work, compiled=True)
        self.work[work] += 1
        if self._heard is not None:
            self._heard.append(work)

    @contextmanager
    def listening(self) -> Iterator[list[Work]]:
        """Collect the operations of the block in their order."""
        heard: list[Work] = []
        self._heard = heard
        try:
            yield heard
        finally:
            self._heard = None

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
        if key in self._live or key in self._elsewhere:
            return
        self._names += 1
        name, size = self._names, storage.nbytes()

        def gone(_: Any) -> None:
            del self._live[key]
            self._gradients.pop(key, None)
            self._log.append((name, -1))
            self.live_bytes -= size

        self._live[key] = name, weakref.ref(storage, gone)
        self._log.append((name, size))
        self._count(size)

    def take(self, size: int) -> tuple[int, int]:
        """Log an allocation without a tensor, for `free`."""
        self._names += 1
        self._log.append((self._names, size))
        self._count(size)
        return self._names, size

    def free(self, taken: tuple[int, int]) -> None:
        """Log the end of what `take` returned."""
        self._log.append((taken[0], -1))
        self.live_bytes -= taken[1]

    def hold(self, size: int) -> torch.UntypedStorage:
        """Allocate a storage of `size` bytes."""
        made = self.mode.make(((size,), (1,), 0, torch.uint8))
        self._follow(made)
        return made.untyped_storage()

    def _count(self, size: int) -> None:
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.gradients_at_peak = self.live_gradients

    def pass_through(self, sizes: tuple[int, ...]) -> None:
        """Log memory that a kernel allocates and frees."""
        if any(sizes):
            self._names += 1
            self._log += [(self._names, sizes), (self._names, -1)]
            self._count(sizes[0])
            self.live_bytes -= sizes[0]

    def _take_workspace(self) -> None:
        """Log the workspace that a thread keeps from its first call of cuBLAS on."""
        backward = step_work.in_backward()
        if backward not in self._handles:
            self._handles.add(backward)
            self._names += 1
            self._log.append((self._names, tuple(d.blas_workspace for d in self._devices)))
            self._count(self._devices[0].blas_workspace)

    def _guess(self, func: Any, tensor: torch.Tensor) -> Any:
        if not (self.updating and tensor.is_floating_point()):
            self.unknown[str(func)] += 1
        return tensor.dtype != torch.bool and (0.0 if tensor.is_floating_point() else 0)

    def _without_masks(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace boolean masks by the places of their True elements, as CUDA's kernels do."""
        if func._overloadpacket not in _INDEXING:
            return args
        indices: list[Any] = []
        for index in args[1]:
            masks = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            indices += self._rows_of(index) if masks else [index]
        return args[0], indices, *args[2:]

    def _by_lengths(self, func: Any, x: torch.Tensor, *more: Any) -> tuple[torch.Tensor, ...]:
        """Make the results; lengths that are not known are taken as the longest possible."""
        if func is aten._ctc_loss.Tensor:
            targets, _, lengths = more[:3]
            longest = max(self._lengths(lengths, targets.shape[-1]))
            steps, count = x.shape[0], lengths.shape[0]
            made = x.new_empty(count), x.new_empty(count, steps, 2 * longest + 1)
        else:
            lengths = self._lengths(more[0], x.shape[1 if more[1] else 0])
            sizes = [sum(n > at for n in lengths) for at in range(max(lengths))]
            made = (
                x.new_empty(sum(lengths), *x.shape[2:]),
                torch.empty(len(sizes), dtype=torch.long),
            )
            with _disable_current_modes():
                step_work.attach(made[1], torch.tensor(sizes))
        self.follow(made)
        return made

    def _counted(self, x: torch.Tensor, weights: Any, classes: int) -> torch.Tensor:
        """Make the counts of as many classes as the caller expects."""
        counts = x.new_empty(classes, dtype=torch.long if weights is None else torch.double)
        self.follow([counts])
        return counts

    def _lengths(self, lengths: torch.Tensor, longest: int) -> list[int]:
        values = step_work.known(lengths)
        self.masks += values is None
        with _disable_current_modes():
            found: list[int] = [longest] * len(lengths) if values is None else values.tolist()
        return found

    def _rows_of(self, mask: torch.Tensor) -> list[torch.Tensor]:
        rows = self.__torch_dispatch__(aten.nonzero.default, (), (mask,))
        return list(rows.unbind(1))


def recorders() -> list[Recorder]:
    """Recorders of the running step."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]
