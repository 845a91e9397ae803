"""How a pretraining run ended, from its run folder: one that was resumed counts as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from trainfit.core.records import Event, Record
from trainfit.engine.observers import TrainRow
from trainfit.jobs.gpt_flops import Standing
from trainfit.runs.reader import Columns, read_part


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

    @property
    def metrics(self) -> dict[str, float]:
        """The validation loss, by its name."""
        return {} if self.val_loss is None else {"val_loss": self.val_loss}


_NEEDED = (
    "compute_seconds",
    "compile_seconds",
    "wait_share",
    "step_seconds",
    "tokens_per_second",
)
"""Figures of a training row that are summed up."""


def iter_line(row: TrainRow) -> str:
    """The tuning guide's line: the time is a step's, without waits for data and compiling."""
    mfu = "" if row.mfu is None else f", mfu {row.mfu:.1%}"
    return f"iter {row.step}: loss {row.loss:.4f}, time {row.compute_seconds * 1e3:.2f}ms{mfu}"


def read_meter(run: Path) -> Meter:
    """Rates and shares of a run by its metrics, without the first row, the warm-up."""
    part = read_part(run)
    train = _whole(part.train, _NEEDED)
    steps = np.diff(train["step"], prepend=0)
    settled = slice(1, None) if len(steps) > 1 else slice(None)
    mfu = train.get("mfu", np.full(len(steps), np.nan))
    computing = steps * train["compute_seconds"]
    waiting = steps * train["wait_share"] * train["step_seconds"]
    tokens = steps * train["tokens_per_second"] * train["step_seconds"]
    computed = float(computing[settled].sum())
    seconds = computed + float(waiting[settled].sum())
    known = computed > 0 and bool(np.isfinite(mfu[settled]).all())
    loss = train["loss"][-1] if len(steps) and "loss" in train else np.nan
    return Meter(
        train_loss=float(loss) if np.isfinite(loss) else None,
        tokens_per_second=float(tokens[settled].sum()) / seconds if seconds else None,
        mfu=float((mfu * computing)[settled].sum()) / computed if known else None,
        wait_share=1 - computed / seconds if seconds else 0.0,
        spent=Spent(
            computing=float(computing.sum()),
            waiting=float(waiting.sum()),
            compiling=float(train["compile_seconds"].sum()),
            evaluating=float(_whole(part.evaluations, ("seconds",))["seconds"].sum()),
        ),
    )


def _whole(table: Columns, needed: Sequence[str]) -> Columns:
    """The rows that have all the figures needed; a run that was damaged has lost some."""
    if not all(name in table for name in ("step", *needed)):
        return {name: np.empty(0) for name in ("step", *needed)}
    whole = np.all([np.isfinite(table[name]) for name in needed], axis=0)
    return {name: values[whole] for name, values in table.items()}
