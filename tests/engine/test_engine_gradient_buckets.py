"""Buckets are summed during the backward pass, in one order, and once whatever happens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainfit.core.errors import RunFailed
from trainfit.engine import parallel
from trainfit.engine.parallel import GradientBuckets


class Done:
    """A sum over one rank."""

    def wait(self) -> None:
        return


class Spy:
    """Layers, and sums of buckets, in the order in which the backward pass meets them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        patch.setattr(parallel.dist, "all_reduce", self.all_reduce)

    def all_reduce(self, flat: Tensor, async_op: bool) -> Done:
        assert async_op
        self.seen.append(f"sum of {flat.numel()}")
        return Done()

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        for number, layer in enumerate(model):
            layer.register_full_backward_hook(lambda *_, n=number: self.seen.append(f"layer {n}"))
        return model


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def go(model: nn.Module, batches: int, buckets: GradientBuckets) -> None:
    for _ in buckets.watched(range(batches), batches):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()


def test_a_bucket_is_summed_while_earlier_layers_are_still_to_come(spy: Spy) -> None:
    model = spy.model()
    buckets = GradientBuckets(list(model.parameters()), bucket_bytes=1)
    go(model, 2, buckets)
    first, last = spy.seen[:3], spy.seen[3:]
    assert first == ["layer 2", "layer 1", "layer 0"]  # nothing before the last micro-batch
    assert last.count("sum of 16") == 3
    assert last.index("sum of 16") < last.index("layer 0")
    assert buckets.sum_rest() == (True,) * 3
    assert len(spy.seen) == 9


def test_the_gradients_are_those_without_buckets(spy: Spy) -> None:
    model, plain = spy.model(), spy.model()
    buckets = GradientBuckets(list(model.parameters()), bucket_bytes=100)
    for _ in range(2):  # steps
        model.zero_grad()
        go(model, 3, buckets)
        buckets.finish(buckets.sum_rest())
    for _ in range(3):
        plain(torch.ones(2, 4, requires_grad=True)).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_rank_that_fails_sums_zeros_for_the_rest(spy: Spy) -> None:
    model = spy.model()
    parameters = list(model.parameters())
    buckets = GradientBuckets(parameters, bucket_bytes=1)

    def fail(_gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    parameters[1].register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        go(model, 1, buckets)
    assert buckets.sum_rest() == (False, False, True)
    assert spy.seen.count("sum of 16") == 3
    buckets.drop()
    assert buckets.sum_rest() == (False,) * 3
    buckets.finish((False, True, False))
    assert [p.grad is None for p in parameters] == [True, False, True]


def test_a_gradient_after_its_sum_is_refused(spy: Spy) -> None:
    model = spy.model()
    buckets = GradientBuckets(list(model.parameters()), bucket_bytes=1)
    go(model, 1, buckets)
    with pytest.raises(RunFailed, match="use_reentrant=False"):
        go(model, 1, buckets)


def test_sums_in_bf16_come_back_in_the_dtype_of_the_weights(spy: Spy) -> None:
    model, plain = spy.model(), spy.model()
    buckets = GradientBuckets(list(model.parameters()), torch.bfloat16)
    go(model, 1, buckets)
    buckets.finish(buckets.sum_rest())
    plain(torch.ones(2, 4, requires_grad=True)).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == torch.float32
        assert torch.equal(one.grad, other.grad.bfloat16().float())
