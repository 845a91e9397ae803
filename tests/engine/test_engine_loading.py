"""The loader: every sequence once, in order, whatever the workers, the cut and the start."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from engine_toy import ToyTask, cuts

from trainfit.core.errors import RunFailed
from trainfit.data.batches import StepLoader, to_device
from trainfit.engine.loop_settings import LoaderSettings
from trainfit.measuring.evidence import count_workers

CPU = torch.device("cpu")
NONE = LoaderSettings(persistent_workers=True, pin_memory=True, prefetch_factor=4)
SOME = LoaderSettings(num_workers=2, prefetch_factor=2)
PERSISTENT = LoaderSettings(num_workers=2, persistent_workers=True, prefetch_factor=1)


def tokens_of(batch: Any) -> list[tuple[int, ...]]:
    """The sequences of a micro-batch, as their tokens."""
    ids, segments = batch["ids"].flatten(), batch["segments"].flatten()
    return [tuple(ids[segments == at].tolist()) for at in range(int((batch["labels"] >= 0).sum()))]


@pytest.mark.parametrize("options", [NONE, SOME, PERSISTENT], ids=["none", "some", "persistent"])
@pytest.mark.parametrize("padded", [False, True])
def test_every_step_comes_whole_and_in_order(options: LoaderSettings, padded: bool) -> None:
    task, before = ToyTask(), count_workers()
    loader = StepLoader(task, options, CPU)
    steps, ladder = task.steps(0), cuts(task, padded=padded)
    for cut, start in ((ladder[0], 0), (ladder[2], 2)):
        arrived = list(loader.steps(steps[start:], cut))
        assert [list(step.sequences) for step in arrived] == steps[start:]
        for step in arrived:
            found = [tokens for batch in step.batches for tokens in tokens_of(batch)]
            expected = [tuple(task.tokens[s].tolist()) for s in step.sequences]
            assert sorted(found) == sorted(expected)
            assert step.waited >= 0
    assert len(arrived[0].batches) >= ladder[2].micro_batches
    loader.close()
    assert count_workers() == before


@pytest.mark.parametrize("options", [SOME, PERSISTENT])
def test_a_new_cut_in_the_middle_loses_nothing(options: LoaderSettings) -> None:
    task = ToyTask(sequences=80)
    loader, steps, ladder = StepLoader(task, options, CPU), task.steps(0), cuts(task)
    for at in range(len(steps)):
        arriving = loader.steps(steps[at:], ladder[at % 3])
        step = next(arriving)
        arriving.close()
        again = loader.load(step.sequences, ladder[at % 3])
        assert list(step.sequences) == steps[at]
        for one, other in zip(step.batches, again, strict=True):
            assert torch.equal(one["ids"], other["ids"])
    loader.close()


def test_ranks_share_a_step_and_an_idle_one_gets_nothing() -> None:
    task = ToyTask(sequences=9, effective_batch=8)
    cut = cuts(task, ranks=2)[1]
    parts = [StepLoader(task, NONE, CPU, rank=rank, ranks=2) for rank in range(2)]
    for step in task.steps(0):
        batches = [part.load(step, cut) for part in parts]
        found = sorted(t for part in batches for batch in part for t in tokens_of(batch))
        assert found == sorted(tuple(task.tokens[s].tolist()) for s in step)
    assert [len(part) for part in batches] == [1, 0]


def test_a_gpu_gets_whole_shapes_and_a_cpu_what_the_sequences_need() -> None:
    task = ToyTask(sequences=43)
    cut = cuts(task, padded=True)[0]
    shapes = {}
    for device in (torch.device("cuda"), CPU):
        loader = StepLoader(task, LoaderSettings(), device)
        batches = [batch for step in task.steps(0) for batch in loader.load(step, cut)]
        shapes[device.type] = [tuple(batch["ids"].shape) for batch in batches]
    assert set(shapes["cuda"]) <= set(cut.shapes)
    assert sum(rows for rows, _ in shapes["cpu"]) == 43
    assert all(
        a[0] <= b[0] and a[1] <= b[1] for a, b in zip(*reversed(shapes.values()), strict=True)
    )


def test_loading_leaves_the_random_state_alone() -> None:
    task = ToyTask()
    before = torch.get_rng_state()
    for options in (NONE, SOME):
        list(StepLoader(task, options, CPU).steps(task.steps(0), cuts(task)[0]))
    assert torch.equal(torch.get_rng_state(), before)


def test_zero_workers_with_every_other_option_is_no_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = StepLoader(ToyTask(), NONE, CPU)
        assert len(list(loader.steps(ToyTask().steps(0), cuts(ToyTask())[0]))) == 5


class Dying(ToyTask):
    def collate(self, *args: Any) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            import os

            os._exit(1)
        return super().collate(*args)


def test_a_worker_that_dies_is_one_line() -> None:
    task = Dying()
    loader = StepLoader(task, LoaderSettings(num_workers=1), CPU)
    with pytest.raises(RunFailed, match="a loader process died"):
        list(loader.steps(task.steps(0), cuts(task)[0]))


def test_what_is_no_tensor_goes_along() -> None:
    (moved,) = to_device([{"ids": torch.ones(2), "count": 3}], CPU)
    assert moved["count"] == 3
    assert np.array_equal(moved["ids"], np.ones(2))
