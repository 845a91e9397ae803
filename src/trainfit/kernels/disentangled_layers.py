"""Self-attention that reads distances, on packed rows: DeBERTa's and MPNet's.

Weights and code are those of transformers. The classes stand in a module of their own, so that a
model that has them can be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention
from transformers.models.mpnet import modeling_mpnet

from trainfit.kernels.disentangled import DisentangledAttention
from trainfit.kernels.unpadded_rows import UnpaddedRows


class _TakesPacked:
    """Self-attention that finds a way for packed rows in the place of relative positions."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Any = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(relative_pos, (DisentangledAttention, PaddedDisentangled)):
            assert rel_embeddings is not None
            return relative_pos(self, hidden_states, rel_embeddings), None
        found: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[misc]
            hidden_states,
            attention_mask,
            output_attentions,
            query_states,
            relative_pos,
            rel_embeddings,
        )
        return found


class PackedSelfAttention(_TakesPacked, DisentangledSelfAttention):
    """Self-attention of DeBERTa-v2 and v3 that takes packed rows too; its weights are unchanged."""


class PackedFirstSelfAttention(_TakesPacked, modeling_deberta.DisentangledSelfAttention):
    """Self-attention of the first DeBERTa, as `PackedSelfAttention`; no kernel computes it."""


class PackedBiasedSelfAttention(modeling_mpnet.MPNetSelfAttention):
    """MPNet's self-attention, which takes packed rows too; no kernel computes it."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        if isinstance(position_bias, PaddedBias):
            return (position_bias(self, hidden_states),)
        found: tuple[Tensor, ...] = super().forward(  # type: ignore[no-untyped-call]
            hidden_states, attention_mask, position_bias, output_attentions, **kwargs
        )
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PaddedDisentangled:
    """DeBERTa's own attention on padded rows, for a packed row where no kernel takes it."""

    batch: UnpaddedRows
    mask: Tensor
    """`[rows, 1, width, width]`: 1 for two real tokens."""
    distances: Tensor
    """Relative positions of two columns, as the encoder rounds them."""

    def __call__(self, module: Any, hidden: Tensor, relative: Tensor) -> Tensor:
        """Attend by the weights of `module`, `[1, tokens, width]`."""
        attended, _ = module.forward(
            self.batch.restore(hidden),
            self.mask,
            relative_pos=self.distances,
            rel_embeddings=relative,
        )
        return self.batch.pack(attended)


def padded_disentangled(batch: UnpaddedRows, encoder: Any) -> PaddedDisentangled:
    """Build the attention of a batch, once for all layers of a DeBERTa's encoder."""
    batch, device = batch.tight(), batch.starts.device
    real = batch.mask
    if real is None:
        real = torch.ones(batch.rows, batch.width, dtype=torch.bool, device=device)
    columns = torch.empty(1, batch.width, 1, device=device)
    mask = encoder.get_attention_mask(real.long())
    return PaddedDisentangled(batch, mask, encoder.get_rel_pos(columns))


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBias:
    """MPNet's own attention on padded rows, for a packed row."""

    batch: UnpaddedRows
    mask: Tensor | None
    """`[rows, 1, 1, width]`, added to the scores."""
    bias: Tensor
    """`[1, heads, width, width]`: score of the distance between two columns."""

    def __call__(self, module: Any, hidden: Tensor) -> Tensor:
        """Attend by the weights of `module`, `[1, tokens, width]`."""
        attended, *_ = module.forward(self.batch.restore(hidden), self.mask, self.bias)
        return self.batch.pack(attended)


def padded_bias(batch: UnpaddedRows, encoder: Any, dtype: torch.dtype) -> PaddedBias:
    """Build the attention of a batch, once for all layers of MPNet's encoder."""
    batch = batch.tight()
    columns = torch.empty(1, batch.width, 1, device=batch.starts.device)
    mask = None
    if batch.mask is not None:
        hidden = ~batch.mask[:, None, None]
        mask = hidden.to(dtype) * torch.finfo(dtype).min
    return PaddedBias(batch, mask, encoder.compute_position_bias(columns))


_PACKED: tuple[type, ...] = (
    PackedSelfAttention,
    PackedFirstSelfAttention,
    PackedBiasedSelfAttention,
)


def take_packed_rows(model: nn.Module) -> None:
    """Make the layers of a model attend to packed rows where they are given an attention for them.

    It comes in the argument for relative positions, which packed rows do not need.
    """
    for module in model.modules():
        for kind in _PACKED:
            if type(module) is kind.__bases__[-1]:
                module.__class__ = kind
