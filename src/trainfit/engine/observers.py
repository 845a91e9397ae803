"""Observers of a run: its progress and the rows of its log, progress bars and callbacks, trackers.

Trackers (TensorBoard, MLflow, W&B) get a run's numbers and never a text.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainfit.conf import Composed
from trainfit.core.errors import BadInput, redact_values, redact_words
from trainfit.core.files import open_to_append
from trainfit.core.records import Event, Record, RunResult
from trainfit.hardware.nvml import Sample, load_nvml, open_sampler
from trainfit.measuring.timing import GIB
from trainfit.runs.run_folder import Tracker
from trainfit.runtime.environment import send_no_usage


@dataclass(kw_only=True)
class Window:
    """Figures of the steps since the last row of the log."""

    losses: tuple[float, ...] = ()
    grad_norm: float | None = None
    """Gradient norm of the latest step."""
    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Time spent in steps, without evaluations and checkpoints."""
    waited: float = 0.0
    """Seconds in which the device waited for data."""
    compiling: float = 0.0
    ideal_seconds: float = 0.0
    """Seconds that the steps would take at the device's peak."""


@dataclass(kw_only=True)
class Progress:
    """State of the loop between two steps; checkpoints save it."""

    step: int = 0
    """Optimizer steps taken, including skipped ones."""
    epoch: int = 0
    step_in_epoch: int = 0
    rung: int = 0
    """Index of the current cut in the ladder."""
    cuts: tuple[tuple[int, int], ...] = ((0, 0),)
    eval_batch_size: int = 1
    evaluated_step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation."""
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    evaluations_without_better: int = 0
    skipped_in_row: int = 0
    seconds: float = 0.0
    """Total time over all starts of the run."""
    peak_memory: int = 0
    """Peak memory in bytes."""
    events: tuple[Event, ...] = ()
    window: Window = field(default_factory=Window)

    def use_rung(self, rung: int) -> None:
        """Use this cut of the ladder from the next step on."""
        if rung != self.rung:
            earlier = tuple(change for change in self.cuts if change[0] < self.step)
            self.rung = rung
            self.cuts = (*earlier, (self.step, rung))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRow(Record):
    """A row of the log about the steps since the previous row."""

    step: int
    total_steps: int
    epoch: float
    loss: float
    """Mean over the steps that were not skipped."""
    learning_rate: float
    grad_norm: float | None
    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    mfu: float | None
    """None where the device's peak or the work is not known."""
    memory_gib: float
    """Peak so far of the GPU, or of the process without one."""
    wait_share: float
    """Share of the time in which the device waited for data."""
    compute_seconds: float = 0.0
    """Mean time of a step without waiting for data and compiling; the MFU is computed from it."""
    compile_seconds: float = 0.0
    """Total compile time of these steps."""
    micro_batches: int
    skipped: int


class Observer:
    """Base class whose methods do nothing; override the ones of interest."""

    def on_line(self, text: str) -> None:
        """Receive a line about the settings, before the first step."""

    def on_start(self, step: int, total_steps: int) -> None:
        """Called before the first step of this process; `step` is above 0 for a resumed run."""

    def on_step(self, step: int) -> None:
        """Called after each step, without waiting for the device."""

    def on_log(self, row: TrainRow) -> None:
        """Called every `logging_steps`."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation."""

    def on_event(self, event: Event) -> None:
        """Called for each event, such as memory that ran out."""

    def on_end(self, result: RunResult) -> None:
        """Called once at the end, also of a failed run, unless the process was killed."""


def make_row(
    progress: Progress,
    *,
    total_steps: int,
    steps_per_epoch: int,
    learning_rate: float,
    micro_batches: int,
) -> TrainRow:
    """Make a row of the log from the window of `progress`."""
    window = progress.window
    seconds = max(window.seconds, 1e-9)
    computing = max(seconds - window.waited - window.compiling, 1e-9)
    mfu = window.ideal_seconds / computing
    return TrainRow(
        step=progress.step,
        total_steps=total_steps,
        epoch=progress.step / steps_per_epoch,
        loss=sum(window.losses) / len(window.losses) if window.losses else math.nan,
        learning_rate=learning_rate,
        grad_norm=window.grad_norm,
        step_seconds=seconds / window.steps,
        samples_per_second=window.sequences / seconds,
        tokens_per_second=window.tokens / seconds,
        mfu=mfu if 0 < mfu <= 1 else None,  # above 1 the peak or the FLOP count is wrong
        memory_gib=progress.peak_memory / GIB,
        wait_share=window.waited / seconds,
        compute_seconds=computing / window.steps,
        compile_seconds=window.compiling,
        micro_batches=micro_batches,
        skipped=window.steps - len(window.losses),
    )


def tokens_part(row: TrainRow) -> list[str]:
    """Tokens per second as text; nothing for samples without lengths, where they say nothing."""
    same = row.tokens_per_second == row.samples_per_second
    return [] if same else [f"{row.tokens_per_second:,.0f} tokens/s"]


def plain_line(row: TrainRow) -> str:
    """Format a row as a line of train.log."""
    parts = [
        f"step {row.step}/{row.total_steps}: loss {row.loss:.4f}",
        f"lr {row.learning_rate:.2e}",
        f"{row.samples_per_second:.1f} samples/s",
        *tokens_part(row),
        f"{row.memory_gib:.2f} GiB",
    ]
    if row.grad_norm is not None:
        parts.insert(2, f"norm {row.grad_norm:.3f}")
    if row.mfu is not None:
        parts.append(f"mfu {row.mfu:.1%}")
    if row.skipped:
        parts.append(f"{row.skipped} skipped")
    return ", ".join(parts)


def as_scalars(row: Record) -> dict[str, Any]:
    """Convert a row to the numbers that trackers take."""
    values = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return {name: value for name, value in values.items() if value is not None}


# ── trackers ────────────────────────────────────────────────────────────────────────────────────

_MODULES = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
"""Module of each tracker."""


def open_trackers(kind: str, run: Path, composed: Composed) -> Sequence[Tracker]:
    """Open the configured tracker for a run, if any."""
    if kind == "none":
        return ()
    openers: dict[str, Callable[[Any, Path, dict[str, Any]], Tracker]] = {
        "tensorboard": _tensorboard,
        "mlflow": _mlflow,
        "wandb": _wandb,
    }
    with _redacted_command():
        return (openers[kind](check_installed(kind), run, redact_values(composed.values())),)


@contextmanager
def _redacted_command() -> Iterator[None]:
    """Hide secrets in the command line, which trackers record."""
    typed = sys.argv
    sys.argv = redact_words(typed)
    try:
        yield
    finally:
        sys.argv = typed


def check_installed(kind: str) -> Any:
    """Import the tracker's module; raise BadInput where it is not installed."""
    send_no_usage()
    try:
        return importlib.import_module(_MODULES[kind])
    except ImportError:
        raise BadInput(
            f"tracking is {kind}, which is not installed", f"pip install {kind}, or tracking=none"
        ) from None


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a row under names such as train/loss or evaluation/f1."""
    kind = row["kind"]
    return {
        f"{kind}/{name}": float(value)
        for name, value in row.items()
        if name not in ("kind", "step") and isinstance(value, int | float)
    }


def _tensorboard(module: Any, run: Path, values: dict[str, Any]) -> Tracker:
    writer = module.SummaryWriter(str(run / "tensorboard"))
    writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in values.items()))

    def track(row: Mapping[str, Any]) -> None:
        for name, value in _numbers(row).items():
            writer.add_scalar(name, value, int(row["step"]))
        writer.flush()

    return track


def _mlflow(module: Any, run: Path, values: dict[str, Any]) -> Tracker:
    # A client instead of the active run, because a process may train several folds.
    client = module.MlflowClient()
    experiment = client.get_experiment_by_name("trainfit")
    number = experiment.experiment_id if experiment else client.create_experiment("trainfit")
    created = client.create_run(number, run_name=run.name).info.run_id
    for key, value in values.items():
        client.log_param(created, key, value)

    def track(row: Mapping[str, Any]) -> None:
        for name, value in _numbers(row).items():
            client.log_metric(created, name, value, step=int(row["step"]))

    return track


def _wandb(module: Any, run: Path, values: dict[str, Any]) -> Tracker:
    session = module.init(
        project="trainfit", name=run.name, dir=str(run), config=values, reinit="create_new"
    )

    def track(row: Mapping[str, Any]) -> None:
        session.log(_numbers(row), step=int(row["step"]))

    return track


EVERY = 1.0
"""Least seconds between two samples; the driver's figures are means over about one second."""


def gpu_trackers(run: Path) -> Sequence[Tracker]:
    """Make the tracker that writes RUN/gpus.jsonl; none without a GPU."""
    uuids = _own_gpus()
    if not uuids:
        return ()
    return (make_tracker(run / "gpus.jsonl", open_sampler(load_nvml, uuids)),)


def make_tracker(path: Path, sample: Callable[[], list[Sample]]) -> Tracker:
    """Make a tracker that appends samples to a file, with the step of the row."""
    last = -EVERY

    def track(row: Mapping[str, Any]) -> None:
        nonlocal last
        now = time.monotonic()
        if row.get("kind") != "train" or now - last < EVERY:
            return
        last = now
        if taken := sample():
            with open_to_append(path) as file:
                file.write(json.dumps({"step": row["step"], "gpus": taken}) + "\n")

    return track


def _own_gpus() -> list[str]:
    """UUIDs of the GPUs that this job's ranks on this machine use."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return []
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    count = min(torch.cuda.device_count(), ranks)
    found = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    return [uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}" for uuid in found]
