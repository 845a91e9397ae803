"""Run folders: created once, never overwritten, found again for a resume; the files that grow.

    metrics.jsonl, events.jsonl    for programs
    train.log                      for people

Only the first rank writes. A process that is killed may leave half a line, and rows of steps that
the resumed run takes again: both are removed on resume.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from trainfit.core import codec
from trainfit.core.errors import (
    BadInput,
    RunFailed,
    TrainfitError,
    did_you_mean,
    printable,
    reason,
    redact,
    redact_values,
    redact_words,
)
from trainfit.core.files import check_path, is_file, open_regular, open_to_append, write_whole
from trainfit.core.libraries import version_of
from trainfit.core.plan_records import Plan
from trainfit.core.records import Event
from trainfit.runs.opening import RunSetup

Tracker = Callable[[Mapping[str, Any]], None]
"""Takes each row of metrics.jsonl as it is written."""
ROOT = Path("runs")
METRICS, EVENTS, LOG = "metrics.jsonl", "events.jsonl", "train.log"
SETUP = "setup"
"""Kind of the row of events.jsonl that holds a RunSetup."""


def is_first_rank() -> bool:
    """Tell if this process writes and prints, whatever started it."""
    return os.environ.get("RANK", "0") == "0"


class Journal:
    """Appends rows and lines; without a folder it writes nothing."""

    def __init__(self, run: Path | None, trackers: Sequence[Tracker] = ()) -> None:
        self._run, self._trackers = run, trackers
        self._files: dict[str, TextIO] = {}
        for name in (METRICS, LOG):  # at once: a folder that cannot be written to is known early
            self._file(name)

    def row(self, kind: str, values: Mapping[str, Any]) -> None:
        """Write a row of numbers; its kind is train, evaluation or fold."""
        row = {"kind": kind, **values}
        if self._write(METRICS, _json(row)):
            for tracker in self._trackers:
                tracker(row)

    def event(self, event: Event, figures: Mapping[str, int]) -> None:
        """Write an event with its figures as a row, and as a line for people."""
        self._write(EVENTS, _json(redact_values({**codec.encode(event), **figures})))
        self.line(f"{event.kind} at step {event.step}: {event.text}")

    def setup(self, setup: RunSetup, step: int) -> Iterator[str]:
        """Write the settings in effect as a row and as lines; yields the lines."""
        self._write(EVENTS, _json({"kind": SETUP, "step": step, "setup": codec.encode(setup)}))
        for text in setup.lines():
            self.line(text)
            yield text

    def line(self, text: str) -> None:
        """Write a line for people, with the time; programs get it from logging as `trainfit`."""
        text = printable(redact(text))
        if self._write(LOG, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}"):
            logging.getLogger("trainfit").info("%s", text)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> TextIO | None:
        if self._run is not None and name not in self._files:
            self._files[name] = _append_to(self._run / name)
        return self._files.get(name)

    def _write(self, name: str, line: str) -> bool:
        """Append a line; returns False where there is no folder."""
        file = self._file(name)
        if file is None:
            return False
        try:
            file.write(line + "\n")
            file.flush()
        except OSError as error:
            what = f"cannot write {file.name} ({error.strerror})"
            raise RunFailed(what, "free some space and continue with --resume") from error
        return True


def forget_after(run: Path, step: int, events: Sequence[Event]) -> None:
    """Drop rows of steps after `step`, a row that is cut off, and all events but `events`."""
    kept = [line for line, row in _lines(run / METRICS) if _step_of(row) <= step]
    if (run / METRICS).exists():
        write_whole(run / METRICS, "".join(f"{line}\n" for line in kept), parents=False)
    known = {event: line for line, row in _lines(run / EVENTS) if (event := as_event(row))}
    if events or known:
        rows = [known.get(event) or _json(redact_values(codec.encode(event))) for event in events]
        write_whole(run / EVENTS, "".join(f"{line}\n" for line in rows), parents=False)


def as_event(row: Mapping[str, Any]) -> Event | None:
    """The event in a row of events.jsonl, or None for a setup and for damage."""
    try:
        fields = {name: row[name] for name in ("kind", "step", "seconds", "text")}
        return codec.decode(Event, fields)
    except (KeyError, TrainfitError):
        return None


def parse_row(line: str) -> dict[str, Any] | None:
    """A row of a .jsonl file; None for a line that a killed process left half written."""
    try:
        row = codec.parse(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Whole lines of a .jsonl file with their rows; none where there is no file."""
    if not path.exists():
        return []
    with open_regular(path) as file:
        lines = file.read().decode(errors="replace").splitlines()
    return [(line, row) for line in lines if (row := parse_row(line)) is not None]


def _step_of(row: Mapping[str, Any]) -> float:
    try:
        return float(row["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _json(row: Any) -> str:
    return json.dumps(codec.encode(row), allow_nan=False)


def _append_to(path: Path) -> TextIO:
    try:
        return open_to_append(path)
    except OSError as error:
        raise RunFailed(f"cannot write {path} ({reason(error)})", "make it writable") from error


# ── the folder ──────────────────────────────────────────────────────────────────────────────────

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


def check_root(root: Path) -> None:
    """Raise BadInput for a folder of runs that cannot be made; nothing is made yet."""
    check_path(root, "runs_dir")
    there = next(
        one for one in (root.absolute(), *root.absolute().parents) if os.access(one, os.F_OK)
    )
    what = f"runs_dir is {root}, but {there}"
    if not there.is_dir():
        raise BadInput(f"{what} is a file", "name a folder (--output)")
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"{what} cannot be written", "choose another folder (--output)")


def written_config(config: Any) -> str:
    return codec.dumps(redact_values(codec.encode(config))) + "\n"


def _make(folder: Path) -> Path | None:
    try:
        folder.mkdir()
    except FileExistsError:
        return None
    return folder


def find(run: str | Path | type, root: Path = ROOT) -> Path:
    """Find a run's folder by its path, its name under `root`, or as the newest of a job."""
    if isinstance(run, type):
        run = f"{run.__module__}:{run.__qualname__}"
    if not isinstance(run, str | Path):
        raise BadInput(f"the run is {run!r}", f"give the folder of a run, as under {root}")
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
    if not found and (run / "export" / "job.json").is_file():  # only its class can load it
        what = f"{run} is of a job of one's own"
        raise BadInput(what, f"name its class: trainfit predict module:Class --run {run}")
    if not found:
        if (run / "export" / "config.json").is_file():
            raise BadInput(f"the model of {run} is no classifier", f"try trainfit sample {run}")
        raise BadInput(f"{run} has no exported model", "finish it first, with --resume")
    return found


def export_facts(export: Path) -> Mapping[str, Any]:
    """Read the facts of an exported model, without checking its files: loading it does."""
    for name in ("trainfit.json", "head.json"):
        with suppress(OSError, ValueError):
            return codec.read_object(export / name)
    return {}
