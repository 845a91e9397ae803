"""Measurements: rates of the machine, times of loaders, memory use, receipts."""

from trainfit.measuring.machine_rates import measure, remember, remembered
from trainfit.measuring.timing import MemoryTracker, benchmark_dataloader, time_loader

__all__ = [
    "MemoryTracker",
    "benchmark_dataloader",
    "measure",
    "remember",
    "remembered",
    "time_loader",
]
