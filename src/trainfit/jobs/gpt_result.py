"""How a pretraining run ended, from its run folder: one that was resumed counts as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from trainfit.core import codec
from trainfit.core.records import Event, Record
from trainfit.engine.observers import TrainRow
from trainfit.jobs.gpt_flops import Standing


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Where the seconds went."""

    computing: float
    waiting: float
    """In which the device stood still for want of data."""
    compiling: float
    evaluating: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """The figures of a run, over all its lines of the log."""

    train_loss: float | None
    """Of the last line."""
    tokens_per_second: float | None
    """In training, waits for data included, without compiling, evaluating and saving."""
    mfu: float | None
    """Of the time in which the GPUs computed."""
    wait_share: float
    spent: Spent


@dataclass(frozen=True, kw_only=True, slots=True)
class GptResult(Record):
    """What came of a pretraining job."""

    task: str = "gpt"
    run: str
    status: Literal["finished", "stopped"]
    steps: int
    train_loss: float | None
    val_loss: float | None
    """Of the exported weights, in nats per token."""
    unigram_entropy: float | None
    """The loss of one who knows only how common each token is."""
    tokens_per_second: float | None
    gpu: str | None
    """The catalogue's row."""
    mfu: float | None
    """Of the dense peak by the datasheet; None where it is not known."""
    mfu_of_measured: float | None
    """Of the peak that `check --measure` found here."""
    standing: Standing | None
    """By the tuning guide's table."""
    next_steps: tuple[str, ...]
    """Overrides to try where it is poor, the most promising first."""
    peak_memory_gib: float | None
    seconds: float
    spent: Spent
    events: tuple[Event, ...]


_NEEDED = {
    "train": (
        "compute_seconds",
        "compile_seconds",
        "wait_share",
        "step_seconds",
        "tokens_per_second",
    ),
    "evaluation": ("seconds",),
}
"""Figures of a row that are summed up, by its kind."""


def iter_line(row: TrainRow) -> str:
    """The tuning guide's line: the time is a step's, without waits for data and compiling."""
    mfu = "" if row.mfu is None else f", mfu {row.mfu:.1%}"
    return f"iter {row.step}: loss {row.loss:.4f}, time {row.compute_seconds * 1e3:.2f}ms{mfu}"


def read_meter(run: Path) -> Meter:
    """From metrics.jsonl."""
    rows = _rows(run)
    train = [row for row in rows if row.get("kind") == "train"]
    steps = _steps(train)
    settled = slice(1, None) if len(train) > 1 else slice(None)  # the first ones warm up
    computing = _sum(train[settled], steps[settled], lambda row: row["compute_seconds"])
    seconds = _sum(
        train[settled],
        steps[settled],
        lambda row: row["compute_seconds"] + row["wait_share"] * row["step_seconds"],
    )
    tokens = _sum(
        train[settled], steps[settled], lambda row: row["tokens_per_second"] * row["step_seconds"]
    )
    ideal = _sum(
        train[settled],
        steps[settled],
        lambda row: (_number(row.get("mfu")) or 0.0) * row["compute_seconds"],
    )
    known = bool(train) and all(_number(row.get("mfu")) is not None for row in train[settled])
    return Meter(
        train_loss=_number(train[-1].get("loss")) if train else None,
        tokens_per_second=tokens / seconds if seconds else None,
        mfu=ideal / computing if known and computing else None,
        wait_share=1 - computing / seconds if seconds else 0.0,
        spent=Spent(
            computing=_sum(train, steps, lambda row: row["compute_seconds"]),
            waiting=_sum(train, steps, lambda row: row["wait_share"] * row["step_seconds"]),
            compiling=sum(row["compile_seconds"] for row in train),
            evaluating=sum(row["seconds"] for row in rows if row.get("kind") == "evaluation"),
        ),
    )


def _rows(run: Path) -> list[dict[str, Any]]:
    """The rows that are whole; a run that was damaged and gone on with has lost some."""
    try:
        rows = codec.read_rows(run / "metrics.jsonl")
    except OSError:
        return []
    return [row for row in rows if _is_whole(row)]


def _is_whole(row: dict[str, Any]) -> bool:
    needed = _NEEDED.get(str(row.get("kind")), ())
    figures = [row.get(name) for name in ("step", *needed)]
    return all(isinstance(value, int | float) and math.isfinite(value) for value in figures)


def _steps(rows: Sequence[dict[str, Any]]) -> list[int]:
    """The steps that each line is about."""
    ends = [0, *(int(row["step"]) for row in rows)]
    return [end - start for start, end in pairwise(ends)]


def _sum(rows: Sequence[dict[str, Any]], steps: Sequence[int], per_step: Any) -> float:
    return float(sum(count * per_step(row) for row, count in zip(rows, steps, strict=True)))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
