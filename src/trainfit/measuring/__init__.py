"""Honest numbers: what the machine does, what a loader costs, how much memory was used."""

from trainfit.measuring.loader import LoaderTiming, benchmark_dataloader, time_loader
from trainfit.measuring.machine import measure, remember, remembered
from trainfit.measuring.memory import MemoryTracker, MemoryUse

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
