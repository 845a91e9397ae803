"""Sections on the job, machine, data, plan, prediction, receipt and events of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainfit.conf.composition import flatten
from trainfit.core.errors import redact_words
from trainfit.core.plan_records import MemoryEstimate, Plan
from trainfit.core.records import HardwareProfile
from trainfit.reports.model import (
    MISSING,
    Block,
    Facts,
    Form,
    IntervalRow,
    Remark,
    Section,
    Stack,
    Table,
    cell,
    shown,
)
from trainfit.reports.plan_page import FIELDS
from trainfit.reports.plots import parts_at_peak
from trainfit.runs import timeline
from trainfit.runs.reader import RunFiles, finite

_NAMES_DATA = {"nli": "data_dir", "textclass": "train", "pairs": "train", "tokens": "train"}
"""Key of the data by task; null: it is made up."""


def setup_section(run: RunFiles) -> Section:
    """Job, machine, data, settings in effect and configuration."""
    blocks: list[Block] = [Remark(text=text, tone="warning") for text in run.problems]
    blocks.append(Facts(title="Job", items=tuple(_job(run))))
    blocks.append(Facts(title="Machine", items=tuple(_machine(run))))
    if data := tuple(_data(run)):
        blocks.append(Facts(title="Data", items=data))
    if (setup := run.parts[0].setup) is not None:
        rows = tuple((line,) for line in setup.lines())
        blocks.append(Table(title="Settings in effect", columns=("",), rows=rows))
    if run.config.get("config"):
        blocks.append(_configuration(run))
    return Section(id="setting", title="What was run", blocks=tuple(blocks))


def device_of(run: RunFiles) -> str:
    if (setup := run.parts[0].setup) is not None:
        return setup.device_words
    if run.hardware and run.hardware.gpus:
        return run.hardware.gpus[0].name
    return (run.plan.gpu if run.plan else None) or "unknown device"


def model_of(run: RunFiles) -> str:
    """Name of the model, or the last part of its path."""
    name = run.setting("model.name")
    if name is None:
        return str(run.setting("model.size") or "")
    return Path(str(name)).name if "/" in str(name) and Path(str(name)).is_dir() else str(name)


def is_synthetic(run: RunFiles) -> bool:
    """True where the run's data was made up, by its first lines or its configuration."""
    setup = run.parts[0].setup
    if setup is not None and setup.data is not None:
        return setup.data.synthetic
    data = run.setting("data")
    key = _NAMES_DATA.get(str(run.config.get("task")))
    return isinstance(data, Mapping) and key in data and data[key] is None


def started(run: RunFiles) -> str:
    """Date and time at which a run began; empty for a run of an earlier version."""
    return str(run.environment.get("started") or "")


def _job(run: RunFiles) -> Iterator[tuple[str, str]]:
    yield "task", str(run.config.get("task", "unknown"))
    if model := model_of(run):
        weights = run.setting("model.weights")
        yield "model", model + (f", {weights} weights" if weights not in (None, "auto") else "")
    if method := run.setting("model.method"):
        frozen = run.setting("model.freeze_encoder") is True
        if run.plan is not None:
            frozen = run.plan.workload.method == "frozen"
        yield "method", "frozen encoder" if frozen else str(method)
    for name in ("hardware", "experiment"):
        if run.config.get(name):
            yield f"{name} preset", str(run.config[name])
    if run.plan is not None and run.plan.ranks > 1:
        yield "ranks", str(run.plan.ranks)
    if command := run.environment.get("command"):
        first, *rest = redact_words(map(str, command))  # older runs hold it as typed
        yield "command", " ".join([Path(first).name, *rest])
    if began := started(run):
        yield "started", began
    yield "folder", str(run.folder)


def _machine(run: RunFiles) -> Iterator[tuple[str, str]]:
    yield "device", device_of(run)
    if run.hardware is not None:
        yield from _hardware(run.hardware)
    if "platform" in run.environment:
        yield "platform", str(run.environment["platform"])
    packages = run.environment.get("packages", {})
    versions = {"python": run.environment.get("python", ""), **packages}
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def _hardware(profile: HardwareProfile) -> Iterator[tuple[str, str]]:
    for gpu in profile.gpus:
        yield f"GPU {gpu.index}", f"{gpu.name}, {gpu.memory_gib:.1f} GiB"
    cpu = profile.cpu
    yield "CPU", f"{cpu.name}, {cpu.cores} of {cpu.host_cores} cores"
    yield "memory", f"{profile.memory_gib:.1f} GiB"
    if profile.driver:
        yield "driver", profile.driver


def _data(run: RunFiles) -> Iterator[tuple[str, str]]:
    folds = run.data.get("folds") or []
    if not folds:
        yield from _token_files(run.data.get("header"))
        return
    first: Mapping[str, Any] = folds[0]
    if len(folds) > 1:
        yield "folds", f"{len(folds)}; the counts are the first one's"
    for part in ("train", "validation", "test"):
        counts = first.get(part)
        if isinstance(counts, Mapping):
            yield part, _counts(counts)
    if classes := first.get("classes"):
        yield "classes", ", ".join(map(str, classes))


def _token_files(header: Any) -> Iterator[tuple[str, str]]:
    """Token counts of a pretraining job."""
    header = header if isinstance(header, Mapping) else {}
    for part in ("train", "validation"):
        if isinstance(header.get(part), Mapping):
            yield part, _counts(header[part])
    if "vocab_size" in header:
        yield "vocabulary", cell(header["vocab_size"])


def _counts(counts: Mapping[str, Any]) -> str:
    said = []
    for key, value in counts.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            said.append(f"{cell(value)} {key.replace('_', ' ')}")
    return ", ".join(said)


def _configuration(run: RunFiles) -> Table:
    origins = run.config.get("origins") or {}
    rows = [
        (key, cell(value) if not isinstance(value, list) else str(value), origins.get(key, ""))
        for key, value in flatten(run.config["config"])
    ]
    rows.sort(key=lambda row: row[2] == "default")
    return Table(
        title="Configuration",
        columns=("key", "value", "from"),
        rows=tuple(rows),
        strong=tuple(at for at, row in enumerate(rows) if row[2] != "default"),
        folded=True,
    )


_BOUND = 0.005
"""GiB below which a part of the memory is not drawn."""


def plan_section(run: RunFiles) -> Section:
    """Every setting of the plan, with its reason."""
    plan = run.plan
    blocks: list[Block] = []
    if plan is None:
        blocks.append(Remark(text="This folder has no plan."))
    else:
        rows = [(r.setting, cell(r.value), r.why, "; ".join(r.alternatives)) for r in plan.reasons]
        told = {reason.setting.split(".")[-1] for reason in plan.reasons}
        rows += [(name, cell(getattr(plan, name)), "", "") for name in FIELDS if name not in told]
        columns = ("setting", "value", "why", "instead of")
        blocks.append(Table(columns=columns, rows=tuple(rows)))
        blocks += [Remark(text=f"Advice: {line}") for line in plan.advice]
    return Section(id="plan", title="Plan", blocks=tuple(blocks))


def prediction_section(run: RunFiles) -> Section:
    """Predicted against measured memory and time."""
    plan = run.plan
    blocks: list[Block] = []
    if plan is None:
        blocks.append(Remark(text="Without a plan nothing was predicted."))
    else:
        columns = ("", "predicted", "stated error", "measured", "difference")
        rows = tuple(row for row in _rows(plan, run) if {row[1], row[3]} != {MISSING})
        blocks.append(Table(columns=columns, rows=rows, note=_note(plan, run)))
    if plan is not None and plan.memory is not None:
        blocks.append(_stack(plan.memory, measured_memory(run) if on_gpu(plan) else None))
    return Section(id="promise", title="Predicted and measured", blocks=tuple(blocks))


def on_gpu(plan: Plan | None) -> bool:
    """True where memory is that of a GPU; memory of a process holds Python and torch too."""
    return plan is not None and plan.gpu is not None


def measured_memory(run: RunFiles) -> float | None:
    """Peak memory over all parts of the run, in GiB."""
    peaks = np.concatenate([finite(part.train, "memory_gib") for part in run.parts])
    return float(peaks.max()) if peaks.size else None


def typical(run: RunFiles, name: str) -> float | None:
    """Median of a figure over the log, without the first row, which has the warm-up in it."""
    values = np.concatenate([finite(part.train, name, start=1) for part in run.parts])
    return float(np.median(values)) if values.size else None


def seconds_of(run: RunFiles) -> float | None:
    """Seconds of training over all folds."""
    found = [part.result.get("seconds") for part in run.parts if part.result]
    return float(sum(found)) if found and None not in found else None  # type: ignore[arg-type]


def _rows(plan: Plan, run: RunFiles) -> Iterator[tuple[str, str, str, str, str]]:
    memory, time = plan.memory, plan.time
    comparable = on_gpu(plan)
    if memory is not None:
        label = "peak memory, allocated" if comparable else "peak memory of tensors"
        measured = measured_memory(run) if comparable else None
        if memory.bound:  # no prediction, so there is no difference to it
            most = f"at most {shown(memory.peak_allocated_gib, 'gib')}"
            yield label, most, MISSING, shown(measured, "gib"), MISSING
        else:
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
    if time is not None and time.job_seconds is not None and run.timeline:
        spent = sum(timeline.seconds_by_stage(run.timeline).values())
        yield _row("whole job, up to this page", time.job_seconds, None, spent, "duration")


def _row(
    label: str, predicted: float | None, error: float | None, measured: float | None, form: Form
) -> tuple[str, str, str, str, str]:
    difference = f"{measured / predicted - 1:+.1%}" if predicted and measured else MISSING
    stated = MISSING if error is None or predicted is None else f"± {error:.1f}%"
    return label, shown(predicted, form), stated, shown(measured, form), difference


def _note(plan: Plan, run: RunFiles) -> str:
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
    shares = [IntervalRow(label=k, value=v, color=at) for at, (k, v) in enumerate(parts.items())]
    small = memory.peak_reserved_gib < memory.capacity_gib / 50
    note = f"{shown(memory.peak_reserved_gib, 'gib')} reserved of {memory.capacity_gib:.2f} GiB"
    if memory.bound:
        note = f"at most {note}"
    return Stack(
        id="memory",
        title="Upper bound of the memory" if memory.bound else "Predicted memory at the peak",
        note=note + (", drawn without the rest" if small else ""),
        parts=tuple(part for part in shares if (part.value or 0) > (0 if small else _BOUND)),
        capacity=None if small else memory.capacity_gib,
        measured=measured,
    )


_COLORS = 8


def timeline_section(run: RunFiles) -> Section | None:
    """Wall time by stage, from the start of the process, where the run has a time line."""
    spent = timeline.seconds_by_stage(run.timeline)
    if not spent:
        return None
    parts = [
        IntervalRow(label=name, value=seconds, color=at % _COLORS)
        for at, (name, seconds) in enumerate(spent.items())
    ]
    first = [r["begin"] for r in run.timeline if r["stage"] == timeline.FIRST_UPDATE][:1]
    said = [f"{shown(sum(spent.values()), 'duration')} in all"]
    said += [f"the first update was finished after {shown(at, 'duration')}" for at in first]
    stack = Stack(
        id="stages",
        title="Wall time by stage",
        note="; ".join(said),
        form="duration",
        parts=tuple(parts),
    )
    return Section(id="timeline", title="Where the time went", blocks=(stack,))


_STATUS = {
    "active": "active",
    "not_active": "NOT ACTIVE",
    "off": "off",
    "not_applicable": "not applicable",
}
_MOST_EVENTS = 200


def receipt_section(run: RunFiles) -> Section | None:
    """Requested against observed, where the run has a receipt; failed items stand first."""
    if run.receipt is None:
        return None
    items = sorted(run.receipt.items, key=lambda item: item.status != "not_active")
    rows = tuple(
        (i.name, _STATUS[i.status], cell(i.requested), cell(i.observed), i.evidence, i.mend)
        for i in items
    )
    counts = {status: sum(i.status == status for i in items) for status in _STATUS}
    said = ", ".join(f"{n} {_STATUS[s].lower()}" for s, n in counts.items() if n)
    columns = ("optimization", "status", "requested", "observed", "evidence", "fix")
    failed = tuple(at for at, item in enumerate(items) if item.status == "not_active")
    verdict = Remark(text=f"{said}.", tone="warning" if failed else "plain")
    table = Table(columns=columns, rows=rows, strong=failed)
    return Section(id="receipt", title="Receipt", blocks=(verdict, table))


def events_section(run: RunFiles) -> Section:
    rows = [
        (part.name, event.step, shown(event.seconds, "duration"), event.kind, event.text)
        for part in run.parts
        for event in part.events
    ]
    if not rows:
        nothing = Remark(text="Nothing out of the ordinary happened.")
        return Section(id="events", title="Events", blocks=(nothing,))
    table = Table(
        columns=("", "step", "after", "event", "what"),
        rows=tuple(rows[:_MOST_EVENTS]),
        strong=tuple(at for at, row in enumerate(rows) if row[3] in ("oom", "failed")),
    )
    left = len(rows) - _MOST_EVENTS
    more: tuple[Block, ...] = (Remark(text=f"{left:,} more in train.log."),) if left > 0 else ()
    return Section(id="events", title="Events", blocks=(table, *more))
