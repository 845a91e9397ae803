"""Memory that runs out anywhere: the run ends with the bits of a run that replays its cuts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_faults import Faults, plant
from engine_toy import ToyTask, final_bits, final_weights, settings

from trainfit.core.errors import RunFailed
from trainfit.core.records import RunResult
from trainfit.engine import recovery
from trainfit.engine.loop import train
from trainfit.engine.memory_errors import is_out_of_memory, write_once

PHASES = ("step", "update", "evaluation")


def task(**options: object) -> ToyTask:
    return ToyTask(**({"norm": True} | options))  # type: ignore[arg-type]


def faulty_run(run: Path, faults: Faults, toy: ToyTask) -> RunResult:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, toy, faults)
        chosen = settings(toy, eval_batch_size=64)
        return train(toy, chosen, run)


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    """The numbers of the operations of a run in which nothing fails, by phase."""
    counted = Faults()
    faulty_run(tmp_path_factory.mktemp("counted") / "run", counted, task())
    assert counted.phases.keys() == set(PHASES)
    return counted.phases


def draw_faults(chance: random.Random, operations: dict[str, set[int]]) -> set[int]:
    """A fault in each phase, and after one in a step more of them, in the tries that follow it."""
    at = {phase: chance.choice(sorted(operations[phase])) for phase in PHASES}
    burst = {at["step"] + chance.randint(1, 60) for _ in range(chance.randint(0, 3))}
    return {*at.values(), *burst}


def check_replay(seed: int, folder: Path, operations: dict[str, set[int]]) -> RunResult:
    faults = Faults(draw_faults(random.Random(seed), operations))
    toy = task()
    failed = faulty_run(folder / "failed", faults, toy)
    assert faults.raised
    again = task()
    replay = replace(
        settings(again),
        cut_changes=failed.cuts,
        eval_batch_size=min(toy.evaluations),
    )
    assert train(again, replay, folder / "replayed").cuts == failed.cuts
    assert final_bits(folder / "failed") == final_bits(folder / "replayed")
    return failed


@pytest.mark.parametrize("seed", range(5))
def test_a_replay_of_the_recorded_cuts_ends_with_the_same_bits(
    seed: int, tmp_path: Path, operations: dict[str, set[int]]
) -> None:
    check_replay(seed, tmp_path, operations)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5, 60))
def test_a_replay_ends_with_the_same_bits_many_times(
    seed: int, tmp_path: Path, operations: dict[str, set[int]]
) -> None:
    check_replay(seed, tmp_path, operations)


def test_the_first_fault_takes_the_cut_again_and_the_second_cuts_finer(
    tmp_path: Path, operations: dict[str, set[int]]
) -> None:
    plain = train(task(), settings(task()), tmp_path / "plain")
    assert plain.events == ()
    first = min(operations["step"]) + 5
    once_failed = faulty_run(tmp_path / "once", Faults({first}), task())
    assert [event.kind for event in once_failed.events] == ["oom"]
    assert once_failed.cuts == ((0, 0),)
    assert final_bits(tmp_path / "once") == final_bits(tmp_path / "plain")
    twice = faulty_run(tmp_path / "twice", Faults({first, first + 3}), task())
    assert twice.cuts == ((0, 1),)
    assert [event.step for event in twice.events] == [0, 0]
    assert final_bits(tmp_path / "twice") != final_bits(tmp_path / "plain")


@pytest.mark.parametrize("padded", [False, True])
def test_across_cuts_the_result_is_the_same_but_for_rounding(tmp_path: Path, padded: bool) -> None:
    ends = []
    for changes in ((), ((0, 3),), ((1, 1), (4, 2), (9, 3))):
        toy = ToyTask(dtype=torch.float64, dropout=0.0)
        run = tmp_path / str(len(ends))
        train(toy, settings(toy, padded=padded, cut_changes=changes), run)
        ends.append(final_weights(run))
    for other in ends[1:]:
        for name, weight in ends[0].items():
            assert (other[name] - weight).abs().max() < 1e-9, name
    assert any((ends[0][name] != ends[1][name]).any() for name in ends[0])


def test_at_the_end_of_the_ladder_the_run_fails_with_a_checkpoint(tmp_path: Path) -> None:
    toy = task()
    good = settings(toy, eval_steps=100)

    def spoil(count: int, loss: torch.Tensor) -> torch.Tensor:
        if count > 6:
            raise torch.OutOfMemoryError("always")
        return loss

    toy.on_loss = spoil
    with pytest.raises(RunFailed, match="finest cut"):
        train(toy, good, tmp_path / "run")
    saved = RunResult.load(tmp_path / "run" / "result.json")
    assert (saved.status, saved.steps) == ("failed", 6)
    train(task(), good, tmp_path / "run", resume=True)
    train(task(), replace(good, cut_changes=((6, 0),)), tmp_path / "whole")
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


def test_an_evaluation_that_runs_out_halves_its_batch_and_keeps_it(tmp_path: Path) -> None:
    toy, plain = task(), task()

    def spoil(model: torch.nn.Module, batch_size: int) -> dict[str, float]:
        toy.evaluations.append(batch_size)
        if batch_size > 5:
            raise torch.OutOfMemoryError("too large")
        return plain.evaluate(model, batch_size)

    toy.evaluate = spoil  # type: ignore[method-assign]
    result = train(toy, settings(toy), tmp_path / "run")
    assert toy.evaluations[:4] == [16, 8, 4, 4]
    assert [event.kind for event in result.events] == ["oom", "oom"]
    toy = task()
    toy.evaluate = lambda model, size: (_ for _ in ()).throw(  # type: ignore[method-assign,assignment]
        torch.OutOfMemoryError("never")
    )
    with pytest.raises(RunFailed, match="one sequence at a time"):
        train(toy, settings(toy), tmp_path / "never")


def test_other_errors_are_not_taken_for_memory(tmp_path: Path) -> None:
    toy = task()

    def spoil(count: int, loss: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("shapes do not match")

    toy.on_loss = spoil
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(toy, settings(toy), tmp_path / "run")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)  # fmt: skip
def test_out_of_memory_is_recognised(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    wrapped = RuntimeError("in a compiled region")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is expected


@pytest.mark.parametrize(
    ("free", "expected"), [(100 << 20, True), (4 << 30, False), (RuntimeError("assert"), False)]
)
def test_cublas_that_cannot_begin_on_a_full_gpu_lacks_memory(
    monkeypatch: pytest.MonkeyPatch, free: Any, expected: bool
) -> None:
    """Beside other processes; a broken context gives the same message and no longer answers."""

    def ask() -> tuple[int, int]:
        if isinstance(free, Exception):
            raise free
        return free, 24 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", ask)
    text = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(text)) is expected


def test_once_writes_to_each_tensor_once() -> None:
    tensors = [torch.zeros(2) for _ in range(5)]
    calls = []

    def work(left: list[torch.Tensor]) -> None:
        calls.append(len(left))
        for tensor in left[:2]:
            tensor.add_(1)
        if len(left) > 2:
            raise torch.OutOfMemoryError

    write_once(tensors, work)
    assert calls == [5, 3, 1]
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_buffers_are_put_back_with_the_step() -> None:
    norm = torch.nn.BatchNorm1d(3)
    buffers = recovery.Buffers(norm)
    buffers.keep()
    before = norm.running_mean.clone()
    for _ in range(2):
        norm(torch.randn(4, 3))
        assert not torch.equal(norm.running_mean, before)
        buffers.put_back()
        assert torch.equal(norm.running_mean, before)
        assert norm.num_batches_tracked == 0
