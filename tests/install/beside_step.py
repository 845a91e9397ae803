"""A script of a user, and the step in it as `trainfit.estimate` takes it."""

from collections.abc import Callable
from typing import Any

import torch


def build(batch: int = 4) -> tuple[torch.nn.Module, Callable[[Any], Any]]:
    model = torch.nn.Linear(64, 64)

    def make_step(model: torch.nn.Module) -> Callable[[], None]:
        optimizer, x = torch.optim.AdamW(model.parameters(), fused=True), torch.zeros(batch, 64)

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return model, make_step


if __name__ == "__main__":
    made, make = build()
    one = make(made)
    for _ in range(8):
        one()
