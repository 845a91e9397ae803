"""Gemma in float16: sums that leave its range stay in float32, products that would are scaled.

Published Gemma 2 and 3 have hidden states beyond 65,504, float16's largest number, and so have the
inputs of their down-projections. Under an autocast to float16 the stream between blocks and the
outputs of norms are float32 here, and each token's input of a down-projection is divided by a power
of two, which its output is multiplied by again. Matrix products stay in float16; in any other
precision nothing changes.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.kernels.supported import OVERFLOWS_FP16

_HEAD_NORMS = ("q_norm", "k_norm")
"""Norms of queries and keys, whose results are small."""
_LARGEST_INPUT = 256.0
"""Bound of the inputs of a down-projection: a sum over thousands of them stays within range."""


def keep_in_range(model: Any) -> None:
    """Make a model whose values exceed float16 compute them scaled; others are unchanged."""
    if model.config.model_type not in OVERFLOWS_FP16:
        return
    model.get_input_embeddings().register_forward_hook(_wide_output)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and not name.endswith(_HEAD_NORMS):
            module.register_forward_pre_hook(_wide_input)
        elif kind.endswith("MLP"):
            module.plain_forward = module.forward
            module.forward = MethodType(_feed_forward, module)


def in_float16(tensor: Tensor) -> bool:
    """Tell if matrix products of a tensor are computed in float16."""
    kind = tensor.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16


def _wide_output(_module: nn.Module, _given: Any, output: Tensor) -> Tensor:
    return output.float() if in_float16(output) else output


def _wide_input(_module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (given[0].float(), *given[1:]) if in_float16(given[0]) else given


def _feed_forward(self: Any, hidden: Tensor) -> Tensor:
    """Compute a gated feed-forward, in float16 with a factor for each token."""
    if not in_float16(hidden):
        plain: Tensor = self.plain_forward(hidden)
        return plain
    gate, up = self.act_fn(self.gate_proj(hidden)), self.up_proj(hidden)
    factor = _factor(gate, up)
    inner = (gate / factor.to(gate.dtype)) * up
    wide: Tensor = self.down_proj(inner).float() * factor
    return wide


@torch.no_grad()
def _factor(gate: Tensor, up: Tensor) -> Tensor:
    """Power of two, at least 1, that brings each token's product of the two below the bound."""
    largest = (gate.float() * up.float()).abs().amax(-1, keepdim=True)
    return torch.exp2(torch.ceil(torch.log2(largest / _LARGEST_INPUT))).clamp(1.0, 2.0**15)
