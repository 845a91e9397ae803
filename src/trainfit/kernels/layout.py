"""Layout of a batch: the sequence and position of each token, in padded or packed rows.

Nothing here looks at the values of a tensor, so that a layout can be made of fake tensors and
inside a compiled graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainfit.core.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The sequences in a batch of rows `[B, T]`.

    Padded: row b holds sequence b, and `mask` says which of its tokens are real. Packed: one row
    holds all sequences end to end, and `cu_seqlens` says where each begins; the tokens after the
    last one are filler.
    """

    sequences: int
    ids: Tensor
    """`[B, T]`: the sequence of each token; `sequences` for padding and filler."""
    positions: Tensor
    """`[B, T]`: the place of each token in its sequence; 0 for padding and filler."""
    lengths: Tensor
    """`[sequences]`: tokens in each."""
    mask: Tensor | None
    """`[B, T]`, True for real tokens; None where nothing is padded, and for packed rows."""
    cu_seqlens: Tensor | None
    """`[sequences + 1]`: where each sequence begins, and where the filler does."""
    max_seqlen: int
    """Upper bound of the sequences' lengths."""


def lay_out(
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Layout:
    """Build the layout of a batch: packed with `cu_seqlens`, else one sequence per row.

    Leave `attention_mask` out when nothing is padded: to look whether it is all ones would make
    the GPU wait, so a mask that is given is used.
    """
    if cu_seqlens is None:
        return _padded(input_ids, attention_mask)
    if attention_mask is not None:
        fix = "give attention_mask for padded rows or cu_seqlens for packed ones"
        raise BadInput("a batch with both attention_mask and cu_seqlens", fix)
    if input_ids.shape[0] != 1:
        fix = "pack all sequences into one row"
        raise BadInput(f"packed rows of shape {tuple(input_ids.shape)}", fix)
    return _packed(input_ids, cu_seqlens, max_seqlen)


def _padded(input_ids: Tensor, attention_mask: Tensor | None) -> Layout:
    rows, width = input_ids.shape
    row = torch.arange(rows, device=input_ids.device)[:, None]
    if attention_mask is None:
        mask = None
        ids = row.expand(rows, width)
        positions = torch.arange(width, device=input_ids.device).expand(rows, width)
        lengths = torch.full_like(row[:, 0], width)
    else:
        mask = attention_mask.bool()
        ids = torch.where(mask, row, rows)
        # Counting real tokens is right for padding on either side.
        positions = (mask.cumsum(-1) - 1) * mask
        lengths = mask.sum(-1)
    return Layout(
        sequences=rows,
        ids=ids,
        positions=positions,
        lengths=lengths,
        mask=mask,
        cu_seqlens=None,
        max_seqlen=width,
    )


def _packed(input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> Layout:
    width = input_ids.shape[1]
    starts = cu_seqlens.long()
    sequences = starts.shape[0] - 1
    token = torch.arange(width, device=input_ids.device)
    # All starts, since Inductor 2.11 cannot bucketize with a slice such as starts[1:].
    ids = torch.bucketize(token, starts, right=True) - 1
    # Filler stays at position 0, within the table of learned positions.
    positions = torch.where(ids < sequences, token - starts[ids], 0)
    return Layout(
        sequences=sequences,
        ids=ids[None],
        positions=positions[None],
        lengths=starts.diff(),
        mask=None,
        cu_seqlens=cu_seqlens,
        max_seqlen=width if max_seqlen is None else max_seqlen,
    )
