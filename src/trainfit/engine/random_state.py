"""The random state of this process: taken, put back, and written as text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainfit.core.records import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState(Record):
    """Every generator that a model or a task may draw from."""

    torch: str
    cuda: str | None
    """Of the device that the run is on."""
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]


def take(device: torch.device) -> RandomState:
    """The state as it is now; this does not wait for the device."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RandomState(
        torch=torch.get_rng_state().numpy().tobytes().hex(),
        cuda=None if cuda is None else cuda.numpy().tobytes().hex(),
        python=(version, list(words), gauss),
        numpy=(kind, keys.tolist(), *rest),  # type: ignore[union-attr]
    )


def put_back(state: RandomState, device: torch.device) -> None:
    """Set every generator as it was."""
    torch.set_rng_state(_tensor(state.torch))
    if state.cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(state.cuda), device)
    version, words, gauss = state.python
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state.numpy
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


@contextmanager
def protected(device: torch.device) -> Iterator[None]:
    """Leave the random state after a block as it was before."""
    before = take(device)
    try:
        yield
    finally:
        put_back(before, device)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
