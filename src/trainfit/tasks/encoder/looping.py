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
from trainfit.tasks.encoder.backbone import packed_obstacle
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
    traits = model.traits
    packed = isinstance(parts.settings.cuts[0], PackedCut)
    if not packed:
        own = "The model's own attention, on padded rows of like length"
        return own if traits.own_attention else None
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    reason = packed_obstacle(model.encoder, traits, halves.get(parts.settings.precision))
    kernel = "variable-length Flash Attention"
    if traits.own_attention:
        kernel = "trainfit's kernel for disentangled attention"
    means = kernel if reason is None else f"a mask ({reason})"
    return f"Packed rows with {means}, attention dropout {traits.attention_dropout:g}"


def _cap(config: NliConfig | TextclassConfig, plan: Plan, longest: int) -> int:
    """The most tokens of a micro-batch: what was planned, and never over what was asked for.

    Where both batch_size and gradient_accumulation_steps are set, another fold keeps to both.
    """
    asked = plan.batch_size * config.data.max_length
    by_hand = (config.training.batch_size, config.optimization.gradient_accumulation_steps)
    if "auto" not in by_hand:
        return max(longest, asked)
    return max(longest, min(asked, math.ceil(plan.micro_batch_tokens * _SLACK)))
