"""Times with a warm-up, synchronisation, all samples and bootstrap intervals; memory use.

Medians are used since times have outliers on one side, which widen the interval.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.core.records import Record
from trainfit.measuring.trace import cuda_in_use

if TYPE_CHECKING:
    import torch


GIB = 1024**3


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use now, at the peak since the last reset, and in all."""

    device: str
    current: int
    peak: int
    total: int

    @property
    def utilization(self) -> float:
        """Peak as a share of the total."""
        return self.peak / self.total if self.total else 0.0


class MemoryTracker:
    """Peak memory of the GPU, or of the process where there is no GPU.

    The GPU's peak is exact; the process's is the largest of the calls of `update`.
    """

    def __init__(self, device: int | None = None) -> None:
        """Follow CUDA device `device`; None means the current one."""
        import torch

        self._cuda = torch.cuda.is_available()
        self._device = torch.cuda.current_device() if self._cuda and device is None else device
        self._peak = 0
        self.reset()

    def reset(self) -> None:
        """Forget the peak so far."""
        if self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
        self._peak = 0
        self.update()

    def update(self) -> MemoryUse:
        """Measure again and return the memory in use."""
        use = self._look()
        self._peak = max(self._peak, use.peak)
        return MemoryUse(use.device, use.current, self._peak, use.total)

    def report(self) -> MemoryUse:
        """Print current, peak and total memory, and the peak's share."""
        use = self.update()
        print(f"{use.device} Memory Usage:")
        print(f"  Current: {use.current / GIB:.2f} GB")
        print(f"  Peak: {use.peak / GIB:.2f} GB")
        print(f"  Total: {use.total / GIB:.2f} GB")
        print(f"  Utilization: {use.utilization:.1%}")
        return use

    def _look(self) -> MemoryUse:
        if self._cuda:
            import torch

            return MemoryUse(
                "GPU",
                torch.cuda.memory_allocated(self._device),
                torch.cuda.max_memory_allocated(self._device),
                torch.cuda.get_device_properties(self._device or 0).total_memory,
            )
        import psutil

        resident = psutil.Process().memory_info().rss
        return MemoryUse("Process", resident, resident, psutil.virtual_memory().total)


_RESAMPLES = 2000
_TAIL = 2.5  # percent on either side: an interval of 95%


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval(Record):
    """Median with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing(Record):
    """Seconds of each repetition, and their peak memory."""

    seconds: tuple[float, ...]
    median: Interval
    peak_allocated_gib: float | None = None
    """Peaks of the GPU, or None without one."""
    peak_reserved_gib: float | None = None


def median_interval(samples: Sequence[float], *, seed: int = 0) -> Interval:
    """Median with its 95% bootstrap interval, which has no width for one sample."""
    if not len(samples):
        raise BadInput("there is no sample", "measure at least once")
    values = np.asarray(samples, dtype=np.float64)
    drawn = np.random.default_rng(seed).choice(values, size=(_RESAMPLES, values.size))
    return _interval(float(np.median(values)), np.median(drawn, axis=1))


def _interval(value: float, drawn: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(drawn, (_TAIL, 100 - _TAIL))
    return Interval(value=value, low=float(low), high=float(high))


Rounds = Sequence[Sequence[float]]
"""Samples by round; those of a round were taken together."""


def rounds_interval(rounds: Rounds) -> Interval:
    """Median over all rounds with its 95% bootstrap interval.

    Disturbances last longer than a step, so the samples of a round are alike. Rounds are resampled
    first, then the samples in each: rounds that disagree widen the interval.
    """
    return _interval(_median(rounds), _medians(rounds, np.random.default_rng(0)))


def ratio_interval(rounds: Rounds, others: Rounds) -> Interval:
    """Ratio of two such medians with its 95% bootstrap interval."""
    draws = np.random.default_rng(0)
    drawn = _medians(rounds, draws) / _medians(others, draws)
    return _interval(_median(rounds) / _median(others), drawn)


def _median(rounds: Rounds) -> float:
    return float(np.median(np.concatenate([np.asarray(each) for each in rounds])))


def _medians(rounds: Rounds, draws: np.random.Generator) -> NDArray[np.float64]:
    """Medians of resampled rounds of resampled samples."""
    if not rounds or not all(len(each) for each in rounds):
        raise BadInput("there is no sample", "measure at least once")
    sizes = np.array([len(each) for each in rounds])
    starts, values = np.cumsum(sizes) - sizes, np.concatenate([np.asarray(r) for r in rounds])
    chosen = draws.integers(len(rounds), size=(_RESAMPLES, len(rounds), 1))
    shares = draws.random((_RESAMPLES, len(rounds), int(sizes.max())))
    drawn = values[starts[chosen] + (shares * sizes[chosen]).astype(np.int64)]
    medians: NDArray[np.float64] = np.median(drawn.reshape(_RESAMPLES, -1), axis=1)
    return medians


def time_work(
    work: Callable[[], object],
    *,
    warm_up: int = 3,
    repeats: int = 10,
    most_seconds: float | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Timing:
    """Time repeated calls of `work`, waiting for the GPU before each reading of the clock.

    `most_seconds` ends it early, after at least three repetitions.
    """
    if repeats < 1 or warm_up < 0:
        raise BadInput(f"repeats is {repeats}, warm_up {warm_up}", "give 1 or more, 0 or more")
    for _ in range(warm_up):
        work()
    synchronize()
    if cuda_in_use():
        import torch

        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    began = clock()
    while len(seconds) < repeats:
        started = clock()
        work()
        synchronize()
        ended = clock()
        seconds.append(ended - started)
        if most_seconds is not None and len(seconds) >= 3 and ended - began >= most_seconds:
            break
    allocated, reserved = cuda_peaks()
    return Timing(
        seconds=tuple(seconds),
        median=median_interval(seconds),
        peak_allocated_gib=allocated,
        peak_reserved_gib=reserved,
    )


def synchronize() -> None:
    """Wait for the GPU, if there is one in use."""
    import torch

    if cuda_in_use():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()


def cuda_peaks() -> tuple[float | None, float | None]:
    """Peak allocated and peak reserved memory of the GPU in GiB; None where none is in use."""
    if not cuda_in_use():
        return None, None
    import torch

    return torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB


# ── a loader's batches ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderTiming:
    """Mean seconds per batch, by activity."""

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
