"""Activations that wait on the host: the same bits, less memory, one copy for each storage."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainfit.kernels import saved_on_host
from trainfit.kernels.saved_on_host import HostCopy, SavedOnHost


class OnTheSame(SavedOnHost):
    """Plays host and GPU on the CPU, and writes down what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.out: list[int] = []
        self.back: list[int] = []
        self.waited: list[Any] = []

    def takes(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def copy_out(self, storage: torch.UntypedStorage, device: torch.device) -> tuple[Any, Any]:
        self.out.append(storage.nbytes())
        source = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        return source.clone(), f"out {len(self.out) - 1}"

    def copy_back(self, copy: HostCopy) -> tuple[Tensor, Any]:
        self.back.append(copy.place)
        return copy.host.clone(), f"back {copy.place}"

    def wait(self, event: Any) -> None:
        self.waited.append(event)


class Block(nn.Module):
    """A linear layer whose input others save too, a view, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = functional.gelu(self.wide(hidden))
        inner = functional.dropout(inner.unflatten(-1, (2, 48)).softmax(-1).flatten(-2), 0.2)
        return hidden + self.narrow(inner)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_on_host, "SMALLEST", 1 << 12)
    monkeypatch.setattr(saved_on_host, "ON_THE_WAY", 1 << 16)


def run(saved: OnTheSame | None, *, again: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(4))
    inputs = torch.randn(8, 16, 64, requires_grad=True)
    torch.manual_seed(1)

    def loss() -> Tensor:
        hidden: Tensor = inputs
        with torch.autocast("cpu", torch.bfloat16):
            for block in blocks:
                hidden = checkpoint(block, hidden, use_reentrant=False) if again else block(hidden)
        return hidden.float().square().sum()

    if saved is None:
        total = loss()
    else:
        with saved.saving():
            total = loss()
    total.backward()
    return [total.detach(), inputs.grad, *(p.grad for p in blocks.parameters())]


@pytest.mark.parametrize("again", [False, True])
def test_the_gradients_are_the_same_bits(again: bool) -> None:
    saved = OnTheSame()
    for found, sure in zip(run(saved, again=again), run(None, again=again), strict=True):
        assert torch.equal(found, sure)
    assert len(saved.back) == len(saved.out) > 3


def test_weights_and_small_tensors_stay() -> None:
    saved = OnTheSame()
    layer = nn.Linear(64, 64)
    bias = torch.randn(16, requires_grad=True)
    with saved.saving(), torch.autocast("cpu", torch.bfloat16):
        out = functional.gelu(layer(torch.randn(1, 64, requires_grad=True)))
        total = out.sum() + (bias * bias).sum()
    total.backward()
    assert saved.out == []


def test_a_storage_is_copied_once_and_let_go() -> None:
    saved = OnTheSame()
    first = torch.randn(64, 64, requires_grad=True)
    with saved.saving():
        hidden = first * 2
        watched = StorageWeakRef(hidden.untyped_storage())
        total = (hidden.exp() + hidden.t() @ hidden + hidden.sin()).sum()
        del hidden
    gc.collect()
    assert watched.expired()
    # exp saves its result; hidden, its transpose and its sine's input are one storage.
    assert len(saved.out) == 2
    total.backward()
    hidden = (first.detach() * 2).requires_grad_()
    (hidden.exp() + hidden.t() @ hidden + hidden.sin()).sum().backward()
    assert first.grad is not None
    assert hidden.grad is not None
    torch.testing.assert_close(first.grad, 2 * hidden.grad)


def test_copies_come_back_ahead_in_the_reverse_order() -> None:
    saved = OnTheSame()
    hidden = first = torch.randn(64, 64, requires_grad=True)
    with saved.saving():
        for _ in range(20):
            hidden = hidden.sin()
    hidden.sum().backward()
    assert first.grad is not None
    assert saved.back == sorted(saved.back, reverse=True)
    before = saved.waited.index("back 18")
    started = saved.back[: saved.back.index(18) + 1]
    assert before > 0
    assert len(started) <= 3
    # 64 KiB are four copies of 16: so many leave at a time before the first is waited for.
    assert saved.waited[:2] == ["out 0", "out 1"]
