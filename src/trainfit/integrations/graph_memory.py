"""Memory of a GPU that CUDA graphs may take beside the passes of a script, which go on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SHARE = 0.9
"""Share of the free memory that graphs, or a larger pass beside them, may take."""


def no_room(device: torch.device, weights: Sequence[Tensor], share: float) -> str | None:
    """Reason not to capture: the script's own passes and graphs both need memory.

    `share` is the size of the graph's pass by that of the script's largest one, whose padding was
    not dropped.
    """
    free, _ = torch.cuda.mem_get_info(device)
    peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    room = free + torch.cuda.memory_reserved(device) - peak
    needed = (peak - now) * share
    needed += sum(weight.numel() * weight.element_size() for weight in weights)
    if needed <= _SHARE * room:
        return None
    return f"graphs may need {needed / 2**30:.1f} GiB more, and {room / 2**30:.1f} GiB are free"


def crowded(device: torch.device, taken: int, growth: float) -> bool:
    """Tell if a pass so many times as large as all before may not fit beside `taken` bytes."""
    free, _ = torch.cuda.mem_get_info(device)
    peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    room = free + torch.cuda.memory_reserved(device) - now - taken
    return (peak - now) * growth > _SHARE * room
