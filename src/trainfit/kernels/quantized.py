"""Weights of linear layers in 4 or 8 bits, and products with them that keep no wide copy.

nf4: codes of 4 bits for blocks of 64 weights, whose largest absolute values are codes of 8 bits for
blocks of 256 of them (QLoRA's double quantization). int8: codes of 8 bits, and the largest absolute
value of each row. The tensors are those of bitsandbytes, whose kernels are taken on a GPU where it
is installed; elsewhere plain operations of torch compute the same numbers.

A product is one operator forward and one backward: a graph that holds the wide weight as a value of
its own would keep it for the backward pass, which costs the whole model in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfit.core.libraries import has, import_bitsandbytes
from trainfit.core.plan_records import Quantization
from trainfit.kernels.attention import computed_in
from trainfit.kernels.fused_ops import dynamic_map

BLOCK = 64
"""Weights of nf4 that share a scale."""
NESTED = 256
"""Scales of nf4 that share a scale of their own."""
SLICE = 1 << 20
"""Bytes of codes that plain operations widen at a time, since they need room for four times that
many numbers."""
_LEAST = 1e-38
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution (appendix E of QLoRA's paper)."""


class Packed(NamedTuple):
    """Stored tensors of one weight matrix."""

    codes: Tensor
    """nf4: uint8, two weights each, the first in the high bits, up to a whole block. int8: a row of
    int8 per output."""
    scales: Tensor
    """nf4: a uint8 code for each block. int8: a float32 for each row."""
    coarse: Tensor | None
    """nf4: float32 scales of the scales, and last the mean that was taken off them."""


def empty(shape: Sequence[int], kind: Quantization, device: torch.device | str) -> Packed:
    """Make the tensors of a matrix without values."""
    rows, columns = shape
    if kind == "int8":
        codes = torch.empty(rows, columns, dtype=torch.int8, device=device)
        return Packed(codes, torch.empty(rows, dtype=torch.float32, device=device), None)
    blocks = math.ceil(rows * columns / BLOCK)
    return Packed(
        torch.empty(blocks * BLOCK // 2, dtype=torch.uint8, device=device),
        torch.empty(blocks, dtype=torch.uint8, device=device),
        torch.empty(math.ceil(blocks / NESTED) + 1, dtype=torch.float32, device=device),
    )


@torch.no_grad()
def quantize(weight: Tensor, kind: Quantization) -> Packed:
    """Quantize a matrix on the device that it is on."""
    if weight.is_meta:
        return empty(weight.shape, kind, weight.device)
    if kind == "int8":
        largest = weight.abs().amax(1).float()
        factors = 127 / largest.clamp(min=127 * _LEAST)
        return Packed((weight * factors[:, None]).round_().to(torch.int8), largest, None)
    flat = _filled(weight.flatten(), BLOCK)
    if bitsandbytes_here(weight.device):
        codes, largest = torch.ops.bitsandbytes.quantize_4bit(flat, BLOCK, "nf4", torch.uint8)
        codes = codes.flatten()
    else:
        nearest, largest = _nearest(flat.float(), BLOCK, _levels(weight.device))
        codes = (nearest[::2] << 4) | nearest[1::2]
    mean = largest.mean()
    scales, coarse = _nearest(largest - mean, NESTED, _dynamic_levels(weight.device))
    return Packed(codes, scales, torch.cat([coarse, mean[None]]))


def _nearest(values: Tensor, block: int, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Number the level that is nearest to each value, as a share of its block's largest."""
    rows = _filled(values, block).view(-1, block)
    largest = rows.abs().amax(1)
    shares = (rows * (1 / largest.clamp(min=_LEAST))[:, None]).clamp_(-1, 1)
    middles = (levels[:-1] + levels[1:]) / 2
    nearest = torch.bucketize(shares, middles, out_int32=True).to(torch.uint8)
    return nearest.flatten()[: values.numel()], largest


def _filled(values: Tensor, block: int) -> Tensor:
    """Fill the last block with zeros."""
    missing = -values.numel() % block
    return functional.pad(values, (0, missing)) if missing else values


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(_LEVELS, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Both weights of each byte of nf4."""
    levels = torch.tensor(_LEVELS)
    return torch.cartesian_prod(levels, levels).to(device)


@cache
def _dynamic_levels(device: torch.device) -> Tensor:
    """Levels for scales: seven decades, each with twice the numbers of the one below it."""
    return torch.tensor(dynamic_map(signed=True), device=device)


@cache
def bitsandbytes_here(device: torch.device) -> bool:
    """True where bitsandbytes has kernels for the device; its operators are then known."""
    if device.type != "cuda" or not has("bitsandbytes"):
        return False
    try:
        library = import_bitsandbytes().cextension.lib
    except Exception:  # noqa: BLE001  one for another CUDA raises errors of several kinds
        return False
    return library.compiled_with_cuda is True


def _widen(packed: Packed, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Compute a matrix from its codes."""
    codes, scales, coarse = packed
    if coarse is None:
        wide = torch.empty(tuple(shape), dtype=dtype, device=codes.device)
        return torch.mul(codes, (scales / 127)[:, None], out=wide)
    levels = _dynamic_levels(codes.device)
    if bitsandbytes_here(codes.device):
        known: Any = torch.ops.bitsandbytes
        largest = known.dequantize_blockwise(scales, coarse[:-1], levels, NESTED, torch.float32)
        largest += coarse[-1]
        return known.dequantize_4bit(codes, largest, BLOCK, "nf4", list(shape), dtype)  # type: ignore[no-any-return]
    largest = levels[scales.int()] * coarse[:-1].repeat_interleave(NESTED)[: scales.numel()]
    largest += coarse[-1]
    made = torch.empty(2 * codes.numel(), dtype=dtype, device=codes.device)
    for begin in range(0, codes.numel(), SLICE):
        values = _pairs(codes.device)[codes[begin : begin + SLICE].int()].view(-1, BLOCK)
        first = 2 * begin // BLOCK
        values *= largest[first : first + len(values), None]
        made[2 * begin : 2 * begin + values.numel()] = values.flatten()
    return made[: math.prod(shape)].view(tuple(shape))


@torch.library.custom_op("trainfit::dequantized", mutates_args=())
def dequantized(
    codes: Tensor, scales: Tensor, coarse: Tensor | None, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The matrix of these codes."""
    return _widen(Packed(codes, scales, coarse), shape, dtype)


@torch.library.custom_op("trainfit::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor, coarse: Tensor | None, bias: Tensor | None,
    shape: Sequence[int],
) -> Tensor:  # fmt: skip
    """Multiply `x` `[…, inputs]` by the matrix of these codes, which lives no longer than that."""
    weight = _widen(Packed(codes, scales, coarse), shape, x.dtype)
    return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


@torch.library.custom_op("trainfit::quantized_linear_backward", mutates_args=())
def quantized_linear_backward(
    gradient: Tensor, codes: Tensor, scales: Tensor, coarse: Tensor | None, shape: Sequence[int]
) -> Tensor:
    weight = _widen(Packed(codes, scales, coarse), shape, gradient.dtype)
    rows = gradient.reshape(-1, shape[0]) @ weight
    return rows.view(*gradient.shape[:-1], shape[1])


@dequantized.register_fake
def _(
    codes: Tensor, _scales: Tensor, _coarse: Tensor | None, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return codes.new_empty(tuple(shape), dtype=dtype)


@quantized_linear.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], rest[-1][0]))


@quantized_linear_backward.register_fake
def _(gradient: Tensor, *rest: Any) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], rest[-1][1]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _x, *packed, _bias, shape = inputs
    ctx.shape = shape
    ctx.save_for_backward(*packed)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    into = bias = None
    if ctx.needs_input_grad[0]:
        into = quantized_linear_backward(gradient, *ctx.saved_tensors, ctx.shape)
    if ctx.needs_input_grad[4]:
        bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
    return into, None, None, None, bias, None


quantized_linear.register_autograd(_backward, setup_context=_remember)


def widened_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of a matrix while it is multiplied by."""
    return itemsize * -(-math.prod(shape) // BLOCK) * BLOCK


# ── the layer ───────────────────────────────────────────────────────────────────────────────────


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
