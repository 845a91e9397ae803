"""The least that a step must compute, and how long that takes at the devices' peak: for the MFU.

Matrix products with weights cost two operations per weight and token forward, and twice that
backward; attention costs by the squared lengths. Embedding look-ups cost nothing. A frozen encoder
goes forward only; with adapters the backward pass goes through its weights but makes no gradients
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainfit.core.plan_records import Plan
from trainfit.hardware.catalogue import find
from trainfit.jobs.models import sources
from trainfit.jobs.models.classifier_settings import Method

_PASSES: dict[Method, float] = {"full": 3.0, "frozen": 1.0, "lora": 2.0, "dora": 2.0}
"""Forward passes' worth of products with weights in a step."""
_ATTENTION_PASSES: dict[Method, float] = {"full": 3.0, "frozen": 1.0, "lora": 3.0, "dora": 3.0}
"""Attention has no weights: its backward pass makes both gradients, whoever is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderWork:
    """What of an encoder's shape decides its operations."""

    weights: int
    """In matrices that tokens are multiplied by."""
    full_layers: int
    windowed_layers: int
    window: int
    """Tokens that a token sees in a windowed layer, itself included."""
    width: int
    """Heads times their size."""


def encoder_work(name: str) -> EncoderWork:
    """From the model's config, built without memory."""
    from transformers import AutoModel

    config, _ = sources.find(name, "random", {})
    config = config.get_text_config()
    with torch.device("meta"):
        model = AutoModel.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or 0
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    windowed = sum(kind == "sliding_attention" for kind in kinds) if window else 0
    return EncoderWork(
        weights=_matrix_weights(model),
        full_layers=len(kinds) - windowed,
        windowed_layers=windowed,
        window=2 * window - 1 if window else 0,
        width=config.num_attention_heads * head,
    )


def _matrix_weights(model: nn.Module) -> int:
    """Weights of linear layers, without the pooler that is not used."""
    from transformers.pytorch_utils import Conv1D

    return sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not name.startswith("pooler")
    )


def step_flops(work: EncoderWork, lengths: Sequence[int], method: Method) -> float:
    """The operations of an optimizer step of sequences of these lengths."""
    products = 2.0 * work.weights * sum(lengths)
    full = sum(length * length for length in lengths)
    near = sum(length * min(length, work.window) for length in lengths)
    seen = work.full_layers * full + work.windowed_layers * near
    return _PASSES[method] * products + _ATTENTION_PASSES[method] * 4.0 * work.width * seen


def ideal_seconds(plan: Plan) -> Callable[[Sequence[int]], float] | None:
    """For the engine's MFU; None where the device's peak is not known."""
    peak = None if plan.gpu is None else find(plan.gpu).peak_tflops(plan.precision)
    if not peak:
        return None
    arguments: dict[str, Any] = plan.task.arguments
    work, method = encoder_work(arguments["name"]), plan.workload.method
    rate = peak * 1e12 * plan.ranks
    return lambda lengths: step_flops(work, lengths, method) / rate
