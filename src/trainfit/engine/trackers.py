"""Trackers (TensorBoard, MLflow, W&B), which get a run's numbers and never a text; GPU samples."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainfit.conf import Composed
from trainfit.core.errors import BadInput, redact_values, redact_words
from trainfit.core.files import open_to_append
from trainfit.hardware.nvml import Sample, load_nvml, open_sampler
from trainfit.runs.event_log import Tracker

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
