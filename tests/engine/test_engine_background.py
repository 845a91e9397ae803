"""Checkpoints that are written while the run goes on are those that would have been written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toy import ToyTask, final_bits, settings

from trainfit.core.errors import RunFailed
from trainfit.engine import checkpoint
from trainfit.engine.checkpoint import listed
from trainfit.engine.loop import train
from trainfit.engine.session import Session
from trainfit.hardware import host
from trainfit.hardware.host import Limits

EVERY_3 = {"checkpoint_steps": 3, "eval_steps": 100, "metric": None, "keep_checkpoints": 9}


@pytest.fixture(autouse=True)
def _alongside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "writes_alongside", property(lambda _session: True))


def contents(run: Path) -> dict[str, bytes]:
    return {
        f"{folder.name}/{name}": (folder / name).read_bytes()
        for folder in listed(run)
        for name in ("model.safetensors", "optimizer.safetensors")
    }


def test_a_slow_disk_changes_nothing_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = ToyTask()
    write, began, steps = checkpoint.save, [], []

    def slowly(run: Path, kept: Any, **options: Any) -> Path:
        began.append(kept.state["step"])
        time.sleep(0.2)
        steps.append(seen[-1].progress.step)
        return write(run, kept, **options)

    seen: list[Session] = []
    took = Session.took

    def follow(session: Session, *args: Any) -> None:
        seen.append(session)
        took(session, *args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", slowly)
        patch.setattr(Session, "took", follow)
        train(task, settings(task, **EVERY_3), tmp_path / "alongside")
    assert any(later > step for step, later in zip(began, steps, strict=True)), "it did not go on"
    monkeypatch.setattr(Session, "writes_alongside", property(lambda _session: False))
    train(task, settings(task, **EVERY_3), tmp_path / "at once")
    assert contents(tmp_path / "alongside") == contents(tmp_path / "at once")
    assert final_bits(tmp_path / "alongside") == final_bits(tmp_path / "at once")


def test_a_full_disk_ends_the_run_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Path, _kept: Any, **_options: Any) -> Path:
        raise RunFailed(f"cannot write {run}", "make room")

    monkeypatch.setattr(checkpoint, "save", fail)
    task = ToyTask()
    with pytest.raises(RunFailed, match="cannot write"):
        train(task, settings(task, **EVERY_3), tmp_path / "run")


def test_without_room_for_a_copy_it_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_ROOM", 1e15)
    monkeypatch.setattr(checkpoint.CheckpointWriter, "start", lambda *_: pytest.fail("no room"))
    task = ToyTask()
    train(task, settings(task, **EVERY_3), tmp_path / "run")
    assert listed(tmp_path / "run")


def test_copies_keep_to_the_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = checkpoint.Contents({"weight": torch.zeros(100)}, {}, {})
    for left, copied in ((1200, True), (1199, False)):
        limits = Limits(memory_bytes=4096, memory_left_bytes=left)
        monkeypatch.setattr(host, "read_limits", lambda limits=limits: limits)
        assert (checkpoint.on_host(weights, {}) is not None) == copied
