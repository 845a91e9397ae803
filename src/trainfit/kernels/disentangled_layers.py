"""DeBERTa's self-attention on packed rows, by the weights and the code of transformers.

The class stands in a module of its own, so that a model that has it can be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

from trainfit.kernels.disentangled import DisentangledAttention
from trainfit.kernels.unpadded_rows import UnpaddedRows


class PackedSelfAttention(DisentangledSelfAttention):
    """DeBERTa's self-attention, which takes packed rows too; its weights are unchanged."""

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
        found: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[no-untyped-call]
            hidden_states,
            attention_mask,
            output_attentions,
            query_states,
            relative_pos,
            rel_embeddings,
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

    def __call__(self, module: PackedSelfAttention, hidden: Tensor, relative: Tensor) -> Tensor:
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
