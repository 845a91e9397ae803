"""What a plan promises: its memory and its time, with the errors that were recorded."""

from __future__ import annotations

import math

from trainfit.planning.fitting import Candidate, Speed
from trainfit.planning.memory import GIB, Target, recorded_error
from trainfit.planning.question import Question
from trainfit.planning.timing import recorded_time_error
from trainfit.records import Gpu, MemoryEstimate, TimeEstimate


def memory_of(
    best: Candidate, target: Target, gpu: Gpu | None, fits: bool | None, compiled: bool = False
) -> MemoryEstimate:
    """Where the memory of a step goes."""
    taken = best.taken
    return MemoryEstimate(
        weights_gib=taken.weights / GIB,
        adapters_gib=taken.adapters / GIB,
        gradients_gib=taken.gradients / GIB,
        optimizer_gib=taken.optimizer / GIB,
        activations_gib=taken.activations / GIB,
        workspace_gib=taken.workspace / GIB,
        peak_allocated_gib=taken.peak_allocated / GIB,
        peak_reserved_gib=min(taken.peak_reserved, target.capacity) / GIB
        if fits
        else taken.peak_reserved / GIB,
        capacity_gib=target.capacity / GIB,
        fits=taken.peak_allocated <= target.capacity if fits is None else fits,
        error_percent=None if gpu is None else recorded_error(gpu.compute_capability, compiled),
    )


def time_of(
    question: Question, best: Candidate, speed: Speed, ranks: int, effective: int
) -> TimeEstimate | None:
    """How fast it runs, or None where there is no peak to reckon with."""
    if speed.gpu is None or best.seconds is None:
        return None
    step = best.seconds
    work = question.workload
    steps = math.ceil(work.sequences / effective)
    peak = speed.gpu.peak_tflops(speed.precision)
    epoch = steps * step
    total = epoch * work.epochs
    hours = total / 3600
    return TimeEstimate(
        tokens_per_second=best.cutting.tokens * ranks / step,
        samples_per_second=effective / step,
        mfu=None if not peak else best.flops / (step * peak * 1e12),
        step_seconds=step,
        epoch_seconds=epoch,
        total_seconds=total,
        error_percent=recorded_time_error(speed.gpu.compute_capability),
        energy_kwh=None if question.watts is None else hours * question.watts / 1000,
        cost=None if question.price_per_hour is None else hours * question.price_per_hour,
    )
