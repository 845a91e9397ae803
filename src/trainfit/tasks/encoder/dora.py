"""peft's DoRA, written so that torch.compile takes it in one piece.

peft asks in every call whether the weight is a quantized one, in a way that the tracer cannot
follow, so a compiled block falls into pieces at every adapter. Ours are never quantized. The sums,
the parameters and the files are peft's own.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn
from torch.nn import functional


def make_compilable(model: nn.Module) -> None:
    """Have the DoRA layers of `model` take the forward below."""
    for module in model.modules():
        if type(module) is DoraLinearLayer:
            module.__class__ = Dora


class Dora(DoraLinearLayer):
    """What an adapter adds to the output of its layer."""

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
        """`base_result` is what the layer made of `x`, or None where `x` has gone through dropout.

        The norm counts as a constant in the backward pass (section 4.3 of the paper).
        """
        weight: Any = base_layer.weight
        weight = (weight.T if self.fan_in_fan_out else weight).to(x.dtype)
        with torch.no_grad():
            product = (lora_B.weight @ lora_A.weight).to(x.dtype)
            norm = torch.linalg.norm(weight + scaling * product, dim=1)
        scale = (self.weight / norm).view(1, -1)
        bias: Any = getattr(base_layer, "bias", None)
        if base_result is None:
            base_result = functional.linear(x, weight)
        elif bias is not None:
            base_result = base_result - bias
        adapted: Tensor = lora_B(lora_A(x))
        added: Tensor = (scale - 1) * base_result + scale * adapted * scaling
        return added
