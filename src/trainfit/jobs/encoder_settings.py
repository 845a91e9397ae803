"""Settings of an encoder's training: the loop's, and what the plan decides about the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainfit.core.plan_records import Plan
from trainfit.data.tokens import IntArray
from trainfit.engine.loop_settings import LoopSettings, loop_settings
from trainfit.jobs.targets import OneClass
from trainfit.packing import ladder
from trainfit.packing.packed import PackedCut
from trainfit.planning.execution import COMPILE_SECONDS

if TYPE_CHECKING:
    from trainfit.conf.schema import EncoderModel
    from trainfit.jobs.configuration import EncoderConfig

_SLACK = 1.02
"""Factor on the planned tokens, since steps dealt with another seed are a little larger."""
_SECOND_SHAPE = 0.03
"""Share of the time that a second shape of packed rows saves, about."""


def model_decisions(plan: Plan, asked: EncoderModel) -> dict[str, Any]:
    """The fields of ClassifierSettings that the plan decides."""
    decided: dict[str, Any] = {
        "method": plan.workload.method,
        "checkpointing": plan.gradient_checkpointing,
        "dtype": plan.weights_dtype,
        "quantization": plan.quantization,
        "liger": plan.liger,
    }
    if not plan.packed:  # nor does an evaluation take packed rows
        decided["attention"] = "masked"
    elif asked.attention_dropout is None:  # it costs time, so that packed rows have it on request
        decided["attention_dropout"] = 0.0
    return decided


def encoder_settings(
    config: EncoderConfig,
    plan: Plan,
    folds: Sequence[IntArray],
    *,
    device: str,
    ranks: int,
    target: OneClass | None = None,
) -> LoopSettings:
    """Return the settings of the first fold; all folds, of these lengths, share their cuts."""
    first, *others = folds
    cuts = ladder(
        first,
        plan.effective_batch_size,
        _cap(config, plan, max(int(lengths.max()) for lengths in folds)),
        padded=not plan.packed,
        ranks=ranks,
        seed=config.seed,
        at_least=plan.gradient_accumulation_steps,
        at_most=plan.gradient_accumulation_steps,
        folds=others,
    )
    seconds = (plan.time.job_seconds if plan.time else None) or 0.0
    if plan.compile and seconds * _SECOND_SHAPE < COMPILE_SECONDS:
        cuts = tuple(
            replace(cut, budgets=cut.budgets[-1:]) if isinstance(cut, PackedCut) else cut
            for cut in cuts
        )  # each shape is compiled by itself
    in_folds = config.cv.folds is not None  # their checkpoints are deleted after their export
    target = target or OneClass()
    return loop_settings(
        config,
        plan,
        cuts,
        device=device,
        seed=config.seed,
        metric=target.metric,
        greater_is_better=target.greater_is_better,
        save_last=not in_folds,
    )


def _cap(config: EncoderConfig, plan: Plan, longest: int) -> int:
    """Most tokens of a micro-batch: as planned, and never over a batch_size that was set.

    Where both batch_size and gradient_accumulation_steps are set, the run keeps to both.
    """
    planned = math.ceil(plan.micro_batch_tokens * _SLACK)
    if config.training.batch_size != "auto":
        asked = plan.batch_size * config.data.max_length
        free = config.optimization.gradient_accumulation_steps == "auto"
        planned = min(asked, planned) if free else asked
    return max(longest, planned)
