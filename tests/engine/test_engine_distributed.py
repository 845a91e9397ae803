"""Two ranks over gloo: the same step as one, the same fate, and no rank that waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_children import context
from engine_faults import Faults, plant
from engine_ranks import on_ranks
from engine_toy import ToyTask, final_bits, final_weights, settings
from torch.distributed import DistBackendError

from trainfit.core.records import RunResult
from trainfit.engine.distributed import (
    Verdict,
    Watchdog,
    World,
    find_world,
    first_says,
    gather,
    joined,
    lost_rank,
    reporting,
    stop_on_signals,
    vote,
)
from trainfit.engine.loop import train
from trainfit.engine.observers import Observer
from trainfit.engine.optimizer import trained_parameters

DOUBLE: dict[str, Any] = {"dtype": torch.float64, "dropout": 0.0}


@pytest.fixture(scope="module")
def children() -> ForkServerContext:
    return context()


def on_two_ranks(children: ForkServerContext, work: Callable[..., None], *args: Any) -> list[int]:
    return on_ranks(children, 2, work, *args)


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


@pytest.mark.parametrize(("there", "own"), [(1, 0), (8, 3)])
def test_a_rank_takes_the_only_gpu_that_its_launcher_shows_it(
    monkeypatch: pytest.MonkeyPatch, there: int, own: int
) -> None:
    """`srun --gpus-per-task 1` shows each of a machine's ranks one GPU, which is cuda:0 for all."""
    taken: list[torch.device] = []
    for name, value in {"RANK": 3, "LOCAL_RANK": 3, "WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with joined("cuda") as (world, device):
        assert world.local_rank == 3
    assert taken == [device] == [torch.device("cuda", own)]


def gradients_of_rank(rank: int, folder: Path, options: dict[str, Any]) -> None:
    from trainfit.data.batches import StepLoader
    from trainfit.engine.loop_settings import LoaderSettings
    from trainfit.engine.optimizer import build_optimizer
    from trainfit.engine.parallel import GradientBuckets
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
        buckets = GradientBuckets(parameters, **options)
        for _ in range(2):  # a try that is dropped leaves nothing
            buckets.drop()
            model.zero_grad()
            watched = buckets.watched(batches, len(batches))
            accumulate(model, task.loss, watched, task.weight(step), device_type="cpu")
            used = buckets.sum_rest()
        assert not all(used)
        assert vote(world, Verdict(used=used)).used == used
        buckets.finish(used)
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        torch.save(found, folder / f"{rank}.pt")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"bucket_bytes": 300}, 1e-10),
        pytest.param({}, 1e-10, marks=pytest.mark.soak),
        pytest.param({"dtype": torch.bfloat16}, 2e-2, marks=pytest.mark.soak),
    ],
)
def test_two_ranks_sum_to_the_gradient_of_one(
    tmp_path: Path, children: ForkServerContext, options: dict[str, Any], error: float
) -> None:
    assert on_two_ranks(children, gradients_of_rank, tmp_path, options) == [0, 0]
    task = ToyTask(**DOUBLE)
    torch.manual_seed(0)
    model, step = task.build_model(), task.steps(0)[0]
    (task.loss(model, task.collate(step, len(step), 12, None)) / len(step)).backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
        for name, gradient in found.items():
            expected = model.get_parameter(name).grad
            assert (gradient - expected).abs().max() < error, name


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
    [
        (1, {30, 45, 400, 420}),
        pytest.param(0, {10, 12, 14, 16}, marks=pytest.mark.soak),
        *(pytest.param(1, at, marks=pytest.mark.soak) for at in ({30}, {95, 140, 600})),
    ],
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
    from trainfit.core.errors import RunFailed
    from trainfit.engine import checkpoint

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
        assert world == World(rank, 2, rank, 2)
        assert gather(world, f"rank {rank} " + "é" * rank * 5) == ["rank 0 ", "rank 1 ééééé"]
        assert first_says(world, f"{rank}") == "0"


def test_ranks_hear_each_other(children: ForkServerContext) -> None:
    assert on_two_ranks(children, speak) == [0, 0]


def meet_again(rank: int, port: int) -> None:
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(rank),  # the second machine came back
        "MASTER_PORT": str(port),
    }
    speak(rank)


def test_a_machine_that_came_back_meets_the_others_in_a_store_of_before(
    children: ForkServerContext,
) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("trainfit/round", "dead")
    store.set("dead/heard", "somebody")
    assert on_two_ranks(children, meet_again, store.port) == [0, 0]
    assert store.get("trainfit/round") != b"dead"


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert find_world() == World(0, 1, 0)
    assert gather(World(), "alone") == ["alone"]


def test_ranks_share_the_steps_of_one_in_the_same_order() -> None:
    """Whatever their number, ranks see the same sequences in the same steps, each one once."""
    task = ToyTask(sequences=61)
    epochs = [[sorted(step) for step in task.steps(epoch)] for epoch in range(2)]
    assert epochs[0] != epochs[1]
    for ranks in (1, 2, 3, 4):
        for cut in settings(task, ranks=ranks).cuts:
            for epoch, expected in enumerate(epochs):
                for in_step in (False, True):
                    found = _seen(task, ranks, epoch, cut, in_step)
                    assert found == expected, (ranks, cut, in_step)


def _seen(task: ToyTask, ranks: int, epoch: int, cut: Any, in_step: bool) -> list[list[int]]:
    """The sequences of each step, over all ranks, by what is handed to collate."""
    from trainfit.data.batches import StepLoader
    from trainfit.engine.loop_settings import LoaderSettings

    seen: list[list[int]] = [[] for _ in task.steps(epoch)]
    counts: list[set[int]] = [set() for _ in seen]
    collate = task.collate
    for rank in range(ranks):
        given: list[int] = []

        def noted(sequences: Any, *shape: Any, given: list[int] = given) -> Any:
            given.extend(sequences)
            return collate(sequences, *shape)

        task.collate = noted  # type: ignore[method-assign]
        options = {"rank": rank, "ranks": ranks, "in_step": in_step}
        loader = StepLoader(task, LoaderSettings(), torch.device("cpu"), **options)
        for number, step in enumerate(task.steps(epoch)):
            counts[number].add(len(loader.load(step, cut)))
            seen[number] += given
            given.clear()
    task.collate = collate  # type: ignore[method-assign]
    if in_step:
        assert all(len(numbers) == 1 for numbers in counts)
    return [sorted(step) for step in seen]


def wait_for_the_dead(rank: int) -> None:
    """As a rank does whose GPU waits: not in a call of gloo, which would fail."""
    import signal
    import time

    with joined("cpu"):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(50)


@pytest.mark.soak
def test_a_rank_that_waits_for_its_gpu_ends_when_another_is_killed(
    children: ForkServerContext,
) -> None:
    assert on_two_ranks(children, wait_for_the_dead) == [1, -9]


def test_a_lost_machine_is_noticed_by_the_kernel() -> None:
    import socket

    watch, other = Watchdog(), Watchdog()
    address = watch.listen()
    other.connect(address.replace(address.split()[0], "127.0.0.1"))
    (kept,) = [key.fileobj for key in other._selector.get_map().values()]
    assert isinstance(kept, socket.socket)
    assert kept.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    idle, every, times = (
        kept.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names
    )
    assert idle + every * times < 60 - 10
    with socket.create_connection(("127.0.0.1", int(address.split()[1]))) as stranger:
        stranger.sendall(b"x" * 16)  # and leaves: nobody minds
    other.close(well=True)
    watch.close(well=True)


_REPORTS = """
import contextlib, os, signal, sys, time
from trainfit.core.errors import RunFailed
from trainfit.engine import distributed
distributed._REPORTING = float(sys.argv[1])
with contextlib.suppress(RunFailed), distributed.reporting(distributed.World(size=2)):
    with distributed.stop_on_signals():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    raise distributed.lost_rank(RuntimeError("gloo: connection closed by peer"))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
print("reported")
"""


@pytest.mark.parametrize(("seconds", "code", "said"), [(60, 0, "reported\n"), (0.1, 143, "")])
def test_a_rank_that_lost_another_has_time_to_report_but_not_for_ever(
    seconds: float, code: int, said: str
) -> None:
    """torchrun asks it to end after its last step, and again before it has said why."""
    began = time.monotonic()
    command = [sys.executable, "-c", _REPORTS, str(seconds)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (code, said)
    assert time.monotonic() - began < 50


def test_ranks_on_one_gpu_are_told_so() -> None:
    said = "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 50000"
    assert "two ranks are on one GPU" in str(lost_rank(DistBackendError(said)))
    assert "another rank has died" in str(lost_rank(DistBackendError("remote process exited")))


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with reporting(World(size=2)):
        own = signal.getsignal(signal.SIGTERM)
        with stop_on_signals() as request:
            assert signal.getsignal(signal.SIGTERM) is not own
            assert lost_rank(RuntimeError("an error of its own")) is None
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is own is not before
    assert request.name == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before
