"""How much memory a stretch of work took."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use now, at most since the last reset, and in all."""

    device: str
    current: int
    peak: int
    total: int

    @property
    def utilization(self) -> float:
        """The peak as a share of the total."""
        return self.peak / self.total if self.total else 0.0


class MemoryTracker:
    """Follows the GPU's memory, or the process's own where there is no GPU.

    The GPU's allocator keeps the peak itself, so nothing is missed between two updates; a
    process's peak is the largest of the moments at which `update` was called.
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
        """Look again; returns what is in use."""
        use = self._look()
        self._peak = max(self._peak, use.peak)
        return MemoryUse(use.device, use.current, self._peak, use.total)

    def report(self) -> MemoryUse:
        """Print current, peak and total memory, and the share that the peak was."""
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
