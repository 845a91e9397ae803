"""Values of tensors that have no memory: on fakes, and on the meta device while a model is built.

Functions that read a fake's values are answered with those that are known; sequences packed by
lengths need them too. A constructor may ask for numbers that it computed with tensors, such as the
rates of dropped paths (`torch.linspace(0, 0.1, depth).tolist()`). So small tensors of known values
are computed on the CPU beside those on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_iter, tree_map

from trainfit.planning.estimator.recorder import Recorder
from trainfit.planning.estimator.step_work import MAX_VALUES, attach, known


def recorders() -> list[Recorder]:
    """Recorders of the running step."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]


def _as_array(read: Callable[..., Any]) -> Callable[..., Any]:
    """Give NumPy the values; zeros, which are counted, where they are not known."""

    def answer(tensor: Tensor, *args: Any, **options: Any) -> Any:
        values = known(tensor)
        for mode in recorders() if values is None else ():
            mode.unknown["numpy()"] += 1
        with _disable_current_modes():
            values = torch.zeros(tensor.shape, dtype=tensor.dtype) if values is None else values
            return read(values, *args, **options)

    return answer


def _formatted(tensor: Tensor, spec: str) -> str:
    return format(tensor if tensor.dim() else tensor.item(), spec)


def _is_finite(test: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Answer a test of the values as if all were finite: a step that diverges is of no use."""

    def answer(tensor: Tensor) -> Tensor:
        out = test(tensor)
        if tensor.is_floating_point() and out.numel() <= MAX_VALUES:
            with _disable_current_modes():
                attach(out, torch.full(out.shape, test is torch.isfinite))
        return out

    return answer


READS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.numpy: _as_array(torch.Tensor.numpy),
    torch.Tensor.__array__: _as_array(torch.Tensor.__array__),
    torch.Tensor.__format__: _formatted,
    **{
        function: _is_finite(test)
        for test in (torch.isfinite, torch.isnan, torch.isinf)
        for function in (test, getattr(torch.Tensor, test.__name__))
    },
}
"""Functions that read the values of a tensor."""


# ── sequences packed by their lengths ─────────────────────────────────────────────────────────────


def _sizes(batch_sizes: Tensor) -> list[int]:
    """Sequences at each step of packed ones, which `pack_padded_sequence` knew."""
    found = known(batch_sizes)
    if found is None:
        raise RuntimeError("the sizes of a packed sequence are not known")
    with _disable_current_modes():
        sizes: list[int] = found.tolist()
    return sizes


def _unpack(data: Tensor, padded: Tensor, sizes: Sequence[int]) -> None:
    """Copy packed rows to their places in (steps, sequences, ...)."""
    row = step = 0
    for count, alike in groupby(sizes):
        steps = len(list(alike))
        part = data[row : row + steps * count].reshape(steps, count, *data.shape[1:])
        padded[step : step + steps, :count].copy_(part)
        row, step = row + steps * count, step + steps


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor]:
    sizes = _sizes(batch_sizes)
    steps = max(total, len(sizes))
    padded = data.new_full((steps, sizes[0], *data.shape[1:]), padding)
    _unpack(data, padded, sizes)
    lengths = torch.empty(sizes[0], dtype=torch.long)
    with _disable_current_modes():
        attach(lengths, (torch.tensor(sizes) > torch.arange(sizes[0])[:, None]).sum(1))
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _pack_backward(
    gradient: Tensor, shape: Sequence[int], batch_sizes: Tensor, batch_first: bool
) -> Tensor:
    shape = (shape[1], shape[0], *shape[2:]) if batch_first else shape
    padded = gradient.new_zeros(shape)
    _unpack(gradient, padded, _sizes(batch_sizes))
    return padded.transpose(0, 1) if batch_first else padded


def _recurrent(steps: Callable[..., Any]) -> Callable[..., Any]:
    """Run packed sequences step by step; torch asks for the address of the sizes."""

    def kernel(data: Tensor, batch_sizes: Tensor, *rest: Any) -> Any:
        return steps(data, _sizes(batch_sizes), *rest)

    return kernel


SEQUENCES: dict[str, Callable[..., Any]] = {
    "_pad_packed_sequence": _pad,
    "_pack_padded_sequence_backward": _pack_backward,
    "lstm.data": _recurrent(decompositions.lstm_data_impl),
    "gru.data": _recurrent(decompositions.gru_impl_data),
    "rnn_tanh.data": _recurrent(decompositions.rnn_tanh_data),
    "rnn_relu.data": _recurrent(decompositions.rnn_relu_data),
}
"""Operations of torch on packed sequences that read the sizes by their address."""


# ── models on the meta device ─────────────────────────────────────────────────────────────────────

aten = torch.ops.aten
_MOST_ON_META = 1 << 12
"""Largest tensor whose values are computed."""
_MADE = (torch.tensor, torch.as_tensor)
"""Functions whose result is on the meta device before any operation is seen."""
_FIXED = (
    *(aten.arange, aten.linspace, aten.logspace, aten.eye),
    *(aten.full, aten.zeros, aten.ones, aten.scalar_tensor),
)
"""Operations that make tensors of fixed values."""
_CPU = torch.device("cpu")
_VALUES, _STALE = "_trainfit_built", "_trainfit_stale"


@contextmanager
def on_meta() -> Iterator[None]:
    """Build models on the meta device, uninitialised."""
    values = _Values()  # type: ignore[no-untyped-call]
    with torch.device("meta"), _Made(), values, _no_initialisation():
        yield


@contextmanager
def _no_initialisation() -> Iterator[None]:
    """Skip initialisation: weights need no values, and some initialisations fail on fakes."""
    plain = {
        name: each for name, each in vars(init).items() if name.endswith("_") and callable(each)
    }
    vars(init).update(dict.fromkeys(plain, lambda tensor, *_args, **_options: tensor))
    try:
        yield
    finally:
        vars(init).update(plain)


class _Made(TorchFunctionMode):
    """Note the values that torch.tensor is given."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _MADE and out.is_meta and not isinstance(args[0], Tensor):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                _note(out, func(*args, **kwargs | {"device": _CPU}))
        return out


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute small tensors of known values beside those on the meta device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default or kwargs.get("device") == _CPU:
            values = _computed(func, args, kwargs)
            return func(*args, **kwargs) if values is None else values
        out = func(*args, **kwargs)
        made = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        few = all(t.numel() <= _MOST_ON_META for t in made)
        values = _computed(func, args, kwargs) if few else None
        found: list[Any] = [t for t in tree_iter(values) if isinstance(t, Tensor)]
        for tensor, value in zip(made, found or [None] * len(made), strict=True):
            _note(tensor, value)
        return out


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of an operation on known values; None where they are not."""
    given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
    fixed = bool(given) or func._overloadpacket in _FIXED
    if not fixed or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if any(t.is_meta and _known_on_meta(t) is None for t in given):
        return None
    args, kwargs = tree_map(_known_on_meta, (args, kwargs))
    if "device" in kwargs:
        kwargs = kwargs | {"device": _CPU}
    elif not given:
        return None
    with _disable_current_modes():
        return func(*args, **kwargs)


def _known_on_meta(item: Any) -> Any:
    if not isinstance(item, Tensor) or not item.is_meta:
        return item
    values = getattr(item, _VALUES, None)
    return None if values is None or hasattr(values.untyped_storage(), _STALE) else values


def _note(tensor: Tensor, values: Tensor | None) -> None:
    """Keep the values of a tensor on the meta device; None: something unknown was written to it."""
    if not tensor.is_meta:
        return
    if values is not None:
        setattr(tensor, _VALUES, values)
    elif hasattr(tensor, _VALUES):
        setattr(getattr(tensor, _VALUES).untyped_storage(), _STALE, True)
