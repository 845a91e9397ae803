import math
import time
from collections import namedtuple
from collections.abc import Iterator

import pytest
import torch

from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.measuring import benchmark_dataloader, time_loader


class Slow:
    """A loader that takes its time, more for the first batch, as starting workers does."""

    def __init__(self, batches: int, wait: float, first: float = 0.0):
        self.batches, self.wait, self.first, self.given = batches, wait, first, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        time.sleep(self.first)
        for _ in range(self.batches):
            time.sleep(self.wait)
            self.given += 1
            yield torch.ones(4)


def test_waiting_for_the_loader_is_told_from_computing():
    timing = time_loader(Slow(6, 0.02, first=0.2), 5, step=lambda batch: time.sleep(0.06))
    assert timing is not None
    assert timing.batches == 5
    assert 0.02 <= timing.fetch < 0.05
    assert 0.06 <= timing.compute < 0.12
    assert timing.copy < 0.02
    assert 0.1 < timing.wait_share < 0.5
    assert timing.first_batch >= 0.22  # and it is not in the means


def test_no_more_batches_are_drawn_than_asked():
    loader = Slow(50, 0.0)
    time_loader(loader, 3)
    assert loader.given == 4  # the warm-up batch too


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_short_loader_is_timed_for_what_it_has(length: int):
    timing = time_loader(Slow(length, 0.001), 10)
    assert timing is not None
    assert timing.batches == max(1, length - 1)


def test_an_empty_loader_is_a_warning_and_no_division_by_zero():
    assert time_loader([], 10) is None
    with pytest.warns(TrainfitWarning, match="empty"):
        seconds = benchmark_dataloader([], num_batches=10)
    assert math.isnan(seconds)
    assert math.isnan(1 / seconds)  # the guide's own next line does not crash


def test_the_guides_function_returns_seconds_per_batch(capsys: pytest.CaptureFixture[str]):
    seconds = benchmark_dataloader(Slow(4, 0.02), num_batches=3)
    assert 0.02 <= seconds < 0.06
    out = capsys.readouterr().out
    assert "Fetch: " in out
    assert "Copy to device: " in out


def test_batches_in_any_container_are_moved():
    pair = namedtuple("pair", "x y")
    seen: list[object] = []
    x = torch.ones(2)
    batch = {"a": x, "b": [x, (x, "text")], "c": pair(x, 3)}
    time_loader([batch, batch], 1, step=seen.append, device="meta")
    moved = seen[-1]
    assert isinstance(moved, dict)
    assert moved["a"].device.type == "meta"
    assert moved["b"][1][0].device.type == "meta"
    assert moved["b"][1][1] == "text"
    assert moved["c"].x.device.type == "meta"


def test_a_count_below_one_is_refused():
    with pytest.raises(BadInput, match="num_batches is 0"):
        time_loader([1], 0)


def test_a_real_loader_with_a_worker():
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=1)
    timing = time_loader(loader, 4)
    assert timing is not None
    assert timing.batches == 4
