"""Result of a pretraining run, read from its run folder, and the tuning guide's advice on its MFU.

A resumed run counts as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from trainfit.conf import GptConfig
from trainfit.core.files import text_facts
from trainfit.core.plan_records import Plan
from trainfit.core.records import Event, Record
from trainfit.engine.observers import TrainRow
from trainfit.hardware.catalogue import GpuSpec
from trainfit.runs.reader import Columns, read_part

Standing = Literal["poor", "good", "excellent"]
_GENERAL_GOOD, _GENERAL_EXCELLENT = (15, 25), (30, 100)
"""Good and excellent MFU in percent, for GPUs that the tuning guide's table has no row for."""
_FULL = 0.80
"""Share of the memory in use above which the guide does not enlarge the batch."""
_AIM = 0.85
_LONG = 1024
_WAITING = 0.05
_NEEDED = ("compute_seconds", "compile_seconds", "wait_share", "step_seconds", "tokens_per_second")
"""Figures of a training row that are summed up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Seconds of a run by what they were spent on."""

    computing: float
    waiting: float
    """Waiting for data, with the device idle."""
    compiling: float
    evaluating: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """Figures of a run over all rows of its log."""

    train_loss: float | None
    """Loss of the last row."""
    tokens_per_second: float | None
    """Training rate with waits for data, without compiling, evaluating and saving."""
    mfu: float | None
    """Share of the peak while the GPUs computed."""
    wait_share: float
    spent: Spent


@dataclass(frozen=True, kw_only=True, slots=True)
class GptResult(Record):
    """Result of a pretraining job."""

    task: str = "gpt"
    run: str
    status: Literal["finished", "stopped"]
    steps: int
    train_loss: float | None
    val_loss: float | None
    """Loss of the exported weights, in nats per token."""
    unigram_entropy: float | None
    """Loss of a model that knows only how common each token is."""
    tokens_per_second: float | None
    gpu: str | None
    """Name of the GPU in the catalogue."""
    mfu: float | None
    """Share of the datasheet's dense peak; None where the peak is not known."""
    mfu_of_measured: float | None
    """Share of the peak that `check --measure` found here."""
    standing: Standing | None
    """Rating by the tuning guide's table."""
    next_steps: tuple[str, ...]
    """Overrides to try where the MFU is poor, the most promising first."""
    peak_memory_gib: float | None
    seconds: float
    spent: Spent
    events: tuple[Event, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Validation loss by its name."""
        return {} if self.val_loss is None else {"val_loss": self.val_loss}

    def __repr__(self) -> str:
        """Figures for a terminal."""
        names = ("steps", "train_loss", "val_loss", "tokens_per_second", "mfu", "seconds")
        figures = {name: getattr(self, name) for name in names}
        return text_facts(f"{self.task} {self.status}: {self.run}", figures)


def iter_line(row: TrainRow) -> str:
    """Format the tuning guide's line; its time is a step's without waiting and compiling."""
    mfu = "" if row.mfu is None else f", mfu {row.mfu:.1%}"
    return f"iter {row.step}: loss {row.loss:.4f}, time {row.compute_seconds * 1e3:.2f}ms{mfu}"


def read_meter(run: Path) -> Meter:
    """Read rates and shares of a run from its metrics, without the first row, the warm-up."""
    part = read_part(run)
    train = _complete(part.train, _NEEDED)
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
            evaluating=float(_complete(part.evaluations, ("seconds",))["seconds"].sum()),
        ),
    )


def _complete(table: Columns, needed: Sequence[str]) -> Columns:
    """Keep the rows that have all needed figures; a damaged run has lost some."""
    if not all(name in table for name in ("step", *needed)):
        return {name: np.empty(0) for name in ("step", *needed)}
    complete = np.all([np.isfinite(table[name]) for name in needed], axis=0)
    return {name: values[complete] for name, values in table.items()}


# ── the tuning guide ──────────────────────────────────────────────────────────────────────────


def targets(spec: GpuSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the good and the excellent MFU on this GPU, in percent."""
    return spec.mfu_good or _GENERAL_GOOD, spec.mfu_excellent or _GENERAL_EXCELLENT


def standing(mfu: float, spec: GpuSpec) -> Standing:
    """Rate an MFU by the tuning guide's table."""
    good, excellent = targets(spec)
    if 100 * mfu >= excellent[0]:
        return "excellent"
    return "good" if 100 * mfu >= good[0] else "poor"


def next_steps(
    plan: Plan, config: GptConfig, spec: GpuSpec, *, memory_share: float, wait_share: float
) -> list[str]:
    """List the tuning guide's steps that are not taken yet, in its order, as overrides.

    `memory_share` is the GPU's memory in use at the peak, `wait_share` the time spent waiting for
    data.
    """
    room = memory_share < _FULL
    batch = plan.batch_size
    larger = max(batch + 1, int(batch * _AIM / max(memory_share, 0.01)))
    # Twice at most: not all of the memory in use grows with the batch.
    steps = {
        f"training.batch_size={min(larger, 2 * batch)}": room,
        f"data.max_length={_LONG if spec.memory_gb >= 16 else 512}": (
            room and config.data.max_length < _LONG
        ),
        "device.mixed_precision=auto": plan.precision == "fp32",
        "optimization.compile=true": not plan.compile,
        "device.tf32=true": spec.native_tf32 and not plan.runtime.tf32,
        f"training.num_workers={min(8, max(2, 2 * plan.num_workers))}": wait_share > _WAITING,
    }
    return [step for step, useful in steps.items() if useful]
