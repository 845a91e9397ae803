"""What a task may say or do besides the protocol: indivisible steps, a hook and a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_faults import Faults, plant
from engine_toy import Crash, CrashAt, ToyTask, cuts, final_bits, settings
from torch import Tensor, nn

from trainfit.core.errors import BadInput, OutOfMemory, TrainfitWarning
from trainfit.engine import recovery
from trainfit.engine.loop import train


class Whole(ToyTask):
    indivisible = True


class WithNorm(ToyTask):
    """Its embeddings pass a BatchNorm."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.norm = nn.BatchNorm1d(8)
        return model


class Averaged(ToyTask):
    """Keeps a moving average of the weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.average: dict[str, Tensor] = {}
        self.steps_seen: list[int] = []

    def after_step(self, model: nn.Module, step: int) -> None:
        self.steps_seen.append(step)
        for name, weight in model.named_parameters():
            kept = self.average.setdefault(name, torch.zeros_like(weight))
            kept.lerp_(weight, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "count": len(self.steps_seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


def test_an_indivisible_step_is_never_cut(tmp_path: Path) -> None:
    """Memory that runs out once is given back; a second time ends the run with one line."""
    task, faults = Whole(), Faults()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, task, faults)
        train(task, settings(task, epochs=1.0), tmp_path / "clean")
    first = min(faults.phases["step"])
    task, faults = Whole(), Faults({first})
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, task, faults)
        result = train(task, settings(task, epochs=1.0), tmp_path / "once")
    assert [event.kind for event in result.events] == ["oom"]
    assert result.cuts == ((0, 0),)
    assert final_bits(tmp_path / "once") == final_bits(tmp_path / "clean")
    task, faults = Whole(), Faults({first, first + 1})
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, task, faults)
        with pytest.raises(OutOfMemory, match="cannot be cut: the task is indivisible"):
            train(task, settings(task, epochs=1.0), tmp_path / "twice")


def test_an_indivisible_step_refuses_a_cut_of_several_micro_batches(tmp_path: Path) -> None:
    task = Whole()
    with pytest.raises(BadInput, match="cut into 2 micro-batches, but the task is indivisible"):
        train(task, settings(task, cuts=cuts(task)[1:]), tmp_path / "run")


def test_batch_norm_makes_a_step_indivisible(tmp_path: Path) -> None:
    task = WithNorm()
    with pytest.warns(TrainfitWarning, match="the model has BatchNorm"):
        train(task, settings(task, epochs=1.0, padded=True), tmp_path / "run")
    assert (
        "not cut into micro-batches: the model has BatchNorm"
        in (tmp_path / "run" / "train.log").read_text()
    )
    with pytest.warns(TrainfitWarning), pytest.raises(BadInput, match="BatchNorm"):
        train(task, settings(task, cuts=cuts(task, padded=True)[-1:]), tmp_path / "cut")


def test_batch_norm_that_is_frozen_may_be_cut(tmp_path: Path) -> None:
    class Frozen(WithNorm):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            model.norm.train = lambda mode=True: model.norm  # type: ignore[method-assign]
            model.norm.training = False
            return model

    task = Frozen()
    train(task, settings(task, epochs=1.0, cuts=cuts(task)[1:]), tmp_path / "run")


def test_the_hook_after_each_update_and_its_state_survive_a_crash(tmp_path: Path) -> None:
    def chosen(task: ToyTask) -> Any:
        return settings(task, epochs=1.0, checkpoint_steps=2)

    whole = Averaged()
    train(whole, chosen(whole), tmp_path / "whole")
    assert whole.steps_seen == [1, 2, 3, 4, 5]
    with pytest.raises(Crash):
        train(Averaged(), chosen(whole), tmp_path / "run", observers=[CrashAt(3)])
    resumed = Averaged()
    train(resumed, chosen(resumed), tmp_path / "run", resume=True)
    assert resumed.steps_seen == [3, 4, 5]
    for name, tensor in whole.average.items():
        assert torch.equal(tensor, resumed.average[name])


def test_a_state_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    task = ToyTask()
    train(task, settings(task, epochs=1.0), tmp_path / "run")
    with pytest.raises(BadInput, match="no state of the task"):
        train(Averaged(), settings(task), tmp_path / "run", resume=True)


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Odd(Averaged):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

    task = Odd()
    with pytest.raises(BadInput, match="holds a set"):
        train(task, settings(task), tmp_path / "run")
    assert not task.steps_seen


def test_memory_that_runs_out_in_the_hook_is_one_line(tmp_path: Path) -> None:
    class Greedy(ToyTask):
        def after_step(self, model: nn.Module, step: int) -> None:
            raise torch.OutOfMemoryError

    task = Greedy()
    with pytest.raises(OutOfMemory, match="after_step"):
        train(task, settings(task), tmp_path / "run")


def test_the_message_of_a_step_that_can_be_cut_is_another(tmp_path: Path) -> None:
    task, faults = ToyTask(), Faults(range(1, 10_000))
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, task, faults)
        with pytest.raises(recovery.NoFinerCut, match="finest cut"):
            train(task, settings(task), tmp_path / "run")
