"""The GPT's step for the planner: the engine's own, on tensors without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainfit.engine.optimizer import build_optimizer
from trainfit.engine.precision import loss_scale
from trainfit.engine.settings import OptimizerSettings
from trainfit.engine.step import plain_step
from trainfit.planning.compiled import simulate
from trainfit.records import Precision
from trainfit.runtime import compile_blocks, repeated_blocks
from trainfit.tasks.gpt.model import build_gpt


def probe(
    *,
    name: str,
    rows: int,
    width: int,
    micro_batches: int,
    precision: Precision,
    checkpointing: Any,
    optimizer: Any = "adamw_fused",
    depth: int | None = None,
    device: str = "cpu",
    compile: bool = False,
    loss_chunk: int | None = None,
    slots: None = None,
    lengths: None = None,
    **sizes: Any,
) -> tuple[nn.Module, Callable[[nn.Module], Callable[[], object]]]:
    """The model and its step on blocks of `width` tokens, which are never packed.

    `sizes` are those of the model that are not the catalogue's.
    """
    assert slots is None
    assert lengths is None
    changed = sizes | {"block_size": width} | ({} if depth is None else {"n_layer": depth})
    model = build_gpt(name, checkpointing=checkpointing, loss_chunk=loss_chunk, **changed)

    def make_step(built: nn.Module) -> Callable[[], object]:
        made = build_optimizer(built, OptimizerSettings(kind=optimizer, learning_rate=1e-5))
        scale = loss_scale(precision, device)
        if compile and device == "cpu":
            simulate(repeated_blocks(built))
        elif compile:
            compile_blocks(built)
        ids = torch.full((rows, width), 5)
        batch = {"input_ids": ids, "targets": ids}
        return lambda: plain_step(
            built,
            made,
            lambda model, batch: model(**batch),
            [batch] * micro_batches,
            float(rows * width),
            device_type=device,
            precision=precision,
            max_grad_norm=1.0,
            scale=scale,
        )

    return model, make_step
