"""The reference: scaled dot-product attention under an explicit mask, on any device and dtype.

For packed rows the mask is block-diagonal and takes tokens squared; the variable-length kernels
do without it and are measured against this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfit.kernels.layout import Layout


# Without eq: torch 2.11 hashes it while it traces a graph, before its fields are there.
@dataclass(frozen=True, slots=True, eq=False)
class MaskedAttention:
    """Bidirectional attention inside each sequence, with the masks of one batch."""

    full: Tensor | None
    """Broadcasts to `[B, heads, T, T]`. True: seen. None: every token sees every other."""
    windowed: Tensor | None
    """The same for layers with a sliding window."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        dropout: float,
        windowed: bool,
        softcap: float | None,
    ) -> Tensor:
        """Attend; heads come before tokens going in, after them coming out."""
        mask = self.windowed if windowed else self.full
        if softcap is not None:
            return _softcapped(query, key, value, mask, scaling, dropout, softcap)
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=False
        )
        attended: Tensor = output
        return attended


def masked_attention(layout: Layout, window: int | None) -> MaskedAttention:
    """The masks of a batch, made once for all layers."""
    full = _visible(layout, None)
    # A window that no sequence outgrows needs no mask; but where there is one anyway, it always has
    # one shape, or compiled code would be compiled again and again.
    outgrown = window is not None and (full is not None or window < layout.max_seqlen)
    return MaskedAttention(full, _visible(layout, window) if outgrown else full)


def same_sequence(layout: Layout) -> Tensor:
    """`[B, T, T]`: whether two tokens are of one sequence; filler is a sequence of its own."""
    return layout.ids[:, :, None] == layout.ids[:, None, :]


def _visible(layout: Layout, window: int | None) -> Tensor | None:
    """Who sees whom, as `MaskedAttention` keeps it."""
    visible = None
    if layout.mask is not None:
        visible = layout.mask[:, None, :]
    elif layout.cu_seqlens is not None:
        visible = same_sequence(layout)
    if window is not None:
        token = torch.arange(layout.ids.shape[1], device=layout.ids.device)
        distance = (token[:, None] - token[None, :]).abs()[None]
        near = distance < window
        # Padding out of reach of every real token still sees itself: a softmax of nothing is NaN,
        # and so is NaN times a gradient of zero.
        visible = near if visible is None else (visible & near) | (distance == 0)
    return None if visible is None else visible[:, None]


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float,
) -> Tensor:
    """Attention with logits squashed to ±softcap, which no kernel behind SDPA can do."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = query @ key.transpose(-1, -2) * scaling
    logits = torch.tanh(logits / softcap) * softcap
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    precise = torch.promote_types(logits.dtype, torch.float32)
    shares = logits.softmax(-1, dtype=precise).to(query.dtype)
    if dropout > 0:  # the layer passes 0 outside training
        shares = functional.dropout(shares, dropout)
    return (shares @ value).transpose(1, 2).contiguous()
