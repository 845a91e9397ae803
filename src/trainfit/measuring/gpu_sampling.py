"""Samples of the GPU while a block runs: utilisation, power, clocks, other processes."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from trainfit.hardware.nvml import NvmlGpu, load_nvml, probe_nvml

EVERY = 0.25
"""Seconds between two samples; the driver's own figures are means over about as long."""
_HOLDS_BACK = {
    "sw_power_cap": "its power cap",
    "hw_slowdown": "heat or power",
    "sw_thermal_slowdown": "heat",
    "hw_thermal_slowdown": "heat",
    "hw_power_brake_slowdown": "the power supply",
    "board_limit": "the board's limit",
}
_OTHERS_GIB = 0.5
"""Memory of other processes from which on a notice is given."""

Look = Callable[[], Sequence[NvmlGpu]]


@dataclass(slots=True)
class GpuSamples:
    """Samples of one GPU over a block."""

    gpus: list[NvmlGpu]

    def mean(self, figure: str) -> float | None:
        """Mean of a field of GpuState, over the samples that have it."""
        found = [value for gpu in self.gpus if (value := getattr(gpu.state, figure)) is not None]
        return statistics.fmean(found) if found else None

    def throttling(self) -> tuple[str, ...]:
        """Sentences on what slowed the GPU down, and in how many samples."""
        said = []
        for reason, cause in _HOLDS_BACK.items():
            held = sum(reason in gpu.state.throttle_reasons for gpu in self.gpus)
            if held:
                of = f"{held} of {len(self.gpus)} samples"
                said.append(f"the GPU was held back by {cause} in {of}")
        return tuple(dict.fromkeys(said))

    def notices(self) -> tuple[str, ...]:
        """Sentences on what spoils a measurement: a slowed GPU, or other processes on it."""
        others = max((_others(gpu) for gpu in self.gpus), default=0.0)
        shared = f"other processes held {others:.1f} GiB of the GPU"
        return (*self.throttling(), *([shared] if others >= _OTHERS_GIB else []))


def _others(gpu: NvmlGpu) -> float:
    """GiB of other processes; 0 where the driver does not tell them apart."""
    if gpu.own_gib is None or gpu.state.memory_used_gib is None:
        return 0.0
    return gpu.state.memory_used_gib - gpu.own_gib


@contextmanager
def sampled(
    index: int = 0, *, every: float = EVERY, look: Look | None = None
) -> Iterator[GpuSamples]:
    """Sample GPU `index` of the driver while the block runs; without NVML there is no sample."""
    ask = look or (lambda: probe_nvml(load_nvml, os.getpid()).gpus)
    samples = GpuSamples([])
    over = threading.Event()

    def run() -> None:
        while True:
            gpus = ask()
            if index >= len(gpus):
                return
            samples.gpus.append(gpus[index])
            if over.wait(every):
                return

    thread = threading.Thread(target=run, name="GPU samples", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
