"""From a configuration and a plan to what the engine's loop and the model are told."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainfit.conf import NliConfig, TextclassConfig
from trainfit.engine.opening import opening_lines
from trainfit.engine.recovery import Parts
from trainfit.engine.settings import (
    LoaderSettings,
    LoopSettings,
    OptimizerSettings,
    ScheduleSettings,
)
from trainfit.packing import PackedCut, ladder
from trainfit.records import Plan
from trainfit.tasks.encoder.backbone import Traits, packed_obstacle
from trainfit.tasks.encoder.classifier import EncoderClassifier
from trainfit.tasks.encoder.frozen import Head

METRIC = "f1"
"""Of the positive class, on the validation part: what the best checkpoint is chosen by."""
_SLACK = 1.02
"""The plan's budget was fitted to one fold's lengths, and another fold's differ by so much."""


def model_decisions(plan: Plan) -> dict[str, Any]:
    """The fields of ClassifierSettings that the plan decides."""
    decided: dict[str, Any] = {
        "method": plan.workload.method,
        "checkpointing": plan.gradient_checkpointing,
        "dtype": plan.weights_dtype,
        "liger": plan.liger,
    }
    if plan.packed:  # variable-length kernels have none
        decided["attention_dropout"] = 0.0
    else:  # nor does an evaluation take them
        decided["attention"] = "masked"
    return decided


def loop_settings(
    config: NliConfig | TextclassConfig,
    plan: Plan,
    lengths: NDArray[np.int64],
    *,
    device: str,
    ranks: int,
    seed: int,
) -> LoopSettings:
    """The settings of one fold, whose training sequences have these lengths."""
    training = config.training
    return LoopSettings(
        epochs=training.num_epochs,
        max_steps=training.max_steps,
        seed=seed,
        device=device,
        precision=plan.precision,
        cuts=ladder(
            lengths,
            plan.effective_batch_size,
            _cap(config, plan, int(lengths.max())),
            padded=not plan.packed,
            ranks=ranks,
            seed=seed,
            at_least=plan.gradient_accumulation_steps,
            at_most=plan.gradient_accumulation_steps,
        ),
        optimizer=OptimizerSettings(
            kind=plan.optimizer,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            max_grad_norm=training.max_grad_norm,
        ),
        schedule=ScheduleSettings(
            kind=training.scheduler,
            warmup_ratio=training.warmup_ratio,
            warmup_steps=training.warmup_steps,
        ),
        loader=LoaderSettings(
            num_workers=plan.num_workers,
            pin_memory=plan.pin_memory,
            persistent_workers=plan.persistent_workers,
            prefetch_factor=plan.prefetch_factor,
        ),
        compile=plan.compile,
        compile_mode=plan.compile_mode,
        sharding=plan.sharding,
        eval_steps=training.eval_steps,
        eval_batch_size=plan.eval_batch_size,
        metric=METRIC,
        early_stopping_patience=training.early_stopping_patience,
        logging_steps=training.logging_steps,
        checkpoint_steps=training.checkpoint_steps,
        keep_checkpoints=training.keep_checkpoints,
        nonfinite=training.nonfinite,
        profile_step=training.profile_step,
    )


def opening(parts: Parts) -> list[str]:
    """The engine's first lines, with the attention that the model will really take."""
    return opening_lines(parts, _attention(parts))


def _attention(parts: Parts) -> str | None:
    model = parts.model
    if isinstance(model, Head):
        return "Frozen encoder: its outputs were computed once, and only the head is trained"
    if not isinstance(model, EncoderClassifier):
        return None
    if not isinstance(parts.settings.cuts[0], PackedCut):
        return _on_padded_rows(model.traits)
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    precision = halves.get(parts.settings.precision)
    return _on_packed_rows(model.traits, packed_obstacle(model.encoder, model.traits, precision))


def _on_padded_rows(traits: Traits) -> str | None:
    """Name the attention where it does not go through SDPA."""
    rows = "on padded rows of like length"
    if traits.own_attention:
        return f"Attention: the model's own, {rows}"
    capped = "Attention: soft-capped logits, which SDPA has no kernel for, by plain products"
    return None if traits.softcap is None else f"{capped}, {rows}"


def _on_packed_rows(traits: Traits, obstacle: str | None) -> str:
    """Name the kernel that attends within packed rows, or why it is a mask."""
    rows = f"packed rows, attention dropout {traits.attention_dropout:g}"
    if obstacle is not None:
        return f"Attention: a mask on {rows} ({obstacle})"
    if traits.own_attention:
        return f"Attention: trainfit's Triton kernel for disentangled attention on {rows}"
    if traits.softcap is not None:
        return f"Attention: trainfit's Triton kernel for soft-capped logits on {rows}"
    return f"SDPA Flash Attention backend enabled (its variable-length kernel on {rows})"


def _cap(config: NliConfig | TextclassConfig, plan: Plan, longest: int) -> int:
    """The most tokens of a micro-batch: what was planned, and never over what was asked for.

    Where both batch_size and gradient_accumulation_steps are set, another fold keeps to both.
    """
    asked = plan.batch_size * config.data.max_length
    by_hand = (config.training.batch_size, config.optimization.gradient_accumulation_steps)
    if "auto" not in by_hand:
        return max(longest, asked)
    return max(longest, min(asked, math.ceil(plan.micro_batch_tokens * _SLACK)))
