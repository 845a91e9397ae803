"""Who works on the GPUs now: processes by number, and how busy they keep each GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
SAMPLES = 8
SECONDS = 1.0
"""A single look at a GPU between two steps says nothing: it is watched for so long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that has a context on a GPU."""

    pid: int
    name: str | None
    """None where the number means nothing here, as for one outside this container."""
    memory_gib: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuActivity:
    """A GPU by the number that nvidia-smi gives it, with other processes' work on it."""

    index: int
    name: str
    memory_gib: float
    used_gib: float
    processes: tuple[GpuProcess, ...] = ()
    utilisation: tuple[int, ...] = ()
    """Percent, sampled for a second; empty where nobody works."""


def watch_gpus(
    load: Callable[[], Any],
    pid: int,
    *,
    name_of: Callable[[int], str | None],
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[GpuActivity, ...]:
    """What others than process `pid` do on each GPU; empty where NVML does not answer."""
    try:
        nvml = load()
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        return _watch(nvml, pid, name_of, sleep)
    except nvml.NVMLError:  # a GPU that fell off the bus: detection says so
        return ()
    finally:
        nvml.nvmlShutdown()


def process_name(pid: int) -> str | None:
    """The name of a process of this machine."""
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return None


def _watch(
    nvml: Any,
    pid: int,
    name_of: Callable[[int], str | None],
    sleep: Callable[[float], object],
) -> tuple[GpuActivity, ...]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    working = [tuple(_processes(nvml, handle, pid, name_of)) for handle in handles]
    samples: list[list[int]] = [[] for _ in handles]
    for _ in range(SAMPLES if any(working) else 0):
        sleep(SECONDS / SAMPLES)
        for handle, processes, taken in zip(handles, working, samples, strict=True):
            if processes:
                taken += _utilisation(nvml, handle)
    return tuple(
        _activity(nvml, index, handle, processes, tuple(taken))
        for index, (handle, processes, taken) in enumerate(
            zip(handles, working, samples, strict=True)
        )
    )


def _activity(
    nvml: Any, index: int, handle: Any, processes: tuple[GpuProcess, ...], taken: tuple[int, ...]
) -> GpuActivity:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuActivity(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        memory_gib=memory.total / GIB,
        used_gib=memory.used / GIB,
        processes=processes,
        utilisation=taken,
    )


def _processes(
    nvml: Any, handle: Any, pid: int, name_of: Callable[[int], str | None]
) -> Iterator[GpuProcess]:
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # some containers and GPUs do not tell
        return
    for process in found:
        if process.pid != pid:
            used = process.usedGpuMemory
            gib = None if used is None else used / GIB
            yield GpuProcess(pid=process.pid, name=name_of(process.pid), memory_gib=gib)


def _utilisation(nvml: Any, handle: Any) -> list[int]:
    try:
        return [int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)]
    except nvml.NVMLError:
        return []
