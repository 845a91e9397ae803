"""Run folders: created once, never overwritten, found again for a resume."""

from __future__ import annotations

import json
import platform
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from trainfit.core import codec
from trainfit.core.errors import (
    BadInput,
    RunFailed,
    did_you_mean,
    reason,
    redact_values,
    redact_words,
)
from trainfit.core.files import check_path, is_file, write_whole
from trainfit.core.libraries import version_of
from trainfit.core.plan_records import Plan

_IDENTITY = "run.json"
_PACKAGES = ("trainfit", "torch", "transformers", "peft", "numpy", "safetensors")


def create(root: Path, task: str, *, config: Any, plan: Plan | None) -> Path:
    """Create a folder root/TASK-TIME-N with config.json, plan.json and environment.json.

    Two runs of the same second get different numbers: whoever creates a folder owns it.
    """
    check_path(root, "runs_dir")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        root.mkdir(parents=True, exist_ok=True)
        run = next(made for n in count(1) if (made := _make(root / f"{task}-{stamp}-{n}")))
        write_whole(run / "config.json", written_config(config))
        write_whole(run / "environment.json", codec.dumps(environment()) + "\n")
        if plan is not None:
            plan.save(run / "plan.json")
        identity(run)
    except OSError as error:
        what = f"cannot make a run folder in {root} ({error.strerror or error})"
        raise RunFailed(what, "choose a folder that can be written, with some space") from error
    return run


def written_config(config: Any) -> str:
    """The text of config.json."""
    return codec.dumps(redact_values(codec.encode(config))) + "\n"


def _make(folder: Path) -> Path | None:
    try:
        folder.mkdir()
    except FileExistsError:
        return None
    return folder


def find(run: str | Path, root: Path) -> Path:
    """Find a run's folder by its path, its name under `root`, or as the newest of a job."""
    if ":" in str(run):
        return newest_of(str(run), root)
    for folder in (Path(run), root / run):
        if is_file(folder / _IDENTITY):
            return folder
    names = [path.parent.name for path in root.glob(f"*/{_IDENTITY}")]
    raise BadInput(
        f"there is no run {str(run)!r}",
        did_you_mean(str(run), names, f"give the folder of a run, as under {root}"),
    )


def newest_of(task: str, root: Path) -> Path:
    """Return the newest run of a job of the user's own, or raise BadInput where there is none."""
    found = [path.parent for path in root.glob(f"{task.rpartition(':')[2]}-*/{_IDENTITY}")]
    runs = [run for run in found if _task_of(run) == task]
    if not runs:
        raise BadInput(f"there is no run of {task} in {root}", f"train it: trainfit train {task}")
    return max(runs, key=lambda run: (run / _IDENTITY).stat().st_mtime)


def _task_of(run: Path) -> str | None:
    try:
        return str(codec.read_object(run / "config.json").get("task"))
    except (OSError, ValueError):
        return None


def identity(run: Path) -> str:
    """Unique id of a run, which stays when its folder is moved; written at the first call."""
    path = run / _IDENTITY
    if not path.exists():
        write_whole(path, json.dumps({"id": secrets.token_hex(16)}) + "\n", parents=False)
    try:
        return str(codec.read_object(path)["id"])
    except (OSError, ValueError, KeyError) as error:
        what = f"cannot read {path} ({reason(error)})"
        raise BadInput(what, "give a folder trainfit wrote") from None


def environment() -> Mapping[str, Any]:
    """Versions of packages, the platform, the command and the time of this run."""
    found = {dist: version_of(dist) for dist in _PACKAGES}
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": redact_words(sys.argv),
        "packages": {name: version for name, version in found.items() if version},
    }


def exports_of(run: Path) -> list[Path]:
    """List the exports of a run: one, or one for each fold."""
    found = [run / "export", *sorted(run.glob("fold-*/export"))]
    known = ("trainfit.json", "head.json")
    found = [folder for folder in found if any((folder / name).is_file() for name in known)]
    if not found:
        raise BadInput(f"{run} has no exported model", "finish it first, with --resume")
    return found


def export_facts(export: Path) -> Mapping[str, Any]:
    """Read the facts of an exported model; whoever loads it says what is wrong with its files."""
    for name in ("trainfit.json", "head.json"):
        with suppress(OSError, ValueError):
            return codec.read_object(export / name)
    return {}
