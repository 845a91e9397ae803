"""Linear layer whose frozen weight is stored in 4 or 8 bits."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from trainfit.core.plan_records import Quantization
from trainfit.kernels.attention import computed_in
from trainfit.kernels.quantized import Packed, dequantized, quantize, quantized_linear


class QuantizedLinear(nn.Linear):
    """Linear layer that widens its weight for each product, forward and backward.

    Its tensors are frozen parameters: checkpoints do not hold them, checksums do. Whoever reads
    `weight`, as adapters do, gets a new tensor.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    coarse: nn.Parameter | None

    def __init__(
        self, packed: Packed, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = self.shape = shape
        self.dtype = dtype
        for name, tensor in packed._asdict().items():
            self.register_parameter(name, _frozen(tensor))
        self.register_parameter("bias", _frozen(bias))

    @classmethod
    def of(cls, linear: nn.Linear, kind: Quantization, device: torch.device) -> Self:
        """Quantize a layer's weight on `device`; the result is where the weight was."""
        weight = linear.weight.detach()
        there = quantize(weight.to(device), kind)
        packed = Packed(*(None if each is None else each.to(weight.device) for each in there))  # type: ignore[arg-type]
        return cls(packed, (weight.shape[0], weight.shape[1]), weight.dtype, linear.bias)

    @property
    def kind(self) -> Quantization:
        """Format of the codes."""
        return "int8" if self.coarse is None else "nf4"

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight in the dtype that it was quantized from."""
        wide: Tensor = dequantized(self.codes, self.scales, self.coarse, self.shape, self.dtype)
        return wide

    def forward(self, input: Tensor) -> Tensor:
        """Multiply in the dtype of autocast, else of the input."""
        return self._product(input, self.bias)

    def without_bias(self, input: Tensor) -> Tensor:
        """Multiply by the weight alone."""
        return self._product(input, None)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.to(computed_in(x.device.type, x.dtype))
        y: Tensor = quantized_linear(x, self.codes, self.scales, self.coarse, bias, self.shape)
        return y

    def extra_repr(self) -> str:
        """Describe the layer as torch does, and the format of its weight."""
        return f"{super().extra_repr()}, quantization={self.kind}"


def _frozen(tensor: Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)


def widened_state(model: nn.Module) -> dict[str, Tensor]:
    """State of a model with plain weights, each of which is widened and then kept on the host."""
    state: dict[str, Tensor] = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            for part in Packed._fields:
                state.pop(f"{name}.{part}", None)
            state[f"{name}.weight"] = module.weight.cpu()
    return state


def count_weights(model: nn.Module) -> int:
    """Count the weights of a model, and not their codes and scales."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    stored = {each for layer in layers for each in (layer.codes, layer.scales, layer.coarse)}
    wide = sum(layer.in_features * layer.out_features for layer in layers)
    return wide + sum(p.numel() for p in model.parameters() if p not in stored)
