"""The small GPT that `train gpt` pretrains.

Pre-LN blocks without any bias, GELU with four times the width, learned positions, and an output
layer that is the token embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainfit.core.codec import Range, decode
from trainfit.core.errors import BadInput
from trainfit.hardware.model_shapes import OWN_GPT, ModelFlops, model_shape, model_shapes
from trainfit.kernels.fused_ops import IGNORED, gelu, loss_and_slopes

_EVALUATED = 8192
"""Tokens at a time without gradients: more would only take memory."""


class SummedLoss(nn.Module):
    """Cross-entropy summed over tokens, as a module that can be compiled by itself."""

    def __init__(self, chunk: int | None = None) -> None:
        """Take `chunk` tokens at a time; None for all at once."""
        super().__init__()
        self.chunk = chunk

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        chunk = self.chunk
        if not torch.is_grad_enabled():
            chunk = min(chunk or _EVALUATED, _EVALUATED)
        return summed_cross_entropy(hidden, weight, targets, chunk)


def summed_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None
) -> Tensor:
    """Sum the loss of `hidden` `[N, width]` against `targets` `[N]` with output layer `weight`.

    With `chunk`, the logits of at most `chunk` tokens exist at a time.
    """
    if chunk is None:
        return _sum(functional.linear(hidden, weight), targets)
    if not torch.is_grad_enabled():
        parts = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
        return torch.stack([_sum(functional.linear(h, weight), t) for h, t in parts]).sum()
    total: Tensor = _Chunked.apply(hidden, weight, targets, chunk)  # type: ignore[no-untyped-call]
    return total


def _sum(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(_wide(logits), targets, reduction="sum", ignore_index=IGNORED)


def _wide(tensor: Tensor) -> Tensor:
    """Convert to float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _Chunked(torch.autograd.Function):
    """Loss and gradients, chunk by chunk, in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        kind = hidden.device.type
        narrow = hidden.dtype
        if torch.is_autocast_enabled(kind):
            narrow = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            matrix = weight.to(narrow)
            weight_gradient = torch.zeros_like(_wide(weight))
            hidden_gradients, sums = [], []
            for part, wanted in zip(
                torch.split(hidden, chunk), torch.split(targets, chunk), strict=True
            ):
                given = part.to(narrow)
                loss, slopes = loss_and_slopes(given @ matrix.t(), wanted)
                sums.append(loss)
                hidden_gradients.append(slopes @ matrix)
                weight_gradient += slopes.t() @ given
        ctx.save_for_backward(torch.cat(hidden_gradients), weight_gradient)
        ctx.dtypes = hidden.dtype, weight.dtype
        return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradients, weight_gradient = ctx.saved_tensors
        first, second = ctx.dtypes
        return (
            (hidden_gradients * factor).to(first),
            (weight_gradient * factor).to(second),
            None,
            None,
        )


Positive = Annotated[int, Range(1)]
Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GptShape:
    """Sizes of a GPT."""

    vocab_size: Positive
    block_size: Positive
    """Length of the longest sequence, and number of positions."""
    n_layer: Positive
    n_head: Positive
    n_embd: Positive
    dropout: Annotated[float, Range(0, 1)] = 0.0

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise BadInput(
                f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}",
                "choose a width that the heads can share",
            )

    @property
    def parameters(self) -> int:
        blocks = self.n_layer * (12 * self.n_embd**2 + 2 * self.n_embd)
        return blocks + (self.vocab_size + self.block_size + 1) * self.n_embd

    @property
    def flops(self) -> ModelFlops:
        """Operations: a token is multiplied by all weights but the position embeddings."""
        weights = self.parameters - self.block_size * self.n_embd
        return ModelFlops(
            weights=weights,
            passed=weights,
            trained=weights,
            width=self.n_embd,
            full_layers=self.n_layer,
        )


def gpt_shape(name: str, **overrides: Any) -> GptShape:
    """Look up the shape of a GPT in the catalogue, with `overrides` such as block_size."""
    shape = model_shape(name)
    if shape.config["model_type"] != OWN_GPT:
        own = [each.slug for each in model_shapes() if each.config["model_type"] == OWN_GPT]
        raise BadInput(f"{name} is not a GPT of trainfit's", f"choose {', '.join(own)}")
    # trainfit's GPT has no bias and is tied; the catalogue says so for its reader.
    sizes = {k: v for k, v in shape.config.items() if k not in ("model_type", "bias", "tied")}
    return decode(GptShape, sizes | overrides, name)


def build_gpt(
    name: str,
    *,
    checkpointing: Checkpointing = "none",
    loss_chunk: int | None = None,
    half_stream: bool = False,
    **overrides: Any,
) -> Gpt:
    """Build a GPT of the catalogue with random weights."""
    shape = gpt_shape(name, **overrides)
    return Gpt(shape, checkpointing=checkpointing, loss_chunk=loss_chunk, half_stream=half_stream)


class Gpt(nn.Module):
    """Decoder that predicts each next token."""

    def __init__(
        self,
        shape: GptShape,
        *,
        checkpointing: Checkpointing = "none",
        loss_chunk: int | None = None,
        half_stream: bool = False,
    ) -> None:
        """Draw random weights; the loss is computed `loss_chunk` tokens at a time.

        `checkpointing` recomputes all blocks, or selectively every second, in the backward pass.
        With `half_stream` blocks pass hidden states in autocast's dtype, else in float32.
        """
        super().__init__()
        self.shape = shape
        self.checkpointing = checkpointing
        self.half_stream = half_stream
        self.token_embedding = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.position_embedding = nn.Embedding(shape.block_size, shape.n_embd)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.norm = nn.LayerNorm(shape.n_embd, bias=False)
        self.loss = SummedLoss(loss_chunk)
        self._initialise()

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Compute logits `[B, T, vocabulary]`, or with `targets` `[B, T]` the summed loss.

        A target of -100 does not count.
        """
        hidden = self.encode(input_ids)
        weight = self.token_embedding.weight
        if targets is None:
            return functional.linear(hidden, weight)
        summed: Tensor = self.loss(hidden.flatten(0, 1), weight, targets.flatten())
        return summed

    def encode(self, input_ids: Tensor) -> Tensor:
        """Compute hidden states `[B, T, width]` after the last norm."""
        length = input_ids.shape[1]
        if length > self.shape.block_size:
            raise BadInput(
                f"{length} tokens for a block size of {self.shape.block_size}",
                "shorten the sequences or build the model with a larger block_size",
            )
        positions = torch.arange(length, device=input_ids.device)
        hidden = self.token_embedding(input_ids) + self.position_embedding(positions)
        hidden = self.dropout(hidden)
        kind = hidden.device.type
        if self.half_stream and torch.is_autocast_enabled(kind):
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        for index, block in enumerate(self.blocks):
            if self._recomputes(index):
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        normed: Tensor = self.norm(hidden)
        return normed

    def _recomputes(self, index: int) -> bool:
        every = {"none": 0, "selective": 2, "full": 1}[self.checkpointing]
        return self.training and every > 0 and index % every == 0

    def _initialise(self) -> None:
        """Initialise as GPT-2; the two residuals of each block are scaled by the depth."""
        residual = 0.02 * (2 * self.shape.n_layer) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                adds = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
                nn.init.normal_(weight, std=residual if adds else 0.02)


class Block(nn.Module):
    """Attention, then the feed-forward layer, each on a normed copy and added back."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.n_embd, bias=False)
        self.attention = CausalAttention(shape)
        self.feed_forward_norm = nn.LayerNorm(shape.n_embd, bias=False)
        self.feed_forward = FeedForward(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        fed: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return fed


class CausalAttention(nn.Module):
    """Attention of each token to itself and to those before it."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.n_head
        self.probability = shape.dropout
        self.qkv = nn.Linear(shape.n_embd, 3 * shape.n_embd, bias=False)
        self.output = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.probability if self.training else 0.0, is_causal=True
        )
        mixed: Tensor = self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        return mixed


class FeedForward(nn.Module):
    """Feed-forward layer of four times the width, with GELU."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.n_embd, 4 * shape.n_embd, bias=False)
        self.down = nn.Linear(4 * shape.n_embd, shape.n_embd, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        moved: Tensor = self.dropout(self.down(gelu(self.up(hidden))))
        return moved
