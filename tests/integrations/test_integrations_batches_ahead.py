"""Batches that are fetched ahead: those of the loader alone, in its order."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, dataloader

from trainfit.integrations.host_batches import AROUND, BatchesAhead, fetch_ahead


@pytest.fixture
def ahead() -> Iterator[BatchesAhead]:
    kind: Any = dataloader._SingleProcessDataLoaderIter
    before = kind._next_data
    yield fetch_ahead()
    kind._next_data = before
    AROUND.off = False
    del kind._trainfit_fetched


class Numbers(Dataset[int]):
    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return 23

    def __getitem__(self, at: int) -> int:
        self.threads.add(threading.current_thread().name)
        return at


def batches(data: Any, **options: Any) -> list[list[int]]:
    shuffled = {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
    return [batch.tolist() for batch in DataLoader(data, 5, **(shuffled | options))]


def test_epochs_are_those_of_the_loader_alone(ahead: BatchesAhead) -> None:
    AROUND.off = True
    plain = batches(Numbers())
    assert ahead.fetched == 0
    AROUND.off = False
    data = Numbers()
    assert batches(data) == plain
    assert ahead.fetched == 3  # all but the first two, which show if numbers are drawn
    assert any("trainfit-ahead" in name for name in data.threads)
    assert fetch_ahead() is ahead


def test_it_can_be_switched_in_the_middle_of_an_epoch(ahead: BatchesAhead) -> None:
    loader = DataLoader(Numbers(), 2)
    found = []
    for number, batch in enumerate(loader):
        found += batch.tolist()
        AROUND.off = number % 3 == 0
    assert found == list(range(23))


def test_an_iterator_that_ended_stays_ended(ahead: BatchesAhead) -> None:
    ended = iter(DataLoader(Numbers(), 23))
    next(ended)
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(ended)


def test_errors_come_from_the_script_s_own_thread(ahead: BatchesAhead) -> None:
    class Broken(Numbers):
        def __getitem__(self, at: int) -> int:
            if at == 11:
                raise KeyError(threading.current_thread().name)
            return at

    loader = iter(DataLoader(Broken(), 4))
    assert [next(loader).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(KeyError, match=threading.current_thread().name):
        next(loader)


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(),
    "random": random.random,
    "numpy": numpy.random.rand,
}


@pytest.mark.parametrize("place", ["dataset", "collator", "sampler"])
@pytest.mark.parametrize("kind", list(DRAWS))
def test_random_numbers_are_drawn_in_the_script_s_order(
    kind: str, place: str, ahead: BatchesAhead
) -> None:
    """The loop draws between batches, as an evaluation with the same collator does."""
    draw = DRAWS[kind]

    class Noisy(Numbers):
        def __getitem__(self, at: int) -> Any:
            return at + draw() if place == "dataset" else at

    class Order(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for at in range(23):
                yield (at + int(draw() * 9)) % 23 if place == "sampler" else at

    def collate(items: list[Any]) -> list[Any]:
        return [item + draw() if place == "collator" else item for item in items]

    found = []
    for off in (True, False):
        AROUND.off = off
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        loader = DataLoader(Noisy(), 4, sampler=Order(), collate_fn=collate)
        found.append([(batch, draw()) for _ in range(2) for batch in loader])
    assert found[0] == found[1]
    assert ahead.fetched == 0


def test_the_thread_has_the_gpu_of_the_script(
    ahead: BatchesAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        used.append((index, threading.current_thread().name))
        yield

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", device)
    assert len(list(DataLoader(Numbers(), 4))) == 6
    assert ahead.fetched == 4
    assert [index for index, _ in used] == [3] * 4
    assert all("trainfit-ahead" in name for _, name in used)


def test_what_is_bound_to_a_thread_is_fetched_in_it(ahead: BatchesAhead) -> None:
    table = sqlite3.connect(":memory:")

    class Rows(Numbers):
        def __getitem__(self, at: int) -> int:
            [value] = table.execute("select ?", (at,)).fetchone()
            return int(value)

    assert [n for batch in DataLoader(Rows(), 4) for n in batch.tolist()] == list(range(23))
    assert ahead.failed


def test_streams_and_default_devices_are_left_alone(ahead: BatchesAhead) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(6))

    assert [n for batch in DataLoader(Stream(), 4) for n in batch.tolist()] == list(range(6))
    begun = iter(DataLoader(Numbers(), 8))
    with torch.device("meta"):
        assert next(begun).device.type == "meta"
    assert ahead.fetched == 0


class Learnt(Dataset[Any]):
    """Rows that a model of the script makes."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(2, 2)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> Any:
        return self.layer(torch.full((2,), float(at)))


def test_batches_that_a_model_makes_have_gradients_where_the_script_takes_them(
    ahead: BatchesAhead,
) -> None:
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            found = [batch.requires_grad for batch in DataLoader(Learnt(), 2)]
        assert found == [gradients] * 6
    assert ahead.fetched == 8


FORKED = """
import os, torch
from torch.utils.data import DataLoader
from trainfit.integrations.host_batches import fetch_ahead

torch.set_num_threads(1)
ahead, numbers = fetch_ahead(), list(range(23))
begun = iter(DataLoader(numbers, 2))
whole = list(DataLoader(numbers, 2))
first = [next(begun) for _ in range(4)]  # one more is being fetched
assert ahead.fetched
if (child := os.fork()) == 0:
    found = list(DataLoader(numbers, 2)), first + list(begun)
    same = all(torch.equal(torch.cat(one), torch.cat(whole)) for one in found)
    os._exit(0 if same else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_process_that_is_forked_off_fetches_by_itself() -> None:
    command = ["timeout", "60", sys.executable, "-c", FORKED]  # ends the child too
    subprocess.run(command, check=True, timeout=80)
