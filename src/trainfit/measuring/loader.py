"""Time that a loader takes for a batch, against copying it and computing on it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.measuring.timing import synchronize

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderTiming:
    """Mean seconds per batch, by what they were spent on."""

    batches: int
    first_batch: float
    """Start of the workers and the first fetch; not in the means below."""
    fetch: float
    """Waiting for the loader."""
    copy: float
    """Moving the batch to the device."""
    compute: float
    """Computing the step, where one was given."""

    @property
    def total(self) -> float:
        """Seconds per batch in all."""
        return self.fetch + self.copy + self.compute

    @property
    def wait_share(self) -> float:
        """Share of the time in which the device waited for the loader."""
        return self.fetch / self.total if self.total else 0.0


def time_loader(
    loader: Iterable[Any],
    num_batches: int = 10,
    step: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
) -> LoaderTiming | None:
    """Time `num_batches` after the first one; None for an empty loader.

    A shorter loader is timed to its end; the time of a single batch includes the workers' start.
    """
    import torch

    if num_batches < 1:
        raise BadInput(f"num_batches is {num_batches}", "time at least 1 batch")
    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[tuple[float, float, float]] = []
    iterator = iter(loader)
    while len(rows) < num_batches + 1:
        started = time.perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            break
        fetched = time.perf_counter()
        moved = _to(batch, target)
        synchronize()
        copied = time.perf_counter()
        if step is not None:
            step(moved)
            synchronize()
        rows.append((fetched - started, copied - fetched, time.perf_counter() - copied))
    if not rows:
        return None
    counted = rows[1:] or rows
    fetch, copy, compute = (sum(column) / len(counted) for column in zip(*counted, strict=True))
    return LoaderTiming(
        batches=len(counted), first_batch=rows[0][0], fetch=fetch, copy=copy, compute=compute
    )


def benchmark_dataloader(dataloader: Iterable[Any], num_batches: int = 10) -> float:
    """Print where the time of a batch goes and return the mean seconds per batch.

    An empty loader has no mean: a warning and nan, with which arithmetic goes on.
    """
    timing = time_loader(dataloader, num_batches)
    if timing is None:
        warnings.warn("the loader is empty: nothing was timed", TrainfitWarning, stacklevel=2)
        return float("nan")
    print(f"DataLoader over {timing.batches} batches:")
    print(f"  First batch: {timing.first_batch * 1000:.2f} ms (workers start)")
    print(f"  Fetch: {timing.fetch * 1000:.2f} ms")
    print(f"  Copy to device: {timing.copy * 1000:.2f} ms")
    print(f"  Total: {timing.total * 1000:.2f} ms per batch")
    return timing.total


def _to(batch: Any, device: torch.device | str) -> Any:
    """Move every tensor in a batch, whatever container it comes in."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _to(item, device) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to(item, device) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_to(item, device) for item in batch)
    return batch
