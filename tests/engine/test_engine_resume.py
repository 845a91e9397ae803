"""A run that was interrupted ends with the same bits as one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_children import context, train_in_child
from engine_toy import Crash, CrashAt, ToyTask, final_bits, settings

from trainfit.core.records import Event
from trainfit.engine.loop import train
from trainfit.engine.observers import Observer

LONG = {"epochs": 8.0, "checkpoint_steps": 2, "eval_steps": 7}


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    timed = ("seconds", "per_second", "memory_gib", "wait_share")
    return [
        {key: value for key, value in json.loads(line).items() if not key.endswith(timed)}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_steps": 2},
        *(
            pytest.param(one, marks=pytest.mark.soak)
            for one in ({}, {"optimizer": {"kind": "adamw"}})
        ),
    ],
)
def test_a_crash_after_any_step_changes_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    task = ToyTask(norm=True)
    whole = train(task, settings(task, **options), tmp_path / "whole")
    for step in (1, 2, 5, 6, 9, 14, 15):
        run = tmp_path / str(step)
        with pytest.raises(Crash):
            train(task, settings(task, **options), run, observers=[CrashAt(step)])
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "st')
        result = train(task, settings(task, **options), run, resume=True)
        assert final_bits(run) == final_bits(tmp_path / "whole"), step
        assert rows(run) == rows(tmp_path / "whole"), step
        assert [event.kind for event in result.events] == ["resumed"]
        assert (result.metrics, result.best_step) == (whole.metrics, whole.best_step)


def test_many_crashes_in_one_run(tmp_path: Path) -> None:
    task = ToyTask()
    train(task, settings(task, **LONG), tmp_path / "whole")
    run = tmp_path / "run"
    for step in (3, 4, 5, 11, 12, 25, 38):
        with pytest.raises(Crash):
            train(task, settings(task, **LONG), run, resume=run.exists(), observers=[CrashAt(step)])
    train(task, settings(task, **LONG), run, resume=True)
    assert final_bits(run) == final_bits(tmp_path / "whole")
    assert rows(run) == rows(tmp_path / "whole")


def test_a_resumed_run_starts_where_it_was(tmp_path: Path) -> None:
    task, seen = ToyTask(), []

    class Watch(Observer):
        def on_start(self, step: int, total_steps: int) -> None:
            seen.append((step, total_steps))

    options = settings(task, checkpoint_steps=3)
    with pytest.raises(Crash):
        train(task, options, tmp_path / "run", observers=[CrashAt(8), Watch()])
    result = train(task, options, tmp_path / "run", resume=True, observers=[Watch()])
    assert seen == [(0, 15), (6, 15)]
    assert result.steps == 15
    again = train(task, options, tmp_path / "run", resume=True, observers=[Watch()])
    assert seen[-1] == (15, 15)
    assert (again.status, again.metrics) == ("finished", result.metrics)


@pytest.fixture(scope="module")
def children() -> ForkServerContext:
    return context()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_stops_the_run_after_its_step(
    tmp_path: Path, children: ForkServerContext, name: str
) -> None:
    task = ToyTask()
    train(task, settings(task, **LONG), tmp_path / "whole")
    run = tmp_path / "run"

    class Ask(Observer):
        def on_step(self, step: int) -> None:
            if step == 11:
                os.kill(os.getpid(), getattr(signal, name))

    result = train(task, settings(task, **LONG), run, observers=[Ask()])
    assert result.status == "stopped"
    # Asked when step 11 was done: the loop finishes the one after it, as ranks have to agree.
    assert result.steps == 12
    assert result.events[-1].kind == "stopped"
    assert name in result.events[-1].text
    assert train(task, settings(task, **LONG), run, resume=True).status == "finished"
    assert final_bits(run) == final_bits(tmp_path / "whole")


def test_the_second_interrupt_exits_at_once(tmp_path: Path) -> None:
    class Ask(Observer):
        def on_step(self, step: int) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    task = ToyTask()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(task, settings(task), tmp_path / "run", observers=[Ask()])
    assert signal.getsignal(signal.SIGINT) is before


def kill_and_resume(folder: Path, children: ForkServerContext, wait: Callable[[], float]) -> int:
    """Kill a run at some moment, go on, and return how many steps its checkpoint had."""
    run = folder / "run"
    ready, sender = children.Pipe(duplex=False)
    child = children.Process(target=train_in_child, args=(run, LONG, sender))
    child.start()
    ready.recv()
    time.sleep(wait())
    child.kill()  # it may have ended by itself just now
    child.join()
    steps = sorted((run / "checkpoints").glob("step-*"))
    task = ToyTask()
    train(task, settings(task, **LONG), run, resume=True)
    return int(steps[-1].name[5:]) if steps else 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The uninterrupted run, and how long it takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("whole") / "run"
    task = ToyTask()
    result = train(task, settings(task, **LONG), run)
    torch.set_num_threads(threads)
    return run, result.seconds


@pytest.mark.parametrize("seed", range(2))
def test_kill_9_at_a_random_moment(
    seed: int, tmp_path: Path, children: ForkServerContext, whole: tuple[Path, float]
) -> None:
    moment = random.Random(seed).uniform(0.0, whole[1])
    kill_and_resume(tmp_path, children, lambda: moment)
    assert final_bits(tmp_path / "run") == final_bits(whole[0])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 55))
def test_kill_9_at_many_moments(
    seed: int, tmp_path: Path, children: ForkServerContext, whole: tuple[Path, float]
) -> None:
    moment = random.Random(seed).uniform(0.0, whole[1])
    kill_and_resume(tmp_path, children, lambda: moment)
    assert final_bits(tmp_path / "run") == final_bits(whole[0])


def test_an_abrupt_exit_at_every_write_point_of_a_checkpoint(
    tmp_path: Path, children: ForkServerContext
) -> None:
    """The fourth checkpoint, which also removes an older one, is left at each of its calls."""
    options = {"checkpoint_steps": 2, "eval_steps": 100, "epochs": 2.0}
    task = ToyTask()
    train(task, settings(task, **options), tmp_path / "whole")
    points = 0
    while True:
        run = tmp_path / str(points)
        child = children.Process(target=train_in_child, args=(run, options, None, 3, points))
        child.start()
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == 77
        train(task, settings(task, **options), run, resume=True)
        assert final_bits(run) == final_bits(tmp_path / "whole"), points
        assert not list((run / "checkpoints").glob(".*")), points
        points += 1
    assert points > 12


def test_events_survive_a_resume(tmp_path: Path) -> None:
    task = ToyTask()
    calls = iter(range(100))

    def spoil(count: int, loss: torch.Tensor) -> torch.Tensor:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("once")
        return loss

    task.on_loss = spoil
    options = settings(task, checkpoint_steps=2)
    with pytest.raises(Crash):
        train(task, options, tmp_path / "run", observers=[CrashAt(5)])
    result = train(task, options, tmp_path / "run", resume=True)
    kinds = [(event.kind, event.step) for event in result.events]
    assert kinds == [("oom", 1), ("resumed", 4)]
    assert all(isinstance(event, Event) for event in result.events)
