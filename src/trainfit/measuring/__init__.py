"""Honest numbers: what the machine does, what a loader costs, how much memory was used."""

from trainfit.measuring.loader import LoaderTiming, benchmark_dataloader, time_loader
from trainfit.measuring.machine_rates import measure, remember, remembered
from trainfit.measuring.timing import MemoryTracker, MemoryUse

__all__ = [
    "LoaderTiming",
    "MemoryTracker",
    "MemoryUse",
    "benchmark_dataloader",
    "measure",
    "remember",
    "remembered",
    "time_loader",
]
