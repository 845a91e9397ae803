"""An evaluation over ranks has the figures of one, and runs out of memory on all or none."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from engine_children import context
from engine_ranks import DeepTask, on_ranks
from engine_toy import ToyTask, settings
from torch import Tensor, nn

from trainfit.engine.evaluation import collect, own_batches
from trainfit.engine.loop import train


@pytest.fixture(scope="module")
def children() -> ForkServerContext:
    return context()


def mean_of_batches(task: ToyTask, model: nn.Module, batch_size: int, done: list[int]) -> float:
    """A figure by batches that are divided, in the order of one rank."""
    starts = range(0, 20, batch_size)
    found, numbers = [], []
    for number, counts in own_batches(len(starts)):
        sequences = list(range(starts[number], min(20, starts[number] + batch_size)))
        loss = task.loss(model, task.collate(sequences, batch_size, 12, None))
        done.append(len(sequences))
        if counts:
            found.append(loss.double())
            numbers.append(number)
    losses, order = collect(len(starts), torch.stack(found), torch.tensor(numbers))
    return float(sum(losses[order.argsort()].tolist()))


@dataclass
class Divided(DeepTask):
    done: list[int] = field(default_factory=list)
    rank: int = 0
    fault: str = ""

    def evaluate(self, model: nn.Module, batch_size: int) -> dict[str, float]:
        self.on_loss, spoiled = self.spoil if self.fault else None, self.on_loss
        try:
            return {"loss": mean_of_batches(self, model, batch_size, self.done)}
        finally:
            self.on_loss = spoiled

    def spoil(self, _count: int, loss: Tensor) -> Tensor:
        if self.rank == 1:
            fault, self.fault = self.fault, ""
            if fault == "memory":
                raise torch.OutOfMemoryError("planted")
            if fault:
                raise ValueError("a mistake in the task")
        return loss


def evaluate_on(rank: int, run: Path, sharding: str, fault: str) -> None:
    task = Divided(dropout=0.0, rank=rank, fault=fault)
    options = {"max_steps": 1, "eval_batch_size": 4, "sharding": sharding}
    train(task, settings(task, ranks=2, **options), run)
    if not fault and sharding != "fsdp":
        assert sum(task.done) == (12, 8)[rank]  # 5 batches of 4


def evaluated(run: Path) -> float:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    [found] = [row["loss"] for row in rows if row["kind"] == "evaluation"]
    return float(found)


@pytest.mark.parametrize("sharding", [pytest.param("none"), pytest.param("fsdp")])
@pytest.mark.soak
def test_two_ranks_have_the_figures_of_one(
    tmp_path: Path, children: ForkServerContext, sharding: str
) -> None:
    assert on_ranks(children, 2, evaluate_on, tmp_path / "two", sharding, "") == [0, 0]
    task = Divided(dropout=0.0)
    train(task, settings(task, max_steps=1, eval_batch_size=4), tmp_path / "one")
    one, two = (evaluated(tmp_path / name) for name in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-6)  # the step before sums in another order


def test_memory_that_runs_out_on_one_rank_halves_the_batch_on_all(
    tmp_path: Path, children: ForkServerContext
) -> None:
    assert on_ranks(children, 2, evaluate_on, tmp_path / "run", "none", "memory") == [0, 0]
    log = (tmp_path / "run" / "train.log").read_text()
    assert "memory ran out in an evaluation: 2 sequences at a time from here" in log


@pytest.mark.soak
def test_an_error_on_one_rank_ends_both(tmp_path: Path, children: ForkServerContext) -> None:
    assert on_ranks(children, 2, evaluate_on, tmp_path / "run", "none", "mistake") == [1, 1]
    assert "another rank failed" in (tmp_path / "run" / "train.log").read_text()
