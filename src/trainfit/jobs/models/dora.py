"""DoRA in operations that torch.compile can trace; apart, since peft takes a second to import."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn
from torch.nn import functional

from trainfit.kernels.quantized import QuantizedLinear


class CompilableDora(DoraLinearLayer):
    """DoRA's addition to the output of its layer, in operations that torch.compile can trace."""

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Linear,
        lora_B: nn.Linear,
        scaling: float,
        base_layer: nn.Module,
        base_result: Tensor | None = None,
        **_rest: Any,
    ) -> Tensor:
        """Compute the addition; `base_result` is the layer's output, None if `x` had dropout.

        The norm is a constant in the backward pass (section 4.3 of the paper).
        """
        weight: Any = base_layer.weight
        weight = (weight.T if self.fan_in_fan_out else weight).to(x.dtype)
        with torch.no_grad():
            product = (lora_B.weight @ lora_A.weight).to(x.dtype)
            norm = torch.linalg.norm(weight + scaling * product, dim=1)
        scale = (self.weight / norm).view(1, -1)
        bias: Any = getattr(base_layer, "bias", None)
        if base_result is None:
            base_result = (
                base_layer.without_bias(x)  # `weight` would be kept for the backward pass
                if isinstance(base_layer, QuantizedLinear)
                else functional.linear(x, weight)
            )
        elif bias is not None:
            base_result = base_result - bias
        adapted: Tensor = lora_B(lora_A(x))
        added: Tensor = (scale - 1) * base_result + scale * adapted * scaling
        return added
