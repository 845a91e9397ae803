"""Several runs side by side: what they reached, how they went, and where their settings differ."""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.records import Scalar
from trainfit.reports.figures import (
    Block,
    Chapter,
    Form,
    Interval,
    Intervals,
    Lines,
    Remark,
    Section,
    Table,
)
from trainfit.reports.numbers import MISSING, cell, shown
from trainfit.reports.run_data import Run
from trainfit.reports.sections.curves import line, needs_log
from trainfit.reports.sections.promise import measured_memory, seconds_of, typical
from trainfit.reports.sections.setting import device_of, flat, model_of

_CURVES: tuple[tuple[str, str, str, Form, bool], ...] = (
    ("train", "loss", "Training loss", "number", False),
    ("evaluations", "loss", "Validation loss", "number", False),
    ("evaluations", "val_loss", "Validation loss", "number", False),
    ("evaluations", "f1", "Validation F1", "number", False),
    ("train", "tokens_per_second", "Tokens per second", "count", True),
    ("train", "mfu", "MFU", "percent", True),
    ("train", "memory_gib", "Peak memory so far", "gib", True),
)


def comparison(runs: Sequence[Run]) -> Chapter:
    """The chapter before those of the runs."""
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


def main_score(run: Run) -> tuple[str, Interval] | None:
    """The figure that a run is judged by, with its interval where folds gave one."""
    metrics = run.results.get("metrics") or {}
    for name, label in (("f1", "F1"), ("val_loss", "validation loss")):
        value = metrics.get(name, run.results.get(name))
        if value is not None:
            low, high = (metrics.get("ci95") or {}).get(name) or (None, None)
            return label, Interval(label=run.name, value=value, low=low, high=high)
    return None


def _table(runs: Sequence[Run]) -> Table:
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
    columns = (
        "run",
        "status",
        "model",
        "device",
        "score",
        "steps",
        "training",
        "samples/s",
        "tokens/s",
        "MFU",
        "peak memory",
    )
    return Table(columns=columns, rows=tuple(rows))


def _scores(runs: Sequence[Run]) -> list[Block]:
    found = [main_score(run) for run in runs]
    blocks: list[Block] = []
    for label in ("F1", "validation loss"):
        rows = [
            Interval(label=s[1].label, value=s[1].value, low=s[1].low, high=s[1].high, color=at)
            for at, s in enumerate(found)
            if s is not None and s[0] == label
        ]
        if rows:
            top = 1.0 if label == "F1" else None
            blocks.append(
                Intervals(id=f"compared-{label[:2]}", title=label, rows=tuple(rows), top=top)
            )
    return blocks


def _curves(runs: Sequence[Run]) -> list[Block]:
    """One line per run; of folds the first, as a line of means would be of nothing that ran."""
    blocks: list[Block] = []
    for table, name, title, form, from_zero in _CURVES:
        series = []
        for color, run in enumerate(runs):
            columns = getattr(run.parts[0], table)
            if name in columns:
                series.append(line(run.name, columns["step"], columns[name], color))
        if len(series) > 1:
            blocks.append(
                Lines(
                    id=f"compared-{table}-{name}".replace("_", "-"),
                    title=title,
                    form=form,
                    series=tuple(series),
                    from_zero=from_zero,
                    log=not from_zero and needs_log(series),
                )
            )
    if blocks and any(len(run.parts) > 1 for run in runs):
        blocks.append(Remark(text="Of a run with folds the curves are its first fold's."))
    return blocks


def _differences(runs: Sequence[Run]) -> Block:
    tables = [flat(run.config.get("config", {})) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = []
    for key in keys:
        values = [str(table.get(key, MISSING)) for table in tables]
        if len(set(values)) > 1:
            rows.append((key, *(cell(table.get(key, MISSING)) for table in tables)))
    if not rows:
        return Remark(text="The configurations are the same.")
    return Table(columns=("key", *(run.name for run in runs)), rows=tuple(rows))
