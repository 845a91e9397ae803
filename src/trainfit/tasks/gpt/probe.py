"""The GPT's step for the planner: the engine's own, on tensors without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from trainfit.engine.optimizer import build_optimizer
from trainfit.engine.precision import loss_scale
from trainfit.engine.settings import OptimizerSettings
from trainfit.engine.step import plain_step
from trainfit.planning.compiled import simulate
from trainfit.records import Precision
from trainfit.runtime import compile_model
from trainfit.tasks.gpt.model import build_gpt
from trainfit.tasks.gpt.planning import stream_is_half


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
    half_stream: bool | Literal["auto"] = False,
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
    model = build_gpt(
        name,
        checkpointing=checkpointing,
        loss_chunk=loss_chunk,
        half_stream=stream_is_half(half_stream, precision),
        **changed,
    )

    def make_step(built: nn.Module) -> Callable[[], object]:
        made = build_optimizer(built, OptimizerSettings(kind=optimizer, learning_rate=1e-5))
        scale = loss_scale(precision, device)
        if compile and device == "cpu":
            simulate([built])
        elif compile:
            compile_model(built)
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
