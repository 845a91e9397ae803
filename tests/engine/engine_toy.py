"""A toy task that has everything: lengths that differ, both layouts, dropout, a running norm."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfit.engine.checkpoint import latest_good
from trainfit.engine.loop_settings import LoopSettings, OptimizerSettings, ScheduleSettings
from trainfit.engine.observers import Observer
from trainfit.packing import Cut, deal_steps
from trainfit.packing.cut_ladder import fit_padded_parts
from trainfit.packing.steps import fit_packed_parts, sample_parts

IGNORED = -100


class RunningMean(nn.Module):
    """Takes off the mean of what it has seen: a buffer that every forward pass writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(values.detach().mean(0), alpha=0.1)
        return values - self.mean


class Toy(nn.Module):
    """Mean of embeddings, dropout, two layers; `segments` say to which sequence a token belongs."""

    def __init__(self, dropout: float, norm: bool, classes: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.norm = RunningMean() if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, classes)
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor, segments: Tensor, count: int) -> Tensor:
        vectors = self.embedding(ids.flatten())
        pooled = vectors.new_zeros(count + 1, 8).index_add(0, segments.flatten(), vectors)
        sizes = torch.bincount(segments.flatten(), minlength=count + 1).clamp(min=1)
        mean = (pooled / sizes[:, None].to(pooled))[:count]
        hidden = functional.gelu(self.hidden(self.dropout(self.norm(mean))))
        return self.head(self.dropout(hidden))


@dataclass
class ToyTask:
    """Sequences of 1 to 12 tokens, a label each, from a seed."""

    sequences: int = 38
    effective_batch: int = 8
    dropout: float = 0.1
    norm: bool = False
    dtype: torch.dtype = torch.float32
    on_loss: Callable[[int, Tensor], Tensor] | None = None
    """Called with the number of losses so far, to spoil one."""
    frozen: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        sizes = torch.randint(1, 13, (self.sequences,), generator=generator).tolist()
        self.tokens = [torch.randint(0, 50, (n,), generator=generator) for n in sizes]
        self.labels = torch.randint(0, 3, (self.sequences,), generator=generator)
        self.evaluations: list[int] = []
        self.losses = 0

    def build_model(self) -> nn.Module:
        model = Toy(self.dropout, self.norm).to(self.dtype)
        if self.frozen:
            model.embedding.requires_grad_(False)
        return model

    def lengths(self) -> Sequence[int]:
        return [len(tokens) for tokens in self.tokens]

    def steps(self, epoch: int) -> Sequence[Sequence[int]]:
        return [s.tolist() for s in deal_steps(self.lengths(), self.effective_batch, 3, epoch)]

    def weight(self, sequences: Sequence[int]) -> float:
        return float(len(sequences))

    def collate(
        self, sequences: Sequence[int], rows: int, width: int, slots: int | None
    ) -> Mapping[str, Any]:
        count = rows if slots is None else slots
        ids = torch.zeros(rows, width, dtype=torch.long)
        segments = torch.full((rows, width), count)
        labels = torch.full((count,), IGNORED)
        at = 0
        for place, sequence in enumerate(sequences):
            tokens = self.tokens[sequence]
            row, start = (0, at) if slots is not None else (place, 0)
            ids[row, start : start + len(tokens)] = tokens
            segments[row, start : start + len(tokens)] = place
            labels[place] = self.labels[sequence]
            at += len(tokens)
        return {"ids": ids, "segments": segments, "labels": labels, "count": count}

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(batch["ids"], batch["segments"], batch["count"])
        loss = functional.cross_entropy(
            logits, batch["labels"], reduction="sum", ignore_index=IGNORED
        )
        self.losses += 1
        return loss if self.on_loss is None else self.on_loss(self.losses, loss)

    def evaluate(self, model: nn.Module, batch_size: int) -> dict[str, float]:
        self.evaluations.append(batch_size)
        torch.rand(3)  # an evaluation may draw; training must not notice
        total = 0.0
        for start in range(0, self.sequences, batch_size):
            chosen = range(start, min(start + batch_size, self.sequences))
            batch = self.collate(chosen, len(chosen), 12, None)
            logits = model(batch["ids"], batch["segments"], batch["count"])
            total += float(
                functional.cross_entropy(logits.float(), batch["labels"], reduction="sum")
            )
        return {"loss": total / self.sequences}


def cuts(task: ToyTask, *, padded: bool = False, ranks: int = 1) -> tuple[Cut, ...]:
    """A ladder as packing.ladder would make it, but for lengths as small as these."""
    return _cuts(tuple(task.lengths()), task.effective_batch, padded, ranks)


@cache
def _cuts(lengths: tuple[int, ...], batch: int, padded: bool, ranks: int) -> tuple[Cut, ...]:
    array = np.array(lengths)
    parts = sample_parts(array, batch, ranks)
    if padded:
        return tuple(
            fit_padded_parts(parts, max(lengths), cap, multiple=4) for cap in (96, 48, 24, 12)
        )
    return tuple(
        fit_packed_parts(parts, max(lengths), 96, multiple=4, at_least=count)
        for count in (1, 2, 4, 8)
    )


def settings(
    task: ToyTask, *, padded: bool = False, ranks: int = 1, **changes: Any
) -> LoopSettings:
    optimizer = {"learning_rate": 0.02, "weight_decay": 0.1} | changes.pop("optimizer", {})
    chosen: dict[str, Any] = {
        "epochs": 3.0,
        "seed": 5,
        "cuts": cuts(task, padded=padded, ranks=ranks),
        "optimizer": OptimizerSettings(**optimizer),
        "schedule": ScheduleSettings(kind="cosine", warmup_steps=2),
        "eval_steps": 4,
        "eval_batch_size": 16,
        "logging_steps": 3,
        "metric": "loss",
        "greater_is_better": False,
    }
    return LoopSettings(**(chosen | changes))


def final_bits(run: Path) -> str:
    """All weights and the optimizer's state at the end of a run, as one checksum."""
    folder, faults = latest_good(run)
    assert folder is not None
    assert not faults
    digest = hashlib.sha256()
    for name in ("model.safetensors", "optimizer.safetensors"):
        for key, tensor in sorted(safetensors.torch.load_file(folder / name).items()):
            bits = tensor.reshape(-1).view(torch.uint8)
            digest.update(key.encode() + np.ascontiguousarray(bits.numpy()).tobytes())
    return f"{folder.name} {digest.hexdigest()}"


def final_weights(run: Path) -> dict[str, Tensor]:
    folder, _ = latest_good(run)
    assert folder is not None
    return safetensors.torch.load_file(folder / "model.safetensors")


class Crash(Exception):
    """Not one of ours: nothing may catch it."""


class CrashAt(Observer):
    """Crashes after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: int) -> None:
        if step == self.step:
            raise Crash
