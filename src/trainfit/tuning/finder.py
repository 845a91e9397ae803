"""Find the largest micro-batch that fits the device, without running out of memory.

`find` predicts with the planner, confirms with at most four real steps on the GPU, and returns the
largest number of rows, a recommended number with a margin, and the knee of the throughput. Without
a GPU the answer is a prediction from the free memory, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from trainfit.core.errors import BadInput, RunFailed
from trainfit.core.files import text_facts
from trainfit.core.plan_records import RuntimeSettings
from trainfit.core.records import HardwareProfile, Record
from trainfit.hardware import detect
from trainfit.packing import cut_step, ladder
from trainfit.tuning.growth import GIB, Measured, RowRange, Search, knee, law, predictor, search

if TYPE_CHECKING:
    from trainfit.tuning.trial import ProbeDevice


MARGIN = 0.9
"""Recommended share of the largest micro-batch: longer data or other processes need room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizeJob:
    """Step whose micro-batch is to be found, with its limits."""

    factory: str | None = None
    """module:function of the step, as for the planner; None where `make` is given."""
    arguments: Callable[[int], dict[str, Any]] = lambda rows: {"rows": rows}
    """Arguments of the factory for a number of rows."""
    make: Callable[[int], Callable[[], object]] | None = None
    """Builds the step for a number of rows; such a step cannot be predicted."""
    micro_batches: Callable[[int], int] = lambda _rows: 1
    """Micro-batches in a step, for a number of rows in each."""
    width: int | None = None
    """Tokens per row."""
    packed: bool = False
    effective_batch_size: int | None = None
    """Sequences per step; None: the recommended rows, in one micro-batch."""
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    margin: float = MARGIN
    at_least: int = 1
    at_most: int | None = None
    memory_gib: float | None = None
    """Limit below the memory of the device."""

    def __post_init__(self) -> None:
        """Raise BadInput for limits that are out of range."""
        if not 0 < self.margin <= 1:
            raise BadInput(f"the margin is {self.margin}", "give a share above 0, at most 1")
        for name in ("at_least", "at_most", "effective_batch_size", "width"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise BadInput(f"{name} is {value}", "give a whole number, 1 or more")
        if self.at_most is not None and self.at_least > self.at_most:
            raise BadInput(
                f"at_least {self.at_least} is over at_most {self.at_most}", "give a range"
            )
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise BadInput(f"the memory is {self.memory_gib} GiB", "give what may be used, above 0")

    @property
    def asked(self) -> RowRange:
        most = {} if self.at_most is None else {"at_most": self.at_most}
        return RowRange(at_least=self.at_least, share=self.margin, **most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe(Record):
    """Measurements of a real step that was run during the search."""

    rows: int
    tokens: int | None
    peak_allocated_gib: float
    peak_reserved_gib: float
    seconds: float
    """Seconds of a micro-batch, with its share of the update."""
    predicted_gib: float | None
    """Allocated memory as it was predicted before any probe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLaw(Record):
    """Peak memory as a line over the number of rows."""

    fixed_gib: float
    gib_per_row: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizeFound(Record):
    """Largest and recommended micro-batch. Tokens are None where rows have no length."""

    largest_rows: int
    largest_tokens: int | None
    recommended_rows: int
    recommended_tokens: int | None
    knee_rows: int | None
    """The fewest rows within 2% of the recommended ones' throughput; None: nothing was timed."""
    knee_tokens: int | None
    margin: float
    effective_batch_size: int
    cuts: tuple[int, ...]
    """Sequences in each micro-batch of a step; their sum is the effective batch."""
    probes: tuple[Probe, ...]
    ran_out_at_rows: int | None
    """Rows of a probe that ran out of memory, if one did."""
    capacity_gib: float
    """Memory for the steps: what is free, and what this process's allocator holds unused."""
    used_by_others_gib: float | None
    """Memory of other processes; None where the driver does not report it."""
    law: MemoryLaw
    seconds: float
    seconds_after_build: float | None
    """Seconds since the model was built; None: no model was built."""
    reasons: tuple[str, ...]

    def __repr__(self) -> str:
        """The sizes, with notes on them, for a terminal."""
        sizes = {"largest": self.largest_rows, "recommended": self.recommended_rows}
        sizes |= {} if self.knee_rows is None else {"knee": self.knee_rows}
        return "\n".join([text_facts("Rows of a micro-batch", sizes), *self.reasons])


def find(job: BatchSizeJob, profile: HardwareProfile | None = None) -> BatchSizeFound:
    """Find the largest micro-batch of a job on this machine's GPU, or CPU without one."""
    began = perf_counter()
    profile = detect() if profile is None else profile
    if profile.simulated:
        raise BadInput("the GPU is not in this machine", "plan for it instead: trainfit plan")
    if not profile.gpus or profile.torch is None or profile.torch.backend not in ("cuda", "rocm"):
        return _on_cpu(job, profile, began)
    from trainfit.runtime import applied
    from trainfit.tuning.trial import device_for_probes

    with applied(job.runtime), device_for_probes(job.memory_gib) as device:
        return _on_gpu(job, profile, device, began)


def _on_gpu(
    job: BatchSizeJob, profile: HardwareProfile, device: ProbeDevice, began: float
) -> BatchSizeFound:
    from trainfit.tuning.trial import Steps, measure_on

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
    notes.append(f"a real step of {found.ran} rows confirmed it")
    if found.ran_out is not None:
        notes.append(f"a probe of {found.ran_out} rows ran out of memory: the answer lies below it")
    others = gpu.state.memory_used_by_others_gib
    if others:
        notes.append(f"other processes use {others:.2f} GiB of the GPU, which is not counted on")
    built = getattr(make, "built", None)
    after = None if built is None else perf_counter() - built
    return _result(job, found, largest, notes, began, others=others, after=after)


def _on_cpu(job: BatchSizeJob, profile: HardwareProfile, began: float) -> BatchSizeFound:
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


def _result(
    job: BatchSizeJob,
    found: Search,
    largest: int,
    notes: list[str],
    began: float,
    *,
    others: float | None,
    after: float | None,
) -> BatchSizeFound:
    recommended = found.asked.recommended(largest)
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
        probes=tuple(_probe_record(found, probe, tokens) for probe in found.probes),
        ran_out_at_rows=found.ran_out,
        capacity_gib=found.room() / GIB,
        used_by_others_gib=others,
        law=MemoryLaw(fixed_gib=fixed / GIB, gib_per_row=each / GIB),
        seconds=perf_counter() - began,
        seconds_after_build=after,
        reasons=tuple(notes),
    )


def _points(found: Search, largest: int) -> list[tuple[float, float]]:
    """Rows and peaks: measured where there are two, else predicted."""
    if len(found.probes) >= 2:
        return [(p.rows, p.allocated) for p in found.probes[-2:]]
    if found.predict is None:
        last = found.probes[-1]
        return [(0, last.held), (last.rows, last.allocated)]
    rows = sorted({max(1, largest // 2), largest})
    return [(each, found.peak(each).allocated + found.off(each)) for each in rows]


def _probe_record(found: Search, probe: Measured, tokens: Callable[[int], int | None]) -> Probe:
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
    """Sequences per micro-batch of a step of `effective` sequences, `rows` at most in each."""
    lengths = np.ones(effective, dtype=np.int64)
    cut = ladder(lengths, effective, min(rows, effective), padded=not packed)[0]
    (batches,) = cut_step(lengths, range(effective), cut)
    return tuple(len(batch.sequences) for batch in batches if batch.sequences)


def page(found: BatchSizeFound) -> str:
    """Text page: sizes, the cut of a step, memory, probes and notes."""
    share = f"{found.margin:.0%} of it"
    lines = ["Micro-batch", _budget("largest that fits", found.largest_rows, found.largest_tokens)]
    lines.append(_budget(f"recommended, {share}", found.recommended_rows, found.recommended_tokens))
    if found.knee_rows is not None:
        lines.append(_budget("within 2% of its speed from", found.knee_rows, found.knee_tokens))
    lines += ["", "Step", f"  {_step(found)}", "", "Memory", *_memory(found)]
    if found.probes:
        lines += ["", "Probes", *_probes(found)]
    after = found.seconds_after_build
    built = "" if after is None else f", {after:.1f} s of them after the model was built"
    lines += ["", *(f"- {reason}" for reason in found.reasons)]
    lines.append(f"- took {found.seconds:.1f} s{built}")
    return "\n".join(lines)


def _budget(name: str, rows: int, tokens: int | None) -> str:
    length = "" if tokens is None else f"{tokens:>12,} tokens"
    return f"  {name:<28}{rows:>8,} rows{length}"


def _step(found: BatchSizeFound) -> str:
    many = len(found.cuts)
    if many == 1:
        return f"{found.effective_batch_size} sequences in one micro-batch"
    if many <= 8:
        parts = " + ".join(map(str, found.cuts))
        return f"{found.effective_batch_size} sequences = {parts}: accumulate {many} micro-batches"
    least, most = min(found.cuts), max(found.cuts)
    sizes = f"{most}" if least == most else f"{least} to {most}"
    return f"{found.effective_batch_size} sequences in {many} micro-batches of {sizes}"


def _memory(found: BatchSizeFound) -> list[str]:
    law, others = found.law, found.used_by_others_gib
    used = "" if not others else f", besides {others:.2f} GiB that others use"
    return [
        f"  there is room for {found.capacity_gib:.2f} GiB{used}",
        f"  a step takes {law.fixed_gib:.2f} GiB + {law.gib_per_row:.4g} GiB a row",
    ]


def _probes(found: BatchSizeFound) -> list[str]:
    lines = ["      rows   allocated    reserved   predicted     seconds"]
    for probe in found.probes:
        predicted = "unknown" if probe.predicted_gib is None else f"{probe.predicted_gib:.2f} GiB"
        peaks = f"{probe.peak_allocated_gib:>8.2f} GiB{probe.peak_reserved_gib:>8.2f} GiB"
        lines.append(f"  {probe.rows:>8}{peaks}{predicted:>12}{probe.seconds:>12.4f}")
    return lines
