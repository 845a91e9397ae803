"""Detection of torch, NVML, processor, memory, disk and compiler, as one HardwareProfile."""

from trainfit.hardware.detection import as_if, detect

__all__ = ["as_if", "detect"]
