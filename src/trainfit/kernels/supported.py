"""Which models trainfit's own kernels take, by their config alone."""

from __future__ import annotations

from typing import Any

MODEL_TYPE = "deberta-v2"
"""What transformers calls DeBERTa-v3 too."""
TERMS = ("c2p", "p2c")
"""Beside the content: what the query, and what the key says about their distance."""
_HEADS = (16, 32, 64, 128)
CAPPED_HEADS = (*_HEADS, 256)
"""Sizes of a head that the kernels for soft-capped logits take."""


def model_obstacle(fields: dict[str, Any]) -> str | None:
    """Why a model with this config cannot run this on any GPU; None: it can."""
    if fields.get("model_type") != MODEL_TYPE or not fields.get("relative_attention"):
        return "it has an attention of its own"
    terms = fields.get("pos_att_type") or []
    terms = terms.split("|") if isinstance(terms, str) else terms
    if set(terms) != set(TERMS):
        return f"its scores have the terms {', '.join(terms) or 'of content alone'}"
    if fields.get("conv_kernel_size"):
        return "it has a convolution, which reaches over the ends of packed sequences"
    width, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if not width or not heads:
        return "its config does not say how large a head is"
    head = width // heads
    return None if head in _HEADS else f"it has heads of {head}"
