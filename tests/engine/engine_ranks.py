"""Several ranks on this machine, each a process of its own, and none may hang."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from engine_toy import Toy, ToyTask, settings
from torch import Tensor, nn

from trainfit.engine.loop import train

PATIENCE = 60


def on_ranks(
    children: ForkServerContext,
    count: int,
    work: Callable[..., None],
    *args: Any,
    env: dict[str, str] | None = None,
) -> list[int]:
    """Run `work(rank, *args)` on each; the exit codes, in time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        children.Process(target=_as_rank, args=(rank, count, port, env or {}, work, args))
        for rank in range(count)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE)
    hung = [process for process in ranks if process.exitcode is None]
    for process in hung:
        process.kill()
    assert not hung, "a rank hangs"
    return [int(process.exitcode or 0) for process in ranks]


def launched(
    children: ForkServerContext, restarts: int, work: Callable[..., None], *args: Any
) -> list[int]:
    """Two ranks as torchrun has them: started again, all of them, as long as one fails."""
    codes: list[int] = []
    for start in range(restarts + 1):
        env = {
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_MAX_RESTARTS": str(restarts),
            "TORCHELASTIC_RESTART_COUNT": str(start),
        }
        codes = on_ranks(children, 2, work, *args, env=env)
        if not any(codes):
            break
    return codes


def _as_rank(
    rank: int,
    count: int,
    port: int,
    env: dict[str, str],
    work: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    os.environ |= env | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    work(rank, *args)


class Block(nn.Linear):
    """A block of the deep toy."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(super().forward(hidden))


class Deep(Toy):
    """The toy with blocks, of which each is gathered by itself, and an output tied to its input."""

    def __init__(self, dropout: float, norm: bool) -> None:
        super().__init__(dropout, norm)
        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(3))
        self.tied = nn.Linear(8, 50, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, ids: Tensor, segments: Tensor, count: int) -> Tensor:
        logits = super().forward(ids, segments, count)
        hidden = self.embedding(ids.flatten())
        for block in self.blocks:
            hidden = block(hidden)
        scores = torch.tanh(self.tied(hidden)).mean(-1, keepdim=True)
        added = logits.new_zeros(count + 1, 1).index_add(0, segments.flatten(), scores)
        return logits + added[:count] * torch.arange(logits.shape[1])


@dataclass
class DeepTask(ToyTask):
    """The toy task on the deep toy, in double precision if so wished."""

    def build_model(self) -> nn.Module:
        model = Deep(self.dropout, self.norm).to(self.dtype)
        if self.frozen:
            model.blocks[1].requires_grad_(False)
        return model


def train_deep(
    rank: int, run: Path, task: dict[str, Any], options: dict[str, Any], resume: bool = False
) -> None:
    deep = DeepTask(**task)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    train(deep, settings(deep, ranks=ranks, **options), run, resume=resume)
