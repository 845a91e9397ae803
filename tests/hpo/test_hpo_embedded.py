"""The study that a newcomer runs first: twelve trials of the small model, killed on the way."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from trainfit.hpo.objective import as_words
from trainfit.hpo.trial_queue import FINISHED

SEEDS = (43, 44, 45)


def trainfit(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainfit", *words, "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def answer(process: subprocess.Popen[str], seconds: float) -> Any:
    out, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0
    return json.loads(out)


def finished(folder: Path) -> int:
    path = folder / "runs" / "hpo.db"
    if not path.is_file():
        return 0
    asked = f"SELECT COUNT(*) FROM trials WHERE state IN ({', '.join('?' * len(FINISHED))})"
    # Optuna would make the tables, as the command is doing.
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as storage:
        try:
            return storage.execute(asked, [state.name for state in FINISHED]).fetchone()[0]
        except sqlite3.OperationalError:  # there are no tables yet, or they are locked
            return 0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twelve_trials_killed_and_gone_on_with_are_no_worse_than_the_defaults(tmp_path: Path):
    command = ("hpo", "nli", "hpo.study=demo", "--workers", "2")
    first = trainfit(tmp_path, *command)
    until = time.monotonic() + 1800
    while finished(tmp_path) < 3 and time.monotonic() < until:
        assert first.poll() is None
        time.sleep(0.5)
    first.send_signal(signal.SIGKILL)
    first.wait()
    found = answer(trainfit(tmp_path, *command), 3600)
    assert finished(tmp_path) == 12
    assert found["trials"].get("complete", 0) + found["trials"].get("pruned", 0) == 12

    def scores(params: dict[str, Any]) -> list[float]:
        base = ("train", "nli", "training.num_epochs=8", "baselines=false")
        return [
            answer(trainfit(tmp_path, *base, f"seed={seed}", *as_words(params)), 600)["metrics"][
                "f1"
            ]
            for seed in SEEDS
        ]

    best, defaults = scores(found["best"]["params"]), scores({})
    print(f"best {best}, defaults {defaults}")
    assert statistics.mean(best) >= statistics.mean(defaults) - 1e-9
