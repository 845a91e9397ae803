"""Encoders whose blocks are quantized while they are built, one matrix at a time.

Embeddings, norms, biases and whatever is outside the repeated blocks keep their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Quantization
from trainfit.kernels.quantized_linear import QuantizedLinear
from trainfit.runtime import repeated_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def draw(build: Callable[[], PreTrainedModel], kind: Quantization) -> PreTrainedModel:
    """Build a model with random weights; those that are quantized are drawn one by one."""
    device = torch.get_default_device()
    if kind == "none":
        return build()
    with _linears_on_meta():
        model = build()
    if device.type != "meta":
        inside = _linears(model)
        for linear in model.modules():
            if type(linear) is nn.Linear and linear not in inside:
                _draw(model, linear, device)
    quantize_blocks(model, kind, device)
    return model


def quantize_blocks(model: PreTrainedModel, kind: Quantization, device: torch.device) -> None:
    """Quantize the linear layers of the blocks on `device`; weights without values are drawn.

    A layer with values stays where it is, so that folds share it in the host's memory.
    """
    inside = _linears(model)
    if not inside:
        raise BadInput(
            f"{model.config.model_type} has no linear layers in its blocks to quantize",
            "set model.quantization=none, or choose another model",
        )
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if linear not in inside or not isinstance(linear, nn.Linear):
                continue
            if linear.weight.is_meta and device.type != "meta":
                _draw(model, linear, device)
            setattr(parent, name, QuantizedLinear.of(linear, kind, device))
            linear.to_empty(device="meta")  # `inside` still holds it


def _linears(model: nn.Module) -> set[nn.Module]:
    """Linear layers inside the repeated blocks; of all the model where no block repeats."""
    blocks = repeated_blocks(model) or [model]
    return {layer for block in blocks for layer in block.modules() if type(layer) is nn.Linear}


def _draw(model: Any, linear: nn.Linear, device: torch.device) -> None:
    """Give a layer without values random ones, as torch and then the model's class draw them."""
    linear.to_empty(device=device)
    linear.reset_parameters()
    model._init_weights(linear)


@contextmanager
def _linears_on_meta() -> Iterator[None]:
    """Build linear layers without values inside a block, and everything else with them."""
    plain = nn.Linear.__init__
    nn.Linear.__init__ = partialmethod(plain, device="meta")  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Linear.__init__ = plain  # type: ignore[method-assign]
