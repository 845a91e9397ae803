"""Functions that read a tensor's values, and sequences packed by lengths, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

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
