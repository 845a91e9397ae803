"""Which kernel computed attention."""

from __future__ import annotations

from collections import Counter

from trainfit.measuring.evidence.products import short
from trainfit.measuring.evidence.seen import AttentionSeen
from trainfit.measuring.evidence.trace import Operator, Trace

_KERNELS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "cpu",
    "torch_attn::_varlen_attn": "varlen",
    "trainfit::disentangled_attention": "disentangled",
    "trainfit::softcapped_attention": "softcapped",
    "flash_attn::_flash_attn_forward": "flash",
    "flash_attn::_flash_attn_varlen_forward": "varlen",
    "flex_attention": "flex",
}
"""By operator: also inside compiled graphs, these are called by name."""
_FLEX = "triton_tem_fused_flex_attention"
_ASKED = "aten::scaled_dot_product_attention"
_MASK = {
    _ASKED: 3,
    "aten::_scaled_dot_product_efficient_attention": 3,
    "aten::_scaled_dot_product_cudnn_attention": 3,
    "aten::_scaled_dot_product_attention_math": 3,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 5,
}
"""Where the mask stands among the inputs."""
_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")


def attention_of(trace: Trace) -> AttentionSeen:
    """The forward calls by kernel, and what they were given."""
    asked = [op for op in trace.operators if _kernel(op) or op.name == _ASKED]
    shown = next((op for op in asked if op.shapes and op.shapes[0]), None)
    return AttentionSeen(
        calls=dict(Counter(kernel for op in asked if (kernel := _kernel(op)))),
        masked=any(_has_mask(op) for op in asked),
        dtype=short(shown.dtypes[0]) if shown else None,
        head=shown.shapes[0][-1] if shown else None,
        softmaxes=trace.calls(*_SOFTMAX),
    )


def is_forward_attention(name: str) -> bool:
    """Whether the operator computes attention, not its gradient."""
    return name in _KERNELS


def _kernel(operator: Operator) -> str | None:
    if operator.name.startswith(_FLEX) and "backward" not in operator.name:
        return "flex"
    return _KERNELS.get(operator.name)


def _has_mask(operator: Operator) -> bool:
    place = _MASK.get(operator.name)
    return place is not None and len(operator.dtypes) > place and bool(operator.dtypes[place])
