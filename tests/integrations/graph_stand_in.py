"""Stand-in for CUDA graphs where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def run_again(work: Callable[[], None]) -> Callable[[], None]:
    """Stand in for a capture, which runs no kernel and draws no number."""
    state = torch.get_rng_state()
    work()
    torch.set_rng_state(state)
    return work
