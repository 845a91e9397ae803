"""Floating-point operations that a training step must do, and its time at the GPUs' peak: the MFU.

A product with a weight costs two operations per token forward, two more where the gradient passes
through it, and two more where the weight is trained: 6·N per token for a model that is trained
whole. N counts matrices and the scales of norms, not embedding look-ups. Attention costs 4·width
per pair of tokens forward and twice that backward; a sliding window leaves out pairs, while a
causal mask does not, as usual for the MFU. Recomputation counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from trainfit.core.plan_records import Precision
from trainfit.core.records import Measurement
from trainfit.hardware.catalogue import find
from trainfit.hardware.model_shapes import ModelFlops

_TWO_WAY = ("modernbert",)
"""Model types whose sliding window reaches both ways even where the config does not say so."""


def count_flops(model: nn.Module) -> ModelFlops:
    """Read the sizes from the layers and the config of a model; it may be on the meta device."""
    once = _once_per_sequence(model)
    weights = passed = trained = 0
    reached = False  # True once something before this layer is trained
    for module in model.modules():
        size = 0 if module in once else _size(module)
        weights += size
        passed += size if reached else 0
        trained += size if size and module.weight.requires_grad else 0
        reached = reached or any(one.requires_grad for one in module.parameters(recurse=False))
    configs = (getattr(module, "config", None) for module in model.modules())
    attention = next((found for one in configs if (found := _attention(one))), None)
    return ModelFlops(
        weights=weights,
        passed=passed,
        trained=trained,
        **(attention or {"width": 0, "full_layers": 0}),
    )


def _once_per_sequence(model: nn.Module) -> set[nn.Module]:
    """Modules that see one vector per sequence: poolers, and heads of sequence classifiers."""
    found = [one for name, one in model.named_modules() if name.rpartition(".")[2] == "pooler"]
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("ForSequenceClassification"):
            body = getattr(kind, "base_model_prefix", None)
            found += [one for name, one in module.named_children() if body and name != body]
    return {part for one in found for part in one.modules()}


def _size(module: nn.Module) -> int:
    """Size of a matrix or of a norm's scale; 0 for embeddings and all others."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return 0
    if isinstance(module, nn.Linear):  # by its shape: a quantised weight has fewer elements
        return module.in_features * module.out_features
    return weight.numel() if weight.dim() == 1 or type(module).__name__ == "Conv1D" else 0


def _attention(config: Any) -> dict[str, int] | None:
    """Sizes of the attention by a transformers config; None for anything else."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    heads = getattr(text, "num_attention_heads", None)
    if not layers or not heads:
        return None
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    window = sliding_window(text)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * layers
    windowed = 0 if window is None else kinds.count("sliding_attention")
    return {
        "width": heads * size,
        "full_layers": layers - windowed,
        "windowed_layers": windowed,
        "window": window or 0,
    }


def sliding_window(config: Any) -> int | None:
    """Return the distance from which on windowed layers do not see a token; None without any."""
    size: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if size is None or (kinds and "sliding_attention" not in kinds):
        return None
    # A two-way window reaches `size` tokens far; only Gemma 3's flag makes it one fewer.
    two_way = getattr(config, "is_causal", True) is False or config.model_type in _TWO_WAY
    return size + 1 if two_way else size


# ── the peak ──────────────────────────────────────────────────────────────────────────────────


def dtype_in_use(precision: Precision, tf32: bool | None) -> str:
    """Return the dtype of matrix products; those of fp32 run in TF32 where it is on."""
    return "tf32" if precision == "fp32" and tf32 else precision


def peak_of(slugs: Sequence[str | None], dtype: str) -> float | None:
    """Return the dense peak of these GPUs together in TFLOP/s; None where one is not known."""
    peaks = [None if slug is None else find(slug).peak_tflops(dtype) for slug in slugs]
    known = [peak for peak in peaks if peak]
    return sum(known) if peaks and len(known) == len(peaks) else None


def measured_peak(items: Sequence[Measurement], dtype: str) -> float | None:
    """Return the rate that `check --measure` found for products of this dtype, in TFLOP/s."""
    return {item.name: item.value for item in items}.get(f"matmul_{dtype}")


def ideal_seconds(flops: ModelFlops, peak: float | None) -> Callable[[Sequence[int]], float] | None:
    """Return the time of a step at the `peak` of all its GPUs, by its sequences' lengths."""
    if peak is None:
        return None
    rate = peak * 1e12
    return lambda lengths: flops.of_step(lengths) / rate
