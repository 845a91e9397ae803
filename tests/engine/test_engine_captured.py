"""When a step is captured, without a GPU: a stand-in for torch's graph counts replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainfit.engine import captured, recovery
from trainfit.engine.captured import CapturedSteps, StepNumbers
from trainfit.measuring.profiled_step import is_due


class Replayed:
    """A graph that sums the first tensor of its fixed batches."""

    def __init__(self, batches: Any, weight: Tensor) -> None:
        self.batches, self.weight, self.numbers = batches, weight, None

    def replay(self, batches: Any, weight: float) -> StepNumbers:
        loss = torch.stack([batch["ids"].sum() for batch in batches]).sum() / weight
        return StepNumbers(loss, loss)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> CapturedSteps:
    class Generator:
        def clone_state(self) -> None: ...
        def graphsafe_set_state(self, _state: None) -> None: ...

    monkeypatch.setattr(torch.cuda, "default_generators", [Generator()])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 7)
    monkeypatch.setattr(captured, "give_back_memory", lambda: None)
    return CapturedSteps(torch.device("cuda", 0), obstacle=None)


def batch(rows: int, longest: int = 4) -> dict[str, Any]:
    return {"ids": torch.ones(rows, 4), "max_seqlen": longest}


def test_the_second_step_of_a_shape_is_captured(
    steps: CapturedSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def capture(_self: Any, _work: Any, batches: Any) -> Any:
        made.append(len(batches))
        return Replayed(batches, torch.ones(()))

    monkeypatch.setattr(CapturedSteps, "_captured", capture)
    one, other = [batch(2)], [batch(2), batch(2)]
    assert steps.take(lambda *_: None, one, 1.0) is None  # type: ignore[arg-type,return-value]
    found = [steps.take(lambda *_: None, one, weight) for weight in (1.0, 2.0)]  # type: ignore[arg-type,return-value]
    assert [float(numbers.loss) for numbers in found if numbers] == [8.0, 4.0]
    assert made == [1]
    # Another number of micro-batches, another width or another constant is another graph.
    for shape in (other, [batch(3)], [batch(2, longest=9)]):
        assert steps.take(lambda *_: None, shape, 1.0) is None  # type: ignore[arg-type,return-value]
        assert steps.take(lambda *_: None, shape, 1.0) is not None  # type: ignore[arg-type,return-value]
    assert made == [1, 2, 1, 1]
    assert steps.peak == 7
    assert len(steps.take_news()) == 4
    assert not steps.take_news()


def test_a_profiled_step_is_one_that_is_replayed_also_among_the_most_shapes(
    steps: CapturedSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the receipt of a run in graphs would say that there were none."""
    monkeypatch.setattr(captured, "_MOST", 2)
    monkeypatch.setattr(
        CapturedSteps, "_captured", lambda _s, _w, batches: Replayed(batches, torch.ones(()))
    )
    work: Any = None
    assert not steps.replays([batch(1)])
    for rows in (1, 2, 3):
        assert steps.take(work, [batch(rows)], 1.0) is None
        assert steps.replays([batch(rows)]) == (rows < 3)  # a third graph would be one too many
        steps.take(work, [batch(rows)], 1.0)
    with steps.renewed():  # captured anew, in the place of its graph
        assert steps.take(work, [batch(2)], 1.0) is not None
        assert steps.take(work, [batch(3)], 1.0) is None
    assert CapturedSteps().replays([batch(9)])  # nothing is captured: all steps run alike


def test_a_step_that_runs_unlike_most_is_profiled_only_where_no_other_came() -> None:
    assert is_due(10, 100, 8, 8)
    assert not is_due(10, 100, 8, 8, usual=False)
    assert is_due(40, 100, 8, 8, usual=False)
    assert not is_due(40, 100, 7, 8, usual=False)
    assert not is_due(2, 4, 8, 8, usual=False)
    assert is_due(3, 4, 8, 8, usual=False)  # the last chance of a short run


@pytest.mark.parametrize(
    ("error", "word"),
    [(torch.OutOfMemoryError("CUDA out of memory"), "memory"), (RuntimeError("no copy"), "copy")],
)
def test_a_failed_capture_is_the_last(
    steps: CapturedSteps, monkeypatch: pytest.MonkeyPatch, error: Exception, word: str
) -> None:
    def capture(*_given: Any) -> Any:
        raise error

    monkeypatch.setattr(CapturedSteps, "_captured", capture)
    for _ in range(4):
        assert steps.take(lambda *_: None, [batch(2)], 1.0) is None  # type: ignore[arg-type,return-value]
    assert word in (steps.obstacle or "")
    assert len(steps.take_news()) == 1
    assert not steps.held


def test_a_capture_that_breaks_off_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    parts = SimpleNamespace(optimizer=torch.optim.SGD([weight], lr=0.1))

    def broken(*_given: Any) -> Tensor:
        weight.sum().backward()
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(recovery, "_accumulate", broken)
    with pytest.raises(RuntimeError, match="capturing"):
        recovery._whole_step(parts, [], torch.ones(()))  # type: ignore[arg-type]
    assert weight.grad is None


def test_a_capture_is_made_on_the_gpu_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps one stream for captures, of the GPU that was current at the first one."""
    current, made = [0], []

    @contextmanager
    def device(where: torch.device) -> Iterator[None]:
        before, current[0] = current[0], current[0] if where.index is None else where.index
        yield
        current[0] = before

    def graph(_graph: Any, *, stream: Any, **_rest: Any) -> Any:
        made.append((current[0], stream))
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: f"stream of {index}")
    monkeypatch.setattr(torch.cuda, "graph", graph)
    captured._capture_stream.cache_clear()
    for where in ("cuda:0", "cuda:1", "cuda"):
        with captured.capturing(None, None, torch.device(where)):  # type: ignore[arg-type]
            pass
    captured._capture_stream.cache_clear()
    assert made == [(0, "stream of 0"), (1, "stream of 1"), (0, "stream of 0")]
    assert current == [0]
