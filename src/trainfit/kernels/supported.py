"""Support of models by trainfit's and Liger's kernels, decided by the config alone."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trainfit.core.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MODEL_TYPE = "deberta-v2"
"""transformers' name for DeBERTa-v2 and DeBERTa-v3."""
OWN_ATTENTION = ("deberta", MODEL_TYPE, "mpnet")
"""Encoders whose attention also reads positions, so that trainfit's cannot replace it."""
NOT_RECOMPUTED = ("albert", "mpnet")
"""Encoders whose blocks transformers cannot compute again in the backward pass."""
OVERFLOWS_FP16 = ("gemma2", "gemma3_text")
"""Models whose hidden states leave the range of float16."""
TERMS = ("c2p", "p2c")
"""Score terms beside the content: the query's and the key's product with their distance."""
FLASH_SINCE = (8, 0)
"""Least compute capability of torch's flash kernel for packed rows, which needs half precision."""
EFFICIENT_SINCE = (5, 0)
"""Least compute capability of torch's memory-efficient kernel, in float16 and float32."""
BF16_SINCE = (8, 0)
"""Least compute capability of either kernel in bfloat16."""
TRITON_SINCE = (8, 0)
"""Least compute capability of trainfit's own attention kernels. Compiled for 7.5 by Triton 3.6 they
use no matrix units, and with heads of 64 take 80 KiB of shared memory, where a T4 has 64."""
LARGEST_HEAD = 256
"""Largest size of a head that the kernels for packed rows take."""
_HEADS = (16, 32, 64, 128)
CAPPED_HEADS = (*_HEADS, 256)
"""Sizes of a head that the kernels for soft-capped logits take."""


def model_obstacle(fields: dict[str, Any], longest: int | None = None) -> str | None:
    """Reason why no GPU can run packed attention for a model's config; None: it can.

    `longest` is the length of the longest sequence, where it is known.
    """
    if fields.get("model_type") != MODEL_TYPE or not fields.get("relative_attention"):
        return "no kernel here computes it on packed rows"
    terms = fields.get("pos_att_type") or []
    terms = terms.split("|") if isinstance(terms, str) else terms
    if set(terms) != set(TERMS):
        return f"its scores have the terms {', '.join(terms) or 'of content alone'}"
    if fields.get("conv_kernel_size"):
        return "it has a convolution, which reaches over the ends of packed sequences"
    width, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if not width or not heads:
        return "its config does not say how large a head is"
    if width // heads not in _HEADS:
        return f"it has heads of {width // heads}"
    most = most_distances(fields)
    if longest is not None and longest > most:
        return f"sequences of {longest} tokens are longer than its {most} distances"
    return None


def most_distances(fields: dict[str, Any]) -> int:
    """Number of distances that a DeBERTa tells apart, to either side."""
    most = fields.get("max_relative_positions", -1)
    return int(most if most >= 1 else fields.get("max_position_embeddings", 512))


_GEMMA: dict[str, Any] = {"offset": 1.0, "casting_mode": "gemma", "in_place": False}
_NORMS: dict[str, dict[str, Any]] = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}
"""Arguments of Liger's norm by family: Gemma stores its norm's weights less 1."""


def obstacle(model_type: str) -> str | None:
    """Reason why Liger has no layers for a family of models; None: it has."""
    return None if model_type in _NORMS else f"Liger has no layers for {model_type}"


def is_installed() -> bool:
    """Look for liger-kernel without importing it; its kernels may still not run."""
    return find_spec("liger_kernel") is not None


def use_liger(model: PreTrainedModel) -> None:
    """Patch the model's norms and feed-forwards to use Liger's kernels; the weights stay."""
    kind = model.config.model_type
    if reason := obstacle(kind):
        raise BadInput(reason, "set optimization.liger to false")
    try:
        patches: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        fix = "pip install liger-kernel, or set optimization.liger to false"
        raise BadInput(f"liger-kernel cannot be imported ({error})", fix) from error
    for module in model.modules():
        layer = type(module).__name__
        if layer.endswith("RMSNorm"):
            patches._patch_rms_norm_module(module, **_NORMS[kind])
        elif layer.endswith("MLP") and kind.startswith("gemma"):
            patches._patch_geglu_module(module)
        elif layer.endswith("MLP"):
            patches._patch_swiglu_module(module, patches.LigerSwiGLUMLP)
