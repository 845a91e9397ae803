"""One writer to a run: a second is refused, a dead one lets go, a folder that goes is a failure."""

from __future__ import annotations

import errno
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine_toy import ToyTask, settings

from trainfit.core.errors import BadInput, RunFailed
from trainfit.engine import checkpoint, relaunch
from trainfit.engine.distributed import World
from trainfit.engine.loop import train
from trainfit.engine.observers import Observer
from trainfit.engine.relaunch import writing

_HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1] + "/run.lock"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes to the run, without torch."""
    run = tmp_path / "run"
    run.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(run)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    started = psutil.Process(child.pid).create_time()
    said = {"host": platform.node(), "pid": child.pid, "started": started}
    (run / "writer.json").write_text(json.dumps(said))
    yield child
    child.kill()
    child.wait()


def test_a_second_writer_is_refused_and_told_of_the_first(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    task = ToyTask()
    with pytest.raises(BadInput, match=rf"is written to by process {holder.pid} on"):
        train(task, settings(task), tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "checkpoints").exists()
    (tmp_path / "run" / "writer.json").write_text("{")
    with pytest.raises(BadInput, match="another process"), writing(tmp_path / "run", World()):
        pass


def test_a_killed_writer_lets_go(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    task = ToyTask()
    assert train(task, settings(task), tmp_path / "run").status == "finished"
    assert not (tmp_path / "run" / "writer.json").exists()


def test_a_lock_of_a_dead_process_is_waited_for(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a worker of a killed run still holds what it inherited."""
    run = tmp_path / "run"
    said = json.loads((run / "writer.json").read_text()) | {"started": 1.0}
    (run / "writer.json").write_text(json.dumps(said))
    monkeypatch.setattr(relaunch, "_PATIENCE", 0.5)
    began = time.monotonic()
    with pytest.raises(BadInput, match="is written to by"), writing(run, World()):
        pass
    assert time.monotonic() - began >= 0.5


def test_a_block_in_another_holds_on_until_the_last(tmp_path: Path) -> None:
    with writing(tmp_path, World()):
        with writing(tmp_path, World()):
            pass
        assert (tmp_path / "writer.json").exists()
        code = _HOLD.replace('run.lock"', 'run.lock", timeout=0')
        child = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=False
        )
        assert b"Timeout" in child.stderr
    assert not (tmp_path / "writer.json").exists()


class _At(Observer):
    def __init__(self, step: int, act: object) -> None:
        self._step, self._act = step, act

    def on_step(self, step: int) -> None:
        if step == self._step:
            assert callable(self._act)
            self._act()


@pytest.mark.parametrize("keep", [0, 2])
def test_a_folder_that_is_removed_ends_the_run_and_stays_away(tmp_path: Path, keep: int) -> None:
    run, task = tmp_path / "run", ToyTask()
    observer = _At(6, lambda: shutil.rmtree(run))
    with pytest.raises(RunFailed, match="was removed while it was written to") as caught:
        train(task, settings(task, keep_checkpoints=keep), run, observers=[observer])
    assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_run_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = ToyTask()

    def full(*_args: object, **_more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_text", full)
    with pytest.raises(RunFailed, match=r"No space left on device.*free some space"):
        train(task, settings(task), tmp_path / "run")
    assert not [p for p in (tmp_path / "run").rglob("*") if "unfinished" in p.name]
