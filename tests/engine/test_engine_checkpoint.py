"""Checkpoints that are damaged, foreign, too large for the disk, or of a wrapped model."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from engine_toy import Toy, ToyTask, final_bits, final_weights, settings
from torch import nn

from trainfit.core.errors import BadInput, RunFailed, TrainfitWarning
from trainfit.engine import checkpoint
from trainfit.engine.checkpoint import latest_good, listed, load_weights
from trainfit.engine.loop import train
from trainfit.engine.loop_settings import OptimizerSettings
from trainfit.engine.optimizer import build_optimizer
from trainfit.engine.saved_state import (
    find_nonfinite,
    frozen_checksum,
    load_model,
    model_tensors,
    optimizer_tensors,
    plain_name,
)

EVERY_5 = {"checkpoint_steps": 5, "eval_steps": 100, "metric": None}


def trained(run: Path, **options: Any) -> ToyTask:
    task = ToyTask()
    train(task, settings(task, **(EVERY_5 | options)), run)
    return task


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a bit of the weights": lambda folder: flip_a_bit(folder / "model.safetensors"),
    "a bit of the state": lambda folder: flip_a_bit(folder / "state.json"),
    "half the optimizer": lambda folder: os.truncate(folder / "optimizer.safetensors", 100),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: os.truncate(folder / "manifest.json", 20),
    "a manifest of something else": lambda folder: (folder / "manifest.json").write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_line(tmp_path: Path, damage: str) -> None:
    trained(tmp_path / "whole")
    run = tmp_path / "run"
    task = trained(run)
    newest, before = listed(run)
    DAMAGE[damage](newest)
    assert latest_good(run)[0] == before
    with pytest.warns(TrainfitWarning, match=f"{newest.name} is not used"):
        result = train(task, settings(task, **EVERY_5), run, resume=True)
    assert [event.kind for event in result.events] == ["damaged", "resumed"]
    assert "not used" in (run / "train.log").read_text()
    assert final_bits(run) == final_bits(tmp_path / "whole")


def test_a_checkpoint_of_another_run_is_not_taken(tmp_path: Path) -> None:
    trained(tmp_path / "one", seed=1)
    trained(tmp_path / "two", seed=2)
    foreign = listed(tmp_path / "one")[0]
    shutil.copytree(foreign, tmp_path / "two" / "checkpoints" / "step-00000099")
    good, faults = latest_good(tmp_path / "two")
    assert good is not None
    assert good.name == "step-00000015"
    assert "belongs to the run" in faults[0]


def test_a_run_may_be_moved(tmp_path: Path) -> None:
    task = trained(tmp_path / "here", max_steps=5)
    (tmp_path / "here").rename(tmp_path / "there")
    result = train(task, settings(task, **EVERY_5), tmp_path / "there", resume=True)
    assert result.events[0].text == "from step-00000005"


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    task = ToyTask()
    scores = iter([0.5, 0.9, 0.6, 0.7, 0.8, 0.4, 0.3, 0.2])
    task.evaluate = lambda model, size: {"f1": next(scores)}  # type: ignore[method-assign]
    options = {"metric": "f1", "greater_is_better": True, "eval_steps": 2}
    result = train(task, settings(task, **options), tmp_path / "run")
    assert [folder.name[-2:] for folder in listed(tmp_path / "run")] == ["15", "14", "04"]
    assert (result.best_step, result.metrics) == (4, {"f1": 0.9})
    model = task.build_model()
    assert load_weights(tmp_path / "run", model) == 4
    saved = safetensors.torch.load_file(listed(tmp_path / "run")[-1] / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in model_tensors(model).items())
    assert load_weights(tmp_path / "run", model, best=False) == 15


def test_a_best_checkpoint_that_is_damaged_gives_way_to_the_last(tmp_path: Path) -> None:
    task = ToyTask()
    scores = iter([0.9, 0.5, 0.5, 0.5])
    task.evaluate = lambda model, size: {"f1": next(scores)}  # type: ignore[method-assign]
    train(task, settings(task, metric="f1", greater_is_better=True), tmp_path / "run")
    best = listed(tmp_path / "run")[-1]
    assert best.name == "step-00000004"
    flip_a_bit(best / "model.safetensors")
    with pytest.warns(TrainfitWarning, match="the last one is"):
        assert load_weights(tmp_path / "run", task.build_model()) == 15


FULL = OSError(errno.ENOSPC, "No space left on device")
WRITES = {
    "tensors": (safetensors.torch, "save_file", safetensors.SafetensorError("No space left")),
    "text": (Path, "write_text", FULL),
    "sync": (os, "fsync", FULL),
    "read-only": (Path, "rename", OSError(errno.EROFS, "Read-only file system")),
}


@pytest.mark.parametrize("where", WRITES)
def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    trained(tmp_path / "whole")
    run, task = tmp_path / "run", ToyTask()
    owner, name, error = WRITES[where]
    real_save, real = checkpoint.save, getattr(owner, name)
    saves: list[int] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        if len(saves) == 2:
            raise error
        return real(*args, **kwargs)

    def counted(*args: Any, **kwargs: Any) -> Any:
        saves.append(1)
        return real_save(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", counted)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(RunFailed) as caught:
        train(task, settings(task, **EVERY_5), run)
    assert len(str(caught.value).splitlines()) == 1
    assert "--resume" in str(caught.value)
    monkeypatch.undo()
    assert [folder.name for folder in listed(run)] == ["step-00000005"]
    assert not list((run / "checkpoints").glob(".*"))
    train(task, settings(task, **EVERY_5), run, resume=True)
    assert final_bits(run) == final_bits(tmp_path / "whole")


def test_a_run_that_has_checkpoints_is_not_started_over(tmp_path: Path) -> None:
    task = trained(tmp_path / "run")
    with pytest.raises(BadInput, match="holds a run already"):
        train(task, settings(task), tmp_path / "run")


def test_names_carry_no_prefix_of_a_wrapper() -> None:
    inner = Toy(0.0, norm=True)
    wrapped = nn.DataParallel(torch.compile(inner))
    assert any(name.startswith("module._orig_mod.") for name in wrapped.state_dict())
    expected = set(inner.state_dict())
    assert model_tensors(wrapped).keys() == expected
    optimizer = build_optimizer(wrapped, OptimizerSettings(learning_rate=0.1))
    names = {name.partition("/")[0] for name in optimizer_tensors(wrapped, optimizer)}
    assert names == expected - {"norm.mean"}
    part = nn.Sequential(torch.compile(nn.Linear(2, 2)))
    assert model_tensors(part).keys() == {"0.weight", "0.bias"}
    assert plain_name("pooler.module.weight") == "pooler.module.weight"


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight

    model, other = Tied(), Tied()
    tensors = model_tensors(model)
    assert "second.weight" not in tensors
    safetensors.torch.save_file(dict(tensors), tmp_path / "tied.safetensors")
    load_model(other, safetensors.torch.load_file(tmp_path / "tied.safetensors"))
    assert other.second.weight is other.first.weight
    assert torch.equal(other.second.weight, model.first.weight)


def test_frozen_weights_are_not_saved_but_must_be_the_same(tmp_path: Path) -> None:
    task = ToyTask(frozen=True)
    options = settings(task, **EVERY_5)
    train(task, options, tmp_path / "run")
    assert "embedding.weight" not in final_weights(tmp_path / "run")
    train(task, options, tmp_path / "run", resume=True)
    build = task.build_model

    def changed() -> nn.Module:
        model = build()
        with torch.no_grad():
            model.embedding.weight[0, 0] += 1e-3
        return model

    task.build_model = changed  # type: ignore[method-assign]
    with pytest.raises(BadInput, match="not trained are not those"):
        train(task, options, tmp_path / "run", resume=True)
    assert frozen_checksum(ToyTask().build_model()).result() is None


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    with pytest.raises(BadInput, match=r"head\.weight is \(3, 16\) in the checkpoint, \(4, 16\)"):
        load_weights(tmp_path / "run", Toy(0.0, norm=False, classes=4))
    with pytest.raises(BadInput, match=r"differ in 1 tensors, such as norm\.mean"):
        load_weights(tmp_path / "run", Toy(0.0, norm=True))
    with pytest.raises(BadInput, match="no checkpoint"):
        load_weights(tmp_path, Toy(0.0, norm=True))


def test_nothing_in_a_checkpoint_is_pickled(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    for folder in listed(tmp_path / "run"):
        assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
        json.loads((folder / "state.json").read_text())


def test_buffers_may_be_masks() -> None:
    for value, fine in ((-math.inf, True), (-3e38, True), (math.inf, False), (math.nan, False)):
        model = torch.nn.Linear(2, 2)
        model.register_buffer("mask", torch.full((9, 9), value).triu(1))
        assert find_nonfinite(model) == (None if fine else "mask")
        model.weight.data[1, 0] = value
        assert (find_nonfinite(model) is None) == math.isfinite(value)
    with torch.no_grad():
        model.mask.zero_()  # type: ignore[operator]
        model.weight.fill_(3e38)  # their sum is not finite
    assert find_nonfinite(model) is None
