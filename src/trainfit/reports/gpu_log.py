"""gpus.jsonl: what the driver says of the job's GPUs while it runs, beside the lines of the log.

A tracker like the others, so it is asked when a line is logged, and at most once in a while: a
question takes the driver about a millisecond.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainfit.engine.journal import Tracker
from trainfit.hardware.nvml import Sample, load_nvml, open_sampler

EVERY = 1.0
"""Seconds between two samples at the least; the driver's own figure is a mean over about one."""


def gpu_trackers(run: Path) -> Sequence[Tracker]:
    """What writes RUN/gpus.jsonl, or nothing where there is no GPU to ask of."""
    uuids = _own_gpus()
    if not uuids:
        return ()
    return (make_tracker(run / "gpus.jsonl", open_sampler(load_nvml, uuids)),)


def make_tracker(path: Path, sample: Callable[[], list[Sample]]) -> Tracker:
    """Append what `sample` gives to the file, with the step of the row."""
    last = -EVERY

    def track(row: Mapping[str, Any]) -> None:
        nonlocal last
        now = time.monotonic()
        if row.get("kind") != "train" or now - last < EVERY:
            return
        last = now
        if taken := sample():
            with path.open("a") as file:
                file.write(json.dumps({"step": row["step"], "gpus": taken}) + "\n")

    return track


def _own_gpus() -> list[str]:
    """The UUIDs of the GPUs that this job's ranks on this machine train on."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return []
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    count = min(torch.cuda.device_count(), ranks)
    found = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    return [uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}" for uuid in found]
