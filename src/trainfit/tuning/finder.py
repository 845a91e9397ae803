"""The largest micro-batch that fits the device now, found without running out of memory.

`find` predicts with the planner, confirms with at most three steps of the engine on the GPU, and
returns the largest budget, that budget less a margin, and the throughput's knee. Where there is no
GPU, the prediction against the free memory is all there is, and the answer says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from trainfit.errors import BadInput, RunFailed
from trainfit.hardware import detect
from trainfit.packing import cut_step, ladder
from trainfit.records import HardwareProfile
from trainfit.tuning.finder_records import BatchSizeFound, Job, MemoryLaw, Probe
from trainfit.tuning.finding import GIB, Search, knee, search
from trainfit.tuning.finding_lines import law
from trainfit.tuning.finding_prediction import predictor

if TYPE_CHECKING:
    from trainfit.tuning.finding_device import Device


def find(job: Job, profile: HardwareProfile | None = None) -> BatchSizeFound:
    """The largest micro-batch of a job on this machine, or on its CPU where it has no GPU."""
    began = perf_counter()
    profile = detect() if profile is None else profile
    if profile.simulated:
        raise BadInput("the GPU is not here to be asked", "plan for it instead: trainfit plan")
    return _on_gpu(job, profile, began) if _has_cuda(profile) else _on_cpu(job, profile, began)


def _has_cuda(profile: HardwareProfile) -> bool:
    return (
        profile.torch is not None
        and profile.torch.backend in ("cuda", "rocm")
        and bool(profile.gpus)
    )


def _on_gpu(job: Job, profile: HardwareProfile, began: float) -> BatchSizeFound:
    from trainfit.runtime import applied
    from trainfit.tuning.finding_device import device_for_probes

    with applied(job.runtime), device_for_probes(job.memory_gib) as device:
        return _probe(job, profile, device, began)


def _probe(job: Job, profile: HardwareProfile, device: Device, began: float) -> BatchSizeFound:
    from trainfit.tuning.finding_device import Steps, measure_on

    gpu = profile.gpus[device.index] if device.index < len(profile.gpus) else profile.gpus[0]
    make = job.make
    if make is None:
        assert job.factory is not None
        make = Steps(job.factory, job.arguments)
    found = Search(
        room=device.room,
        asked=job.asked,
        predict=None,
        measure=measure_on(device, make, job.micro_batches),
    )
    notes = []
    if job.factory is None:
        notes.append("no prediction: the probe is no import path, so small steps are all there is")
    else:
        found.predict = predictor(job.factory, job.arguments, gpu, device.room())
        try:
            found.peak(job.at_least)
        except RunFailed as error:
            found.predict = None
            notes.append(f"no prediction: {error.what}")
    largest = search(found)
    notes += _how(found)
    others = gpu.state.memory_used_by_others_gib
    if others:
        notes.append(f"other processes use {others:.2f} GiB of the GPU, which is not counted on")
    built = getattr(make, "built", None)
    after = None if built is None else perf_counter() - built
    return _result(job, found, largest, notes, began, others=others, after=after)


def _on_cpu(job: Job, profile: HardwareProfile, began: float) -> BatchSizeFound:
    if job.factory is None:
        raise BadInput(
            "there is no GPU to run the probe on, and only an import path can be predicted",
            "give the probe as a TaskSpec",
        )
    free = profile.memory_available_gib
    room = GIB * (free if job.memory_gib is None else min(free, job.memory_gib))
    predict = predictor(job.factory, job.arguments, None, room)
    found = Search(room=lambda: room, asked=job.asked, predict=predict, measure=None)
    largest = search(found)
    notes = [
        "predicted, not measured: there is no GPU, and a process's own memory says little of a step"
    ]
    return _result(job, found, largest, notes, began, others=None, after=None)


def _how(found: Search) -> list[str]:
    if found.ran_out is not None:
        return [f"a probe of {found.ran_out} rows ran out of memory: the answer lies below it"]
    if found.confirmed:
        return [f"a real step of {found.probes[-1].rows} rows confirmed it"]
    if not found.probes:
        return ["predicted only: a probe would have been near the limit"]
    largest = found.probes[-1].rows
    return [f"on a line from small probes, the largest of them of {largest} rows"]


def _result(
    job: Job,
    found: Search,
    largest: int,
    notes: list[str],
    began: float,
    *,
    others: float | None,
    after: float | None,
) -> BatchSizeFound:
    recommended = found.asked.within(max(1, math.floor(largest * job.margin)))
    bend = knee(found.probes, job.at_least, recommended)
    effective = job.effective_batch_size or recommended

    def tokens(rows: int | None) -> int | None:
        return None if rows is None or job.width is None else rows * job.width

    if largest == job.at_most:
        notes = [*notes, f"more would fit: {largest} rows are the most that were asked about"]
    fixed, each = law(_points(found, largest))
    return BatchSizeFound(
        largest_rows=largest,
        largest_tokens=tokens(largest),
        recommended_rows=recommended,
        recommended_tokens=tokens(recommended),
        knee_rows=bend,
        knee_tokens=tokens(bend),
        margin=job.margin,
        effective_batch_size=effective,
        cuts=cuts(effective, recommended, packed=job.packed),
        probes=tuple(_probe_record(found, at, tokens) for at in range(len(found.probes))),
        ran_out_at_rows=found.ran_out,
        capacity_gib=found.room() / GIB,
        used_by_others_gib=others,
        law=MemoryLaw(fixed_gib=fixed / GIB, gib_per_row=each / GIB),
        seconds=perf_counter() - began,
        seconds_after_build=after,
        reasons=tuple(notes),
    )


def _points(found: Search, largest: int) -> list[tuple[float, float]]:
    """Peaks over rows: measured where there are two, else predicted."""
    if len(found.probes) >= 2:
        return [(p.rows, p.allocated) for p in found.probes[-2:]]
    if found.predict is None:
        last = found.probes[-1]
        return [(0, last.held), (last.rows, last.allocated)]
    rows = sorted({max(1, largest // 2), largest})
    return [(each, found.peak(each).allocated + found.off(each)) for each in rows]


def _probe_record(found: Search, at: int, tokens: Callable[[int], int | None]) -> Probe:
    probe = found.probes[at]
    predicted = None if found.predict is None else found.peak(probe.rows).allocated / GIB
    return Probe(
        rows=probe.rows,
        tokens=tokens(probe.rows),
        peak_allocated_gib=probe.allocated / GIB,
        peak_reserved_gib=probe.reserved / GIB,
        seconds=probe.seconds,
        predicted_gib=predicted,
    )


def cuts(effective: int, rows: int, *, packed: bool = False) -> tuple[int, ...]:
    """The sequences of each micro-batch of a step of `effective` ones, at most `rows` at a time."""
    lengths = np.ones(effective, dtype=np.int64)
    cut = ladder(lengths, effective, min(rows, effective), padded=not packed)[0]
    (batches,) = cut_step(lengths, range(effective), cut)
    return tuple(len(batch.sequences) for batch in batches if batch.sequences)
