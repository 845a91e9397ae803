"""A rank that dies: nobody hangs, and what torchrun starts again ends as if nothing was."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_children import context
from engine_ranks import DeepTask, launched, on_ranks, train_deep
from engine_toy import settings

from trainfit.core.errors import BadInput
from trainfit.core.records import RunResult
from trainfit.engine import checkpoint, parallel
from trainfit.engine.checkpoint import latest_good
from trainfit.engine.distributed import World
from trainfit.engine.loop import train
from trainfit.engine.relaunch import Launch, Process, find_launch

OFTEN: dict[str, Any] = {"checkpoint_steps": 3, "eval_steps": 5}
LIMIT = 60


@pytest.fixture(scope="module")
def children() -> ForkServerContext:
    return context()


def started() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def die_once(rank: int, run: Path, options: dict[str, Any], at: int = 9) -> None:
    """The second rank is killed in the middle of a step, at the first start."""
    task = DeepTask()

    def spoil(count: int, loss: torch.Tensor) -> torch.Tensor:
        if rank == 1 and count == at and not started():
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    task.on_loss = spoil
    train(task, settings(task, ranks=2, **OFTEN, **options), run)


def contents(run: Path) -> dict[str, torch.Tensor]:
    folder, faults = latest_good(run)
    assert folder is not None
    assert not faults
    read = checkpoint.read(folder)
    return {**read.model, **read.optimizer}


def same_bits(one: Path, other: Path) -> None:
    expected, found = contents(one), contents(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_the_others_end_when_a_rank_is_killed(
    tmp_path: Path, children: ForkServerContext, sharding: str
) -> None:
    started = time.perf_counter()
    ran = on_ranks(children, 2, die_once, tmp_path / "run", {"sharding": sharding})
    assert ran == [1, -signal.SIGKILL]
    assert time.perf_counter() - started < LIMIT
    assert "another rank has died; see its message" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.soak
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_a_killed_rank_is_started_again_and_the_run_ends_the_same(
    tmp_path: Path, children: ForkServerContext, sharding: str
) -> None:
    options = {"sharding": sharding}
    whole = on_ranks(children, 2, train_deep, tmp_path / "whole", {}, OFTEN | options)
    assert whole == [0, 0]
    assert launched(children, 1, die_once, tmp_path / "run", options) == [0, 0]
    same_bits(tmp_path / "whole", tmp_path / "run")
    result = RunResult.load(tmp_path / "run" / "result.json")
    assert result.status == "finished"
    assert [event.kind for event in result.events] == ["resumed"]


def die_writing(rank: int, run: Path, who: int, point: str, options: dict[str, Any]) -> None:
    """A rank dies while the second checkpoint is written, at the first start."""
    saves = iter(range(100))

    def dying(work: Any) -> Any:
        def call(folder: Path, *args: Any) -> Any:
            second = next(saves) == 1 and rank == who and not started()
            if second and point == "before":
                os._exit(77)
            done = work(folder, *args)
            if second and point == "half":
                part = next(folder.glob(f"shard-{rank + 1:05d}-*"))
                os.truncate(part, part.stat().st_size // 2)
            if second:
                os._exit(77)
            return done

        return call

    with pytest.MonkeyPatch.context() as patch:
        if point == "manifest":
            patch.setattr(checkpoint, "_check_seen", dying(checkpoint._check_seen))
        else:
            patch.setattr(parallel, "write", dying(parallel.write))
        train_deep(rank, run, {}, options)


DEATHS = [(1, "half"), (0, "manifest"), (0, "before"), (1, "before"), (0, "half"), (1, "after")]


@pytest.mark.parametrize(
    ("who", "point"),
    [pytest.param(*d, marks=[pytest.mark.soak] if n else []) for n, d in enumerate(DEATHS)],
)
def test_a_rank_that_dies_while_writing_leaves_the_checkpoint_before(
    tmp_path: Path, children: ForkServerContext, who: int, point: str
) -> None:
    options = OFTEN | {"sharding": "fsdp", "max_steps": 8}
    assert on_ranks(children, 2, train_deep, tmp_path / "whole", {}, options) == [0, 0]
    run = tmp_path / "run"
    ran = on_ranks(children, 2, die_writing, run, who, point, options)
    assert ran[who] == 77
    assert ran[1 - who] == 1
    good, faults = latest_good(run)
    assert good is not None
    assert (good.name, faults) == ("step-00000003", ())
    assert on_ranks(children, 2, train_deep, run, {}, options, True) == [0, 0]
    same_bits(tmp_path / "whole", run)
    assert not list((run / "checkpoints").glob(".*"))


def run_out(rank: int, run: Path, where: str, often: int) -> None:
    """Memory runs out on the second rank, as often as it is started."""
    task = DeepTask()
    evaluate = task.evaluate

    def spoil(count: int, loss: torch.Tensor) -> torch.Tensor:
        if where == "step" and rank == 1 and started() < often and count == 9:
            raise torch.OutOfMemoryError("planted")
        return loss

    def spoiled(model: torch.nn.Module, size: int) -> dict[str, float]:
        if where == "evaluation" and rank == 1 and size > 4:
            raise torch.OutOfMemoryError("planted")
        return evaluate(model, size)

    task.on_loss, task.evaluate = spoil, spoiled  # type: ignore[method-assign]
    train(task, settings(task, ranks=2, sharding="fsdp", **OFTEN), run)


@pytest.mark.soak
def test_memory_that_runs_out_in_a_sharded_step_starts_again_with_the_next_cut(
    tmp_path: Path, children: ForkServerContext
) -> None:
    assert launched(children, 2, run_out, tmp_path / "run", "step", 2) == [0, 0]
    result = RunResult.load(tmp_path / "run" / "result.json")
    assert result.status == "finished"
    assert [rung for _, rung in result.cuts][-1] == 2
    assert "oom" in {event.kind for event in result.events}
    replay = OFTEN | {"sharding": "fsdp", "cut_changes": result.cuts}
    assert on_ranks(children, 2, train_deep, tmp_path / "again", {}, replay) == [0, 0]
    same_bits(tmp_path / "again", tmp_path / "run")


@pytest.mark.soak
def test_memory_that_runs_out_in_a_sharded_evaluation_starts_again_with_half(
    tmp_path: Path, children: ForkServerContext
) -> None:
    assert launched(children, 2, run_out, tmp_path / "run", "evaluation", 0) == [0, 0]
    result = RunResult.load(tmp_path / "run" / "result.json")
    assert result.status == "finished"
    sizes = [event.text for event in result.events if event.kind == "oom"]
    assert any("4 sequences" in text for text in sizes)


@pytest.mark.soak
def test_without_restarts_memory_that_runs_out_ends_in_one_line(
    tmp_path: Path, children: ForkServerContext
) -> None:
    run = tmp_path / "run"
    assert on_ranks(children, 2, run_out, run, "step", 1) == [1, 1]
    assert (run / "otherwise.json").is_file()
    assert on_ranks(children, 2, train_deep, run, {}, OFTEN | {"sharding": "fsdp"}, True) == [0, 0]
    cuts = RunResult.load(run / "result.json").cuts
    assert cuts[-1][1] == 1


def test_a_run_of_another_launch_is_not_taken_over(tmp_path: Path) -> None:
    agent = Process(host="here", pid=7, started=1000.0)
    first = Process(host="here", pid=8, started=1001.0)
    Launch(first=first, agents=(agent,)).note(tmp_path)
    again = Process(host="here", pid=9, started=1060.0)
    assert Launch(first=again, agents=(agent,)).is_restart(tmp_path)
    slow_clock = Process(host="here", pid=7, started=1000.9)
    assert Launch(first=again, agents=(slow_clock,)).is_restart(tmp_path)
    assert not Launch(first=first, agents=(agent,)).is_restart(tmp_path)
    for other in ({"host": "there"}, {"pid": 6}, {"started": 5000.0}):
        changed = Process(**({"host": "here", "pid": 7, "started": 1000.0} | other))
        assert not Launch(first=again, agents=(changed,)).is_restart(tmp_path)
    assert not Launch(first=again, agents=()).is_restart(tmp_path)
    assert find_launch(World()).agents == ()


def begin_in_foreign_folder(rank: int, run: Path) -> None:
    with pytest.raises(BadInput if rank == 0 else Exception, match="holds a run already"):
        train_deep(rank, run, {}, OFTEN)


def test_a_folder_that_holds_another_run_is_refused_by_all_ranks(
    tmp_path: Path, children: ForkServerContext
) -> None:
    train_deep(0, tmp_path / "run", {}, OFTEN)
    assert on_ranks(children, 2, begin_in_foreign_folder, tmp_path / "run") == [0, 0]
