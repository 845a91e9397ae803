"""Two ranks over gloo: the same step as one, the same fate, and no rank that waits for ever."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_children import context
from engine_faults import Faults, plant
from engine_toy import ToyTask, final_bits, final_weights, settings

from trainfit.engine.distributed import World, find_world, first_says, gather, joined
from trainfit.engine.loop import train
from trainfit.engine.observers import Observer
from trainfit.engine.optimizer import trained_parameters
from trainfit.records import RunResult

DOUBLE: dict[str, Any] = {"dtype": torch.float64, "dropout": 0.0}
PATIENCE = 60


@pytest.fixture(scope="module")
def children() -> ForkServerContext:
    return context()


def as_rank(rank: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    work(rank, *args)


def on_two_ranks(children: ForkServerContext, work: Callable[..., None], *args: Any) -> list[int]:
    """Run `work(rank, *args)` on both; the exit codes, in time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [children.Process(target=as_rank, args=(r, port, work, args)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE)
    hung = [process for process in ranks if process.exitcode is None]
    for process in hung:
        process.kill()
    assert not hung, "a rank hangs"
    return [int(process.exitcode or 0) for process in ranks]


def train_rank(rank: int, run: Path, task: dict[str, Any], options: dict[str, Any]) -> None:
    toy = ToyTask(**task)
    train(toy, settings(toy, ranks=2, **options), run)


def test_a_step_dealt_over_two_ranks_is_the_same_step(
    tmp_path: Path, children: ForkServerContext
) -> None:
    """A last step of one sequence leaves the second rank without work."""
    task = DOUBLE | {"sequences": 33}
    assert on_two_ranks(children, train_rank, tmp_path / "two", task, {}) == [0, 0]
    one = ToyTask(**task)
    train(one, settings(one), tmp_path / "one")
    two, expected = final_weights(tmp_path / "two"), final_weights(tmp_path / "one")
    for name, weight in expected.items():
        assert (two[name] - weight).abs().max() < 1e-10, name
    losses = [
        [line for line in (tmp_path / n / "train.log").read_text().splitlines() if "loss" in line]
        for n in ("one", "two")
    ]
    assert [line.split()[4:6] for line in losses[0]] == [line.split()[4:6] for line in losses[1]]


def gradients_of_rank(rank: int, folder: Path) -> None:
    from trainfit.data.loading import StepLoader
    from trainfit.engine.distributed import fill_gradients, sum_gradients
    from trainfit.engine.optimizer import build_optimizer
    from trainfit.engine.settings import LoaderSettings
    from trainfit.engine.step import accumulate

    with joined("cpu") as (world, device):
        task = ToyTask(**DOUBLE)
        torch.manual_seed(0)
        model = task.build_model()
        chosen = settings(task, ranks=2)
        parameters = trained_parameters(build_optimizer(model, chosen.optimizer))
        loader = StepLoader(task, LoaderSettings(), device, rank=rank, ranks=2)
        step = task.steps(0)[0]
        batches = loader.load(step, chosen.cuts[1])
        loss = accumulate(model, task.loss, batches, task.weight(step), device_type="cpu")
        used = fill_gradients(world, parameters)
        assert not all(used)
        sum_gradients(world, parameters, used, loss)
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        torch.save(found, folder / f"{rank}.pt")


def test_two_ranks_sum_to_the_gradient_of_one(tmp_path: Path, children: ForkServerContext) -> None:
    assert on_two_ranks(children, gradients_of_rank, tmp_path) == [0, 0]
    task = ToyTask(**DOUBLE)
    torch.manual_seed(0)
    model, step = task.build_model(), task.steps(0)[0]
    (task.loss(model, task.collate(step, len(step), 12, None)) / len(step)).backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
        for name, gradient in found.items():
            expected = model.get_parameter(name).grad
            assert (gradient - expected).abs().max() < 1e-10, name


def train_with_faults(
    rank: int, run: Path, faulty: int, at: set[int], options: dict[str, Any]
) -> None:
    toy = ToyTask()
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(at if rank == faulty else ())
        plant(patch, toy, faults)
        train(toy, settings(toy, ranks=2, **options), run)
    assert faults.raised == (len(at) if rank == faulty else 0)


@pytest.mark.parametrize(
    ("faulty", "at"),
    [(1, {30}), (1, {30, 45, 400, 420}), (0, {10, 12, 14, 16}), (1, {95, 140, 600})],
)
def test_one_rank_runs_out_and_both_take_the_same_way(
    tmp_path: Path, children: ForkServerContext, faulty: int, at: set[int]
) -> None:
    ran = on_two_ranks(children, train_with_faults, tmp_path / "failed", faulty, at, {})
    assert ran == [0, 0]
    result = RunResult.load(tmp_path / "failed" / "result.json")
    assert result.status == "finished"
    replay = {"cut_changes": result.cuts}
    ran = on_two_ranks(children, train_with_faults, tmp_path / "again", 0, set(), replay)
    assert ran == [0, 0]
    assert final_bits(tmp_path / "failed") == final_bits(tmp_path / "again")


def stop_and_go_on(rank: int, run: Path) -> None:
    import signal

    class Ask(Observer):
        def on_step(self, step: int) -> None:
            if step == 6:
                os.kill(os.getpid(), signal.SIGTERM)

    toy = ToyTask()
    chosen = settings(toy, ranks=2)
    with joined("cpu"):
        result = train(toy, chosen, run, observers=[Ask()])
        assert (result.status, result.steps) == ("stopped", 7)
        assert train(toy, chosen, run, resume=True).status == "finished"


def fail_to_write(rank: int, run: Path) -> None:
    from trainfit.engine import checkpoint
    from trainfit.errors import RunFailed

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    toy = ToyTask()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_write_text", full)
        with pytest.raises(RunFailed, match="No space left"):
            train(toy, settings(toy, ranks=2), run)


def test_a_disk_that_is_full_for_the_first_rank_fails_both(
    tmp_path: Path, children: ForkServerContext
) -> None:
    assert on_two_ranks(children, fail_to_write, tmp_path / "run") == [0, 0]


def test_a_signal_to_one_rank_stops_both_and_they_go_on(
    tmp_path: Path, children: ForkServerContext
) -> None:
    assert on_two_ranks(children, stop_and_go_on, tmp_path / "stopped") == [0, 0]
    assert on_two_ranks(children, train_rank, tmp_path / "whole", {}, {}) == [0, 0]
    assert final_bits(tmp_path / "stopped") == final_bits(tmp_path / "whole")


def fail_on_one(rank: int, run: Path) -> None:
    toy = ToyTask()

    def spoil(count: int, loss: torch.Tensor) -> torch.Tensor:
        if rank == 1 and count == 3:
            raise ValueError("a mistake in the task")
        return loss

    toy.on_loss = spoil
    train(toy, settings(toy, ranks=2), run)


def test_an_error_on_one_rank_ends_both(tmp_path: Path, children: ForkServerContext) -> None:
    assert on_two_ranks(children, fail_on_one, tmp_path / "run") == [1, 1]
    log = (tmp_path / "run" / "train.log").read_text()
    assert "another rank failed" in log


def speak(rank: int) -> None:
    with joined("cpu") as (world, _):
        assert world == World(rank, 2, rank)
        assert gather(world, f"rank {rank} " + "é" * rank * 5) == ["rank 0 ", "rank 1 ééééé"]
        assert first_says(world, f"{rank}") == "0"


def test_ranks_hear_each_other(children: ForkServerContext) -> None:
    assert on_two_ranks(children, speak) == [0, 0]


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert find_world() == World(0, 1, 0)
    assert gather(World(), "alone") == ["alone"]
