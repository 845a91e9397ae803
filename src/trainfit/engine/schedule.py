"""The learning rate as a function of the optimizer step alone: there is no state to lose."""

from __future__ import annotations

import math

from trainfit.engine.settings import ScheduleSettings


def rate_factor(step: int, total: int, settings: ScheduleSettings) -> float:
    """The share of the learning rate in the update of `step`, the first being 0, of `total`.

    Warm-up ends at the full rate, and the decay would reach its end in the step after the last.
    """
    warmup = warmup_steps(total, settings)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if settings.kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return settings.min_ratio + (1 - settings.min_ratio) * _decay(progress, settings)


def warmup_steps(total: int, settings: ScheduleSettings) -> int:
    """Optimizer steps below the full rate."""
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    return math.ceil(total * (settings.warmup_ratio or 0.0))


def _decay(progress: float, settings: ScheduleSettings) -> float:
    if settings.kind == "linear":
        return 1 - progress
    if settings.kind == "cosine_with_restarts" and progress < 1:
        progress = settings.cycles * progress % 1
    return (1 + math.cos(math.pi * progress)) / 2
