"""Small training steps, and the receipt of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfit.core.records import ReceiptItem, Scalar
from trainfit.measuring.profiled_step import profiled
from trainfit.measuring.receipt import make_receipt
from trainfit.measuring.trace import Evidence


class Block(nn.Module):
    """Attention and a product, with a hole for whatever a test wants in between."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.between(functional.gelu(self.first(x))))


class Model(nn.Module):
    def __init__(self, blocks: int = 2, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(between) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    micro_batches: int = 1,
    set_to_none: bool = True,
    clip: bool = False,
    device: str = "cpu",
) -> None:
    """One optimizer step."""
    for _ in range(micro_batches):
        model(torch.randn(4, 16, device=device)).square().mean().backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)


def evidence(step: Callable[[], Any], given: list[Any] | None = None, warm_up: int = 2) -> Evidence:
    """What the step shows after a warm-up."""
    for _ in range(warm_up):
        step()
    with profiled(warm_up, given or []) as look:
        step()
    assert look.evidence is not None, look.obstacle
    return look.evidence


def items(seen: Evidence, **wanted: Scalar) -> Mapping[str, ReceiptItem]:
    return {item.name: item for item in make_receipt("test", seen, wanted).items}
