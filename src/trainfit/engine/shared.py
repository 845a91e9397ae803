"""Parts that the folds of a job share: one model, optimizer, compiled code and captured steps.

A fold begins with exactly the state that it would have in a process of its own: its model is built
from its seed, and the weights are copied into the memory of the shared model, which compiled code
and captured steps know.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from trainfit.core.records import TrainTask
from trainfit.data.batches import StepLoader
from trainfit.engine.loop_settings import LoopSettings
from trainfit.engine.optimizer import host_moments, is_adamw
from trainfit.engine.recovery import Buffers, Parts
from trainfit.engine.saved_state import frozen_checksum


@dataclass
class Shared:
    """Parts of the last fold, for the next one; only a run on one device shares them."""

    parts: Parts | None = None
    profiled: bool = False
    """A step was profiled for the receipt; later folds run the same code."""
    frozen: Future[str | None] = field(default_factory=Future)
    """Checksum of the frozen weights."""
    best: Mapping[str, Tensor] | None = None
    """Trained weights of the fold's best evaluation, in host memory; None where they are not."""
    host: dict[str, Tensor] = field(default_factory=dict)
    """Pinned memory that checkpoints are copied to before they are written."""
    best_host: dict[str, Tensor] = field(default_factory=dict)
    """Pinned memory of `best`."""
    sources: dict[str, Tensor] = field(default_factory=dict)
    """Frozen weights as they were built, in the host's memory: the device has the same."""

    def remember(self, model: nn.Module) -> None:
        """Remember the frozen weights of a model that is about to be moved to a device."""
        named = model.named_parameters()
        frozen = {name: p.detach() for name, p in named if not p.requires_grad}
        self.sources = {name: tensor for name, tensor in frozen.items() if tensor.is_cpu}


def take_over(
    shared: Shared, task: TrainTask, settings: LoopSettings, model: nn.Module
) -> Parts | None:
    """Give the shared parts the initial state of a new fold; None where they do not suit it."""
    before, shared.best = shared.parts, None
    if before is None or not _suits(before, settings, model):
        shared.parts, shared.profiled = None, False
        return None
    before.model.train()
    if _copy(model, before.model, shared.sources):
        shared.frozen = frozen_checksum(before.model)
    if (host := host_moments(before.optimizer)) is not None:
        host.settle()
    for state in before.optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    if before.scale is not None:
        before.scale.reset()
    return replace(
        before,
        task=task,
        settings=settings,
        buffers=Buffers(before.model),
        loader=StepLoader(task, settings.loader, before.device),
    )


def _suits(before: Parts, settings: LoopSettings, model: nn.Module) -> bool:
    alone = before.whole and before.indivisible is None
    same = _of_parts(before.settings) == _of_parts(settings)
    return (
        alone
        and same
        and is_adamw(before.optimizer)
        and type(model) is type(before.model)
        and _tensors(model) == _tensors(before.model)
    )


def _of_parts(settings: LoopSettings) -> tuple[object, ...]:
    """Settings that are built into the parts; others may differ from fold to fold."""
    names = (
        *("device", "precision", "optimizer", "sharding"),
        *("compile", "compile_mode", "compile_scope", "cuda_graph"),
    )
    return *(getattr(settings, name) for name in names), type(settings.cuts[0])


def _tensors(model: nn.Module) -> list[tuple[object, ...]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, t.shape, t.dtype, t.requires_grad) for name, t in named]


@torch.no_grad()
def _copy(new: nn.Module, old: nn.Module, sources: Mapping[str, Tensor]) -> bool:
    """Copy all weights and buffers; returns True where a frozen weight changed.

    Frozen weights in the memory of `sources` are there already.
    """
    changed = False
    for (name, source), (_, target) in zip(
        [*new.named_parameters(), *new.named_buffers()],
        [*old.named_parameters(), *old.named_buffers()],
        strict=True,
    ):
        frozen = isinstance(target, nn.Parameter) and not target.requires_grad
        if frozen and name in sources and source.data_ptr() == sources[name].data_ptr():
            continue
        there = source.to(target.device, non_blocking=True)
        if frozen and torch.equal(there, target):
            continue
        changed = changed or frozen
        target.copy_(there)
    return changed
