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
class AttentionShape:
    """Layers of a transformer by the tokens that attention sees in them."""

    full_layers: int = 0
    windowed_layers: int = 0
    window: int = 0
    """Tokens that a token sees in a windowed layer, itself included."""
    width: int = 0
    """Heads times their size."""

    def flops(self, lengths: Sequence[int]) -> float:
        """Operations of a forward pass over sequences of these lengths."""
        full = sum(length * length for length in lengths)
        near = sum(length * min(length, self.window) for length in lengths)
        return 4.0 * self.width * (self.full_layers * full + self.windowed_layers * near)


def attention_shape(config: Any) -> AttentionShape:
    """Attention of a transformers config; without layers for a model that is no transformer."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = (getattr(text, f"num_{n}", None) for n in ("hidden_layers", "attention_heads"))
    if not layers or not heads:
        return AttentionShape()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
    window = getattr(text, "sliding_window", None) or 0
    windowed = sum(kind == "sliding_attention" for kind in kinds) if window else 0
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    return AttentionShape(
        full_layers=len(kinds) - windowed,
        windowed_layers=windowed,
        window=2 * window - 1 if window else 0,
        width=heads * head,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderWork:
    """Sizes of an encoder that decide the operations of a step."""

    weights: int
    """Weights of the matrices that tokens are multiplied by."""
    attention: AttentionShape


def encoder_work(name: str) -> EncoderWork:
    """Read the sizes from the model's config; the model is built without memory."""
    from transformers import AutoModel

    config, _ = sources.find(name, "random", {})
    config = config.get_text_config()
    with torch.device("meta"):
        model = AutoModel.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return EncoderWork(weights=_matrix_weights(model), attention=attention_shape(config))


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
    return _PASSES[method] * products + _ATTENTION_PASSES[method] * work.attention.flops(lengths)


def ideal_seconds(plan: Plan) -> Callable[[Sequence[int]], float] | None:
    """For the engine's MFU; None where the device's peak is not known."""
    peak = None if plan.gpu is None else find(plan.gpu).peak_tflops(plan.precision)
    if not peak:
        return None
    arguments: dict[str, Any] = plan.task.arguments
    work, method = encoder_work(arguments["name"]), plan.workload.method
    rate = peak * 1e12 * plan.ranks
    return lambda lengths: step_flops(work, lengths, method) / rate
