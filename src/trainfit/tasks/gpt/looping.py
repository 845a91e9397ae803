"""From a configuration and a plan to what the engine's loop and the model are told."""

from __future__ import annotations

import numpy as np

from trainfit.conf import GptConfig
from trainfit.engine.opening import opening_lines
from trainfit.engine.recovery import Parts
from trainfit.engine.settings import (
    LoaderSettings,
    LoopSettings,
    OptimizerSettings,
    ScheduleSettings,
)
from trainfit.hardware.host import check_room
from trainfit.packing import ladder
from trainfit.records import Plan
from trainfit.tasks import planned
from trainfit.tasks.gpt.model import Gpt, GptShape, gpt_shape
from trainfit.tasks.gpt.planning import stream_is_half
from trainfit.tasks.gpt.task import METRIC


def shape_of(config: GptConfig) -> GptShape:
    """The model's sizes; the vocabulary is settled, and the block size is the sequence length."""
    sizes = planned.gpt_sizes(config.model)
    for not_a_size in ("loss_chunk", "half_stream"):
        sizes.pop(not_a_size, None)
    return gpt_shape(config.model.name, block_size=config.data.max_length, **sizes)


def build(config: GptConfig, plan: Plan) -> Gpt:
    """A new model with what the plan decided."""
    shape = shape_of(config)
    check_room(4 * shape.parameters, config.model.name)
    return Gpt(
        shape,
        checkpointing=plan.gradient_checkpointing,
        loss_chunk=plan.task.arguments.get("loss_chunk"),
        half_stream=stream_is_half(config.model.half_stream, plan.precision),
    )


def loop_settings(config: GptConfig, plan: Plan, *, device: str, ranks: int) -> LoopSettings:
    """The settings of a run."""
    training = config.training
    block = config.data.max_length
    return LoopSettings(
        epochs=training.num_epochs,
        max_steps=training.max_steps,
        seed=config.seed,
        device=device,
        precision=plan.precision,
        # All blocks are alike, so those of one step speak for all.
        cuts=ladder(
            np.full(plan.effective_batch_size, block),
            plan.effective_batch_size,
            min(plan.batch_size * block, max(block, plan.micro_batch_tokens)),
            padded=True,
            ranks=ranks,
            seed=config.seed,
            at_least=plan.gradient_accumulation_steps,
            at_most=plan.gradient_accumulation_steps,
        ),
        optimizer=OptimizerSettings(
            kind=plan.optimizer,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            betas=(training.beta1, training.beta2),
            max_grad_norm=training.max_grad_norm,
        ),
        schedule=ScheduleSettings(
            kind=training.scheduler,
            warmup_ratio=training.warmup_ratio,
            warmup_steps=training.warmup_steps,
            min_ratio=training.min_learning_rate_ratio,
        ),
        loader=LoaderSettings(
            num_workers=plan.num_workers,
            pin_memory=plan.pin_memory,
            persistent_workers=plan.persistent_workers,
            prefetch_factor=plan.prefetch_factor,
        ),
        compile=plan.compile,
        compile_mode=plan.compile_mode,
        compile_scope="model",  # a long run pays the minute back: the loss is fused too
        sharding=plan.sharding,
        eval_steps=training.eval_steps,
        eval_batch_size=plan.eval_batch_size,
        metric=METRIC,
        greater_is_better=False,
        early_stopping_patience=training.early_stopping_patience,
        logging_steps=training.logging_steps,
        checkpoint_steps=training.checkpoint_steps,
        keep_checkpoints=training.keep_checkpoints,
        nonfinite=training.nonfinite,
        profile_step=training.profile_step,
    )


def opening(parts: Parts, plan: Plan, about_data: str) -> list[str]:
    """The engine's first lines, with the data's and the batch's."""
    ranks = parts.world.size
    per_rank = -(-plan.effective_batch_size // ranks)
    tokens = plan.effective_batch_size * plan.workload.max_length
    chunk = plan.task.arguments.get("loss_chunk")
    return [
        *opening_lines(parts),
        about_data,
        f"Global batch {plan.effective_batch_size} ({tokens:,} tokens a step),"
        f" {per_rank} on each of {ranks} {'rank' if ranks == 1 else 'ranks'},"
        f" at most {plan.batch_size} at a time; loss "
        + ("of all tokens at once" if chunk is None else f"{chunk:,} tokens at a time"),
    ]
