"""The operations that a model's step must do, from the model itself.

A product with a weight costs two operations a token forward; two more where the gradient has to
pass through it, and two more where the weight itself is trained. Attention costs by the squared
lengths. Embedding look-ups, norms and recomputation cost nothing here: they are not in the MFU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWork:
    """What of a model decides its operations."""

    weights: int
    """In the matrices that every token is multiplied by."""
    passed: int
    """Of those, the ones that a gradient passes through on its way back."""
    trained: int
    """Of those, the ones that are trained."""
    attention: int
    """Layers times their width: heads times their size."""

    def flops(self, lengths: Sequence[int]) -> float:
        """Of forward and backward over sequences of these lengths."""
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        attention = 4.0 * self.attention * squares
        back = 2.0 * attention if self.passed else 0.0  # it has no weights, and two gradients
        return 2.0 * (self.weights + self.passed + self.trained) * tokens + attention + back


def work_of(model: nn.Module) -> ModelWork:
    """Read it from the model's layers and its config."""
    weights = passed = trained = 0
    reached = False  # whether something before this layer is trained
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        matrix = _matrix(module)
        if matrix is not None and "pooler" not in name.split("."):  # one vector a sequence
            weights += matrix.numel()
            passed += matrix.numel() if reached else 0
            trained += matrix.numel() if matrix.requires_grad else 0
        reached = reached or any(parameter.requires_grad for parameter in own)
    configs = (getattr(module, "config", None) for module in model.modules())
    attention = next((found for config in configs if (found := _attention(config))), 0)
    return ModelWork(weights=weights, passed=passed, trained=trained, attention=attention)


def _matrix(module: nn.Module) -> nn.Parameter | None:
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return weight if is_matrix and isinstance(weight, nn.Parameter) else None


def _attention(config: Any) -> int:
    """Zero for what is no transformer: then its products alone count."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    heads = getattr(text, "num_attention_heads", None)
    if not layers or not heads:
        return 0
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(layers * heads * size)
