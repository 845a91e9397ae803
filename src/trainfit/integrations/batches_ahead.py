"""Batches of a loader without worker processes, fetched in a thread while the GPU computes.

The thread gets one batch ahead, of the indices that the sampler gives next: the same batches in the
same order. A batch that cannot be fetched there is fetched in the script's own thread, which then
raises what it would have raised.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.utils.data import dataloader

from trainfit.integrations.speedups import AROUND

_WAITING = "_trainfit_ahead"
_PATCHED = "_trainfit_fetched"


class _Batch(NamedTuple):
    """A batch that is being fetched; without indices, the sampler had no more."""

    indices: Any = None
    data: Future[Any] | None = None


@dataclass(eq=False)
class BatchesAhead:
    """Record of the batches that were fetched ahead."""

    failed: bool = False
    """A batch could not be fetched in the thread; later ones are not tried there."""
    fetched: int = 0
    """Batches that were fetched in the thread."""


def fetch_ahead() -> BatchesAhead:
    """Have torch's loaders of this process fetch a batch ahead, while `AROUND` is on."""
    kind: Any = dataloader._SingleProcessDataLoaderIter
    found: BatchesAhead | None = getattr(kind, _PATCHED, None)
    if found is not None:
        return found
    pinned: Any = import_module("torch.utils.data._utils.pin_memory").pin_memory
    # One thread: collators may draw random numbers, and tokenizers are not shared among threads.
    ahead, pool, plainly = BatchesAhead(), ThreadPoolExecutor(1, "trainfit-ahead"), kind._next_data

    def next_data(self: Any) -> Any:
        waiting: _Batch | None = vars(self).pop(_WAITING, None)
        on = not (AROUND.off or ahead.failed) and _can_be_ahead(self)
        if waiting is None and not on:
            return plainly(self)
        if waiting is None:
            waiting = _Batch(self._next_index())
        if waiting.indices is None:
            vars(self)[_WAITING] = waiting
            raise StopIteration
        data = _fetched(self, waiting, ahead)
        if on:
            vars(self)[_WAITING] = _begun(self, pool)
        if self._pin_memory:
            data = pinned(data, self._pin_memory_device)
        return data

    kind._next_data = next_data
    setattr(kind, _PATCHED, ahead)
    return ahead


def _can_be_ahead(loader: Any) -> bool:
    """True for a dataset with indices; a default device of the script is its thread's alone."""
    mapped = loader._dataset_kind == dataloader._DatasetKind.Map
    return bool(mapped and torch.get_default_device().type == "cpu")


def _begun(loader: Any, pool: ThreadPoolExecutor) -> _Batch:
    try:
        indices = loader._next_index()
    except StopIteration:
        return _Batch()
    return _Batch(indices, pool.submit(loader._dataset_fetcher.fetch, indices))


def _fetched(loader: Any, waiting: _Batch, ahead: BatchesAhead) -> Any:
    if waiting.data is not None:
        try:
            data = waiting.data.result()
        except Exception:  # noqa: BLE001 what is bound to the script's thread works there
            ahead.failed = True
        else:
            ahead.fetched += 1
            return data
    return loader._dataset_fetcher.fetch(waiting.indices)
