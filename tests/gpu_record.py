"""A pytest plugin that adds every outcome to runs/test-gpu.json, with the GPU and the versions.

The file is written every few seconds: a run that is cut off tells what it had found.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_PLACE = Path("runs/test-gpu.json")
_EVERY = 5.0
_FOUND: dict[str, dict[str, Any]] = {}
_EARLIER: list[Any] = []
_saved = 0.0


def pytest_sessionstart() -> None:
    _EARLIER[:] = json.loads(_PLACE.read_text()) if _PLACE.is_file() else []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    row = _FOUND.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
    row["seconds"] = round(row["seconds"] + report.duration, 2)
    if report.outcome != "passed":
        row["outcome"] = report.outcome
    if time.monotonic() - _saved > _EVERY:
        _save(None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    _save(int(session.exitstatus) if hasattr(session, "exitstatus") else None)


def _save(code: int | None) -> None:
    """Write the outcomes so far; a worker's go through the first process."""
    global _saved
    if "PYTEST_XDIST_WORKER" in os.environ or not _FOUND:
        return
    import torch

    sitting = {
        "command": "pytest " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "exit": code,
        "tests": dict(sorted(_FOUND.items())),
    }
    _PLACE.parent.mkdir(exist_ok=True)
    _PLACE.write_text(json.dumps([*_EARLIER, sitting], indent=1) + "\n")
    _saved = time.monotonic()
