"""Curves over the steps of a run (loss, speed, memory, GPUs) with events, and runs compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainfit.conf.composition import flatten
from trainfit.core.records import Scalar
from trainfit.hardware.catalogue import gpus
from trainfit.reports.model import (
    MISSING,
    URGENT,
    Block,
    Chapter,
    Form,
    IntervalRow,
    Intervals,
    Lines,
    Mark,
    Reference,
    Remark,
    Section,
    Series,
    Stack,
    Table,
    cell,
    shown,
)
from trainfit.reports.run_sections import (
    device_of,
    measured_memory,
    model_of,
    on_gpu,
    seconds_of,
    typical,
)
from trainfit.runs.reader import Columns, RunFiles, RunPart, thin

_MOST_MARKS = 60
"""Most events marked on a plot: more would hide it, and the table of events has them all."""


@dataclass(frozen=True, slots=True)
class PlotSpec:
    """Name, title and axis of one figure of the log."""

    name: str
    title: str
    form: Form = "number"
    from_zero: bool = False


_TRAINING = (
    PlotSpec("loss", "Training loss"),
    PlotSpec("learning_rate", "Learning rate", from_zero=True),
    PlotSpec("grad_norm", "Gradient norm", from_zero=True),
)
_SPEED = (
    PlotSpec("tokens_per_second", "Tokens per second", "count", from_zero=True),
    PlotSpec("samples_per_second", "Samples per second", from_zero=True),
    PlotSpec("mfu", "MFU", "percent", from_zero=True),
    PlotSpec("memory_gib", "Peak memory so far", "gib", from_zero=True),
    PlotSpec("wait_share", "Waiting for data", "percent", from_zero=True),
)
_GPUS = (
    PlotSpec("utilisation_percent", "GPU utilisation", "percent", from_zero=True),
    PlotSpec("temperature_c", "GPU temperature", "celsius"),
    PlotSpec("memory_used_gib", "GPU memory in use, all processes", "gib", from_zero=True),
    PlotSpec("power_w", "GPU power", "watts", from_zero=True),
)
_COMPARED_SPEED = ("tokens_per_second", "mfu", "memory_gib")
_CHOSEN = ("loss", "f1", "macro_f1", "accuracy", "auc")
"""Figures of evaluations that are plotted first."""
_MAIN = {"f1": "F1", "macro_f1": "macro F1", "rmse": "RMSE", "val_loss": "validation loss"}
"""Figures that decide, with their titles."""


def training_section(run: RunFiles) -> Section:
    """Plots of loss, validation figures, learning rate and gradient norm."""
    blocks: list[Block] = []
    entropy = {"loss": _loss_levels(run), "val_loss": _loss_levels(run)}
    for spec in _TRAINING:
        blocks += _plot(run, spec, "train", entropy.get(spec.name, ()))
        if spec.name == "loss":
            for measure in _measures(run):
                blocks += _plot(run, measure, "evaluations", entropy.get(measure.name, ()))
    if not blocks:
        blocks.append(Remark(text="Nothing was logged."))
    return Section(id="training", title="Training", blocks=tuple(blocks))


def speed_section(run: RunFiles) -> Section:
    """Plots of throughput, MFU, memory, waiting, and the samples of the GPUs."""
    blocks: list[Block] = []
    levels = {"mfu": _mfu_levels(run), "memory_gib": _memory_levels(run)}
    for spec in _SPEED:
        blocks += _plot(run, spec, "train", levels.get(spec.name, ()))
    if not any("mfu" in part.train for part in run.parts):
        blocks.append(Remark(text=f"No MFU: {_why_no_mfu(run)}."))
    blocks += _spent(run)
    samples = [figure for spec in _GPUS for figure in _gpu_plot(run, spec)]
    blocks += samples
    if not samples:
        asked = "the driver was not asked, or did not answer"
        why = asked if on_gpu(run.plan) else "the run used no GPU that the catalogue knows"
        blocks.append(Remark(text=f"No GPU utilisation or temperature: {why}."))
    return Section(id="speed", title="Speed and memory", blocks=tuple(blocks))


def line(name: str, x: Any, y: Any, color: int) -> Series:
    """A line with its points thinned; a value that is not finite is a gap."""
    xs, ys = thin(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64))
    return Series(
        name=name,
        x=tuple(xs.tolist()),
        y=tuple(value if np.isfinite(value) else None for value in ys.tolist()),
        color=color,
        style="dots" if len(xs) <= 40 else "line",
    )


def needs_log(series: Iterable[Series]) -> bool:
    """True where the values span a factor of 100, which a linear axis would hide."""
    values = [value for one in series for value in one.y if value is not None]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 100


def marks(parts: Sequence[RunPart]) -> tuple[Mark, ...]:
    """Events to mark on every plot over steps."""
    found = [
        Mark(
            x=event.step,
            event=event.kind,
            text=f"{part.name}: {event.text}" if part.name else event.text,
        )
        for part in parts
        for event in part.events
    ]
    urgent = [mark for mark in found if mark.event in URGENT]
    return tuple((found if len(found) <= _MOST_MARKS else urgent)[:_MOST_MARKS])


def _lines(
    name: str,
    spec: PlotSpec,
    series: Sequence[Series],
    marks: tuple[Mark, ...] = (),
    references: tuple[Reference, ...] = (),
) -> list[Lines]:
    """The plot of these lines; none without a line."""
    if not series:
        return []
    return [
        Lines(
            id=name.replace("_", "-"),
            title=spec.title,
            form=spec.form,
            series=tuple(series),
            marks=marks,
            references=references,
            log=not spec.from_zero and needs_log(series),
            from_zero=spec.from_zero,
        )
    ]


def _plot(
    run: RunFiles, spec: PlotSpec, table: str, references: tuple[Reference, ...] = ()
) -> list[Lines]:
    series = []
    for color, part in enumerate(run.parts):
        columns: Columns = getattr(part, table)
        if spec.name in columns:
            series.append(line(part.name or "run", columns["step"], columns[spec.name], color))
    prefix = "" if table == "train" else "validation-"
    return _lines(f"{prefix}{spec.name}", spec, series, marks(run.parts), references)


def _measures(run: RunFiles) -> list[PlotSpec]:
    """Figures of the evaluations, the main ones first."""
    names = dict.fromkeys(name for part in run.parts for name in part.evaluations)
    wanted = dict.fromkeys((*_CHOSEN, run.results.get("metric")))
    first = [name for name in wanted if name in names]
    rest = [name for name in names if name not in (*first, "step", "seconds", "unigram_entropy")]
    chosen = first if first and first != ["loss"] else [*first, *rest]
    titles = _MAIN | {"auc": "AUC", "val_loss": "loss"}
    return [
        PlotSpec(name, f"Validation {titles.get(name, name.replace('_', ' '))}") for name in chosen
    ]


def _gpu_plot(run: RunFiles, spec: PlotSpec) -> list[Lines]:
    series: list[Series] = []
    for part in run.parts:
        for gpu, columns in part.gpus.items():
            if spec.name in columns:
                scale = 100 if spec.form == "percent" else 1
                name = f"{part.name}, {gpu}" if part.name else gpu
                values = columns[spec.name] / scale
                series.append(line(name, columns["step"], values, len(series)))
    return _lines(spec.name, spec, series, marks(run.parts))


def _spent(run: RunFiles) -> list[Stack]:
    """Seconds by activity, for a job that records them."""
    spent: Mapping[str, Any] = run.results.get("spent") or {}
    parts = tuple(
        IntervalRow(label=name, value=float(seconds), color=at)
        for at, (name, seconds) in enumerate(spent.items())
        if isinstance(seconds, int | float)
    )
    if not parts:
        return []
    return [Stack(id="spent", title="Where the time went", form="duration", parts=parts)]


def _loss_levels(run: RunFiles) -> tuple[Reference, ...]:
    entropy = run.results.get("unigram_entropy")
    return () if entropy is None else (Reference(y=float(entropy), label="unigram entropy"),)


def _memory_levels(run: RunFiles) -> tuple[Reference, ...]:
    if run.plan is None or run.plan.memory is None or not on_gpu(run.plan):
        return ()
    memory = run.plan.memory
    label = "upper bound" if memory.bound else "predicted peak"
    return (
        Reference(y=memory.peak_allocated_gib, label=label),
        Reference(y=memory.capacity_gib, label="capacity"),
    )


def _mfu_levels(run: RunFiles) -> tuple[Reference, ...]:
    """MFU that the tuning guide calls good and excellent on this GPU, for a small GPT."""
    slug = run.plan.gpu if run.plan else None
    spec = next((row for row in gpus() if row.slug == slug), None)
    if spec is None or run.config.get("task") != "gpt":
        return ()
    targets = {"good": spec.mfu_good, "excellent": spec.mfu_excellent}
    return tuple(
        Reference(y=percents[0] / 100, label=f"{name} from {percents[0]}%")
        for name, percents in targets.items()
        if percents is not None
    )


def _why_no_mfu(run: RunFiles) -> str:
    if not on_gpu(run.plan):
        return "there is no published peak for this device"
    if run.plan is not None and run.plan.workload.method == "frozen":
        return "most of the work of a frozen encoder is done before the first step"
    return "the peak of this GPU or the work of a step is not known"


_COMPARED: tuple[tuple[str, PlotSpec], ...] = (
    ("train", _TRAINING[0]),
    ("evaluations", PlotSpec("loss", "Validation loss")),
    ("evaluations", PlotSpec("val_loss", "Validation loss")),
    ("evaluations", PlotSpec("f1", "Validation F1")),
    ("evaluations", PlotSpec("rmse", "Validation RMSE")),
    *(("train", spec) for spec in _SPEED if spec.name in _COMPARED_SPEED),
)


def comparison(runs: Sequence[RunFiles]) -> Chapter:
    """The chapter that compares runs, before those of each run."""
    sections = [
        Section(id="side-by-side", title="Side by side", blocks=(_table(runs), *_scores(runs))),
        Section(id="curves", title="Curves", blocks=tuple(_curves(runs))),
        Section(id="differences", title="Where the settings differ", blocks=(_differences(runs),)),
    ]
    tasks = ", ".join(sorted({str(run.config.get("task", "unknown")) for run in runs}))
    return Chapter(
        id="comparison",
        title=f"{len(runs)} runs compared",
        subtitle=tasks,
        status="",
        headlines=(),
        sections=tuple(section for section in sections if section.blocks),
    )


def main_score(run: RunFiles) -> tuple[str, IntervalRow] | None:
    """Main score of a run, with its interval where there are folds."""
    metrics, name = run.results.get("metrics") or {}, main_figure(run)
    if name is None:
        return None
    value = metrics.get(name, run.results.get(name))
    low, high = (metrics.get("ci95") or {}).get(name) or (None, None)
    label = _MAIN.get(name, name)
    return label, IntervalRow(label=run.name, value=value, low=low, high=high)


def main_figure(run: RunFiles) -> str | None:
    """Name the figure that decides, among those that the run has."""
    metrics = run.results.get("metrics") or {}
    folds = run.data.get("folds") or [{}]
    own = run.results.get("metric")  # of a job of the user's own
    names = (own,) if own else (folds[0].get("metric"), *_MAIN)
    known = (str(name) for name in names if metrics.get(name, run.results.get(name)) is not None)
    return next(known, None)


def _table(runs: Sequence[RunFiles]) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    for run in runs:
        score = main_score(run)
        rows.append(
            (
                run.name,
                run.status,
                model_of(run),
                device_of(run),
                f"{score[0]} {score[1].value:.4f}" if score else MISSING,
                sum(int(part.train["step"][-1]) for part in run.parts if "step" in part.train),
                shown(seconds_of(run), "duration"),
                shown(typical(run, "samples_per_second"), "number"),
                shown(typical(run, "tokens_per_second"), "count"),
                shown(typical(run, "mfu"), "percent"),
                shown(measured_memory(run), "gib"),
            )
        )
    about = ("run", "status", "model", "device", "score", "steps", "training")
    figures = ("samples/s", "tokens/s", "MFU", "peak memory")
    return Table(columns=(*about, *figures), rows=tuple(rows))


def _scores(runs: Sequence[RunFiles]) -> list[Block]:
    found = [main_score(run) for run in runs]
    blocks: list[Block] = []
    for label in dict.fromkeys(score[0] for score in found if score is not None):
        blocks.append(
            Intervals(
                id=f"compared-{label[:2] if ' ' in label else label}",
                title=label,
                rows=tuple(
                    replace(score[1], color=at)
                    for at, score in enumerate(found)
                    if score is not None and score[0] == label
                ),
                top=1.0 if label == "F1" else None,
            )
        )
    return blocks


def _curves(runs: Sequence[RunFiles]) -> list[Block]:
    """One line per run, of its first fold: a line of means would show no run that happened."""
    blocks: list[Block] = []
    for table, spec in _COMPARED:
        series = []
        for color, run in enumerate(runs):
            columns = getattr(run.parts[0], table)
            if spec.name in columns:
                series.append(line(run.name, columns["step"], columns[spec.name], color))
        if len(series) > 1:
            blocks += _lines(f"compared-{table}-{spec.name}", spec, series)
    if blocks and any(len(run.parts) > 1 for run in runs):
        blocks.append(Remark(text="Of a run with folds the curves are its first fold's."))
    return blocks


def _differences(runs: Sequence[RunFiles]) -> Block:
    tables = [dict(flatten(run.config.get("config", {}))) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    found = {key: [table.get(key, MISSING) for table in tables] for key in keys}
    rows = [(k, *map(cell, each)) for k, each in found.items() if len(set(map(str, each))) > 1]
    if not rows:
        return Remark(text="The configurations are the same.")
    return Table(columns=("key", *(run.name for run in runs)), rows=tuple(rows))
