"""Bytes that ranks send in a step, counted where torch hands them to the process group."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_children import context
from engine_ranks import on_ranks
from engine_toy import Toy, ToyTask, settings
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.engine import loop
from trainfit.engine.loop import train
from trainfit.planning.sharding import ModelBytes, sent_between, sent_inside, shards_of
from trainfit.runtime.compile import repeated_blocks


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4096), nn.Linear(4096, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Wide(Toy):
    """The toy with blocks and a table that are large enough for votes not to count."""

    def __init__(self) -> None:
        super().__init__(0.0, False)
        self.table = nn.Embedding(20_000, 8)
        self.blocks = nn.ModuleList(WideBlock() for _ in range(6))

    def forward(self, ids: Tensor, segments: Tensor, count: int) -> Tensor:
        logits = super().forward(ids, segments, count)
        hidden = self.table(ids.flatten())
        for block in self.blocks:
            hidden = block(hidden)
        added = logits.new_zeros(count + 1, 1).index_add(
            0, segments.flatten(), torch.tanh(hidden).mean(-1, keepdim=True)
        )
        return logits + added[:count]


@dataclass
class WideTask(ToyTask):
    def build_model(self) -> nn.Module:
        return Wide()


class Counter(TorchDispatchMode):
    """Adds up what collectives send, as rings do, by their tensors and groups alone."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.sent += self._sent(func._schema.name, args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Any) -> float:
        times, tensors, group = {
            "c10d::allreduce_": (2, 0, 1),
            "c10d::_allgather_base_": (1, 0, 2),
            "c10d::_reduce_scatter_base_": (1, 1, 2),
            "c10d::allgather_": (1, 0, 2),
        }[name]
        ranks = ProcessGroup.unbox(args[group]).size()
        flat = torch.utils._pytree.tree_leaves(args[tensors])
        size = sum(tensor.numel() * tensor.element_size() for tensor in flat)
        return times * (ranks - 1) / ranks * size


def count_on(rank: int, folder: Path, options: dict[str, Any], rung: int) -> None:
    task = WideTask(dropout=0.0)
    import os

    chosen = settings(task, ranks=int(os.environ["WORLD_SIZE"]), **options)
    chosen = replace(chosen, cuts=chosen.cuts[rung:], max_steps=3, profile_step=False)
    counts: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("take_step", "take_sharded_step"):
            really = getattr(loop, name)

            def counted(*args: Any, really: Any = really, **more: Any) -> Any:
                with Counter() as counter:
                    taken = really(*args, **more)
                counts.append(counter.sent)
                return taken

            patch.setattr(loop, name, counted)
        train(task, chosen, folder / "run")
    assert len(counts) == 3
    found = {"sent": counts[-1], "micro_batches": chosen.cuts[0].micro_batches}
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def children() -> ForkServerContext:
    return context()


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("sharding", "dtype", "rung"),
    [(kind, *more) for kind in ("none", "fsdp", "hybrid") for more in (("fp32", 0), ("bf16", 1))],
)
def test_ranks_send_what_the_formula_says(
    tmp_path: Path, children: ForkServerContext, ranks: int, sharding: Any, dtype: str, rung: int
) -> None:
    options = {"sharding": sharding, "reduce_dtype": dtype}
    env = {"LOCAL_WORLD_SIZE": str(ranks // 2)}
    ran = on_ranks(children, ranks, count_on, tmp_path, options, rung, env=env)
    assert ran == [0] * ranks
    model = Wide()
    whole = 4 * sum(p.numel() for p in model.parameters())
    blocks = 4 * sum(p.numel() for block in repeated_blocks(model) for p in block.parameters())
    sums = whole / (2 if dtype == "bf16" else 1)
    bytes_ = ModelBytes(blocks=blocks, rest=whole - blocks, gradients=sums)
    shards = shards_of(sharding, ranks, 2)
    for rank in range(ranks):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        expected = sent_inside(bytes_, sharding, shards, found["micro_batches"])
        expected += sent_between(bytes_, shards, ranks)
        assert found["sent"] == pytest.approx(expected, rel=0.02), found
