"""Whole steps as CUDA graphs: the same bits as eager steps, whatever happens to the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toy import Crash, CrashAt, final_bits
from test_engine_on_gpu import SmallTask
from torch import Tensor, nn

from trainfit.core.plan_records import RuntimeSettings
from trainfit.core.records import RunResult
from trainfit.engine.captured import CapturedSteps
from trainfit.engine.loop import train
from trainfit.engine.loop_settings import LoopSettings, OptimizerSettings
from trainfit.measuring.receipt import EVIDENCE
from trainfit.measuring.trace import Evidence
from trainfit.packing import ladder
from trainfit.runtime import applied

pytestmark = pytest.mark.gpu


class Task(SmallTask):
    """Dropout, running statistics that every step writes, and a last step of another shape."""

    capturable = True
    width = 64

    def build_model(self) -> nn.Module:
        layers = [
            layer
            for _ in range(3)
            for layer in (nn.Linear(self.width, self.width), nn.GELU(), nn.Dropout(0.1))
        ]
        return nn.Sequential(nn.Embedding(100, self.width), *layers, nn.Linear(self.width, 2))

    def lengths(self) -> list[int]:
        return [32] * 112

    def steps(self, epoch: int) -> list[list[int]]:
        return [list(range(start, min(start + 32, 112))) for start in range(0, 112, 32)]

    def weight(self, sequences: Any) -> float:
        return 32.0 * len(sequences)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with applied(RuntimeSettings(deterministic=True)):
        yield


def settings(micro_batches: int = 1, **changes: Any) -> LoopSettings:
    task = Task()
    chosen = LoopSettings(
        epochs=4.0,
        device="cuda",
        precision="bf16",
        cuts=ladder(task.lengths(), 32, 32 * 32 // micro_batches, padded=True),
        optimizer=OptimizerSettings(learning_rate=1e-3, weight_decay=0.1),
        eval_batch_size=32,
        checkpoint_steps=5,
        keep_checkpoints=4,
        profile_step=False,
        cuda_graph=True,
    )
    return replace(chosen, **changes)


def captures(result: RunResult) -> list[str]:
    return [event.text for event in result.events if event.kind == "capture"]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_run_has_the_bits_of_an_eager_one(
    tmp_path: Path, micro_batches: int, precision: Any, compiled: bool
) -> None:
    # Another shape would be compiled for any size, and the first one then runs that code as well.
    chosen = settings(micro_batches, precision=precision, compile=compiled, drop_last=compiled)
    if compiled:  # kernels are chosen by the clock when they are first compiled
        train(Task(), replace(chosen, max_steps=2), tmp_path / "warm")
    result = train(Task(), chosen, tmp_path / "graph")
    assert any("replayed as one CUDA graph" in text for text in captures(result))
    plain = train(Task(), replace(chosen, cuda_graph=False), tmp_path / "eager")
    assert not captures(plain)
    assert final_bits(tmp_path / "graph") == final_bits(tmp_path / "eager")


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    train(Task(), settings(), tmp_path / "whole")
    with pytest.raises(Crash):
        train(Task(), settings(), tmp_path / "killed", observers=[CrashAt(8)])
    train(Task(), settings(), tmp_path / "killed", resume=True)
    assert final_bits(tmp_path / "killed") == final_bits(tmp_path / "whole")


def test_a_step_that_is_not_finite_updates_nothing(tmp_path: Path) -> None:
    class Spoilt(Task):
        def evaluate(self, model: nn.Module, batch_size: int) -> dict[str, float]:
            return {}

        def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
            bad = (batch["ids"][0, 0] == 32).float()  # the second step of each epoch
            return super().loss(model, batch) * torch.where(bad > 0, bad / 0.0, bad + 1)

    graph = train(Spoilt(), settings(), tmp_path / "graph")
    eager = train(Spoilt(), settings(cuda_graph=False), tmp_path / "eager")
    skipped = [event.text for event in graph.events if event.kind == "skipped"]
    assert len(skipped) == 4
    assert skipped == [event.text for event in eager.events if event.kind == "skipped"]
    assert final_bits(tmp_path / "graph") == final_bits(tmp_path / "eager")


def test_a_loss_that_waits_for_the_gpu_runs_eagerly(tmp_path: Path) -> None:
    class Waiting(Task):
        def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
            loss = super().loss(model, batch)
            assert float(loss) >= 0
            return loss

    result = train(Waiting(), settings(), tmp_path / "graph")
    assert any("not captured" in text for text in captures(result))
    train(Waiting(), settings(cuda_graph=False), tmp_path / "eager")
    assert final_bits(tmp_path / "graph") == final_bits(tmp_path / "eager")


def test_memory_that_runs_out_in_a_capture_ends_capturing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = CapturedSteps._captured

    def out(self: CapturedSteps, work: Any, batches: Any) -> Any:
        def hungry(given: Any, weight: Tensor) -> Any:
            numbers = work(given, weight)
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
            return numbers

        return made(self, hungry, batches)

    monkeypatch.setattr(CapturedSteps, "_captured", out)
    result = train(Task(), settings(), tmp_path / "graph")
    assert any("memory ran out while capturing" in text for text in captures(result))
    monkeypatch.undo()
    train(Task(), settings(cuda_graph=False), tmp_path / "eager")
    assert final_bits(tmp_path / "graph") == final_bits(tmp_path / "eager")


def test_the_receipt_sees_operators_and_launches(tmp_path: Path) -> None:
    train(Task(), settings(profile_step=True), tmp_path / "graph")
    train(Task(), settings(profile_step=True, cuda_graph=False), tmp_path / "eager")
    graph, eager = (Evidence.load(tmp_path / n / EVIDENCE) for n in ("graph", "eager"))
    assert graph.compiler.graph_launches == 1
    assert eager.compiler.graph_launches == 0
    assert graph.updates == eager.updates
    assert graph.products.shares == eager.products.shares
    assert graph.clipped
    assert eager.clipped
    assert final_bits(tmp_path / "graph") == final_bits(tmp_path / "eager")


def test_an_evaluation_that_runs_out_gets_the_memory_of_the_graphs(tmp_path: Path) -> None:
    meals = [1 << 45]

    class Hungry(Task):
        def evaluate(self, model: nn.Module, batch_size: int) -> dict[str, float]:
            if meals:  # once
                torch.empty(meals.pop(), dtype=torch.uint8, device="cuda")
            return super().evaluate(model, batch_size)

    result = train(Hungry(), settings(), tmp_path / "graph")
    assert any("in an evaluation beside them" in text for text in captures(result))
    assert not [event for event in result.events if event.kind == "oom"]
    train(Task(), settings(cuda_graph=False), tmp_path / "eager")
    assert final_bits(tmp_path / "graph") == final_bits(tmp_path / "eager")
