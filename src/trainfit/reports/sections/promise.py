"""The plan with its reasons, and what it promised against what was measured."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainfit.records import MemoryEstimate, Plan
from trainfit.reports.figures import Block, Form, Interval, Remark, Section, Stack, Table
from trainfit.reports.numbers import MISSING, cell, shown
from trainfit.reports.plan import SETTINGS
from trainfit.reports.plan_plot import parts_at_peak
from trainfit.reports.run_data import Run

_BOUND = 0.005
"""GiB under which a part of the memory is not worth a place in a picture."""


def plan_section(run: Run) -> Section:
    """Every setting and why."""
    plan = run.plan
    blocks: list[Block] = []
    if plan is None:
        blocks.append(Remark(text="This folder has no plan."))
    else:
        rows = [(r.setting, cell(r.value), r.why, "; ".join(r.alternatives)) for r in plan.reasons]
        told = {reason.setting.split(".")[-1] for reason in plan.reasons}
        rows += [(name, cell(getattr(plan, name)), "", "") for name in SETTINGS if name not in told]
        columns = ("setting", "value", "why", "instead of")
        blocks.append(Table(columns=columns, rows=tuple(rows)))
        blocks += [Remark(text=f"Advice: {line}") for line in plan.advice]
    return Section(id="plan", title="Plan", blocks=tuple(blocks))


def promise_section(run: Run) -> Section:
    """Predicted against measured memory and time."""
    blocks: list[Block] = []
    plan = run.plan
    if plan is None:
        blocks.append(Remark(text="Without a plan nothing was promised."))
        return Section(id="promise", title="Predicted and measured", blocks=tuple(blocks))
    rows = tuple(row for row in _rows(plan, run) if {row[1], row[3]} != {MISSING})
    blocks.append(
        Table(
            columns=("", "predicted", "stated error", "measured", "difference"),
            rows=rows,
            note=_note(plan, run),
        )
    )
    if plan.memory is not None:
        blocks.append(_stack(plan.memory, measured_memory(run) if on_gpu(plan) else None))
    return Section(id="promise", title="Predicted and measured", blocks=tuple(blocks))


def on_gpu(plan: Plan | None) -> bool:
    """Whether memory is that of a GPU; a process's own holds Python and torch too."""
    return plan is not None and plan.gpu is not None


def measured_memory(run: Run) -> float | None:
    """The most that any part of the run took, in GiB."""
    peaks = [part.train["memory_gib"].max() for part in run.parts if "memory_gib" in part.train]
    return float(max(peaks)) if peaks else None


def typical(run: Run, name: str) -> float | None:
    """The median of a figure over the log, without the first line, which has the warm-up in it."""
    values = [part.train[name][1:] for part in run.parts if name in part.train]
    together = np.concatenate(values) if values else np.array([])
    together = together[np.isfinite(together)]
    return float(np.median(together)) if together.size else None


def seconds_of(run: Run) -> float | None:
    """The whole time of training over all folds."""
    found = [part.result.get("seconds") for part in run.parts if part.result]
    return float(sum(found)) if found and None not in found else None  # type: ignore[arg-type]


def _rows(plan: Plan, run: Run) -> Iterator[tuple[str, str, str, str, str]]:
    memory, time = plan.memory, plan.time
    comparable = on_gpu(plan)
    if memory is not None:
        label = "peak memory, allocated" if comparable else "peak memory of tensors"
        measured = measured_memory(run) if comparable else None
        yield _row(label, memory.peak_allocated_gib, memory.error_percent, measured, "gib")
        if not comparable:
            known = shown(measured_memory(run), "gib")
            yield "peak memory of the process", MISSING, MISSING, known, MISSING
    figures: tuple[tuple[str, str, Form], ...] = (
        ("step", "step_seconds", "duration"),
        ("samples/s", "samples_per_second", "number"),
        ("tokens/s", "tokens_per_second", "count"),
        ("MFU", "mfu", "percent"),
    )
    error = time.error_percent if time else None
    for label, name, form in figures:
        predicted = getattr(time, name) if time else None
        yield _row(label, predicted, error, typical(run, name), form)
    ends = [part.result.get("seconds") for part in run.parts if part.status == "finished"]
    mean = float(np.mean(ends)) if ends and None not in ends else None  # type: ignore[arg-type]
    label = "training, per fold" if len(run.parts) > 1 else "training"
    yield _row(label, time.total_seconds if time else None, error, mean, "duration")


def _row(
    label: str, predicted: float | None, error: float | None, measured: float | None, form: Form
) -> tuple[str, str, str, str, str]:
    difference = f"{measured / predicted - 1:+.1%}" if predicted and measured else MISSING
    stated = MISSING if error is None or predicted is None else f"± {error:.1f}%"
    return label, shown(predicted, form), stated, shown(measured, form), difference


def _note(plan: Plan, run: Run) -> str:
    notes = ["Rates are medians over the log without its first line."]
    if plan.time is None or plan.time.step_seconds is None:
        notes.append("No times were recorded on this kind of device, so none were predicted.")
    if plan.memory is not None and not on_gpu(plan):
        notes.append("On a CPU the process holds Python and torch beside the tensors.")
    steps = {part.result.get("steps") for part in run.parts if part.result}
    early = any(event.kind == "early stop" for part in run.parts for event in part.events)
    if early and steps:
        notes.append("Training stopped early, which the prediction of its time does not know.")
    return " ".join(notes)


def _stack(memory: MemoryEstimate, measured: float | None) -> Stack:
    parts = parts_at_peak(memory)
    shares = [Interval(label=k, value=v, color=at) for at, (k, v) in enumerate(parts.items())]
    small = memory.peak_reserved_gib < memory.capacity_gib / 50
    note = f"{shown(memory.peak_reserved_gib, 'gib')} reserved of {memory.capacity_gib:.2f} GiB"
    return Stack(
        id="memory",
        title="Predicted memory at the peak",
        note=note + (", drawn without the rest" if small else ""),
        parts=tuple(part for part in shares if (part.value or 0) > (0 if small else _BOUND)),
        capacity=None if small else memory.capacity_gib,
        measured=measured,
    )
