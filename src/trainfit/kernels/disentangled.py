"""DeBERTa's attention on a packed row, without a score matrix in memory.

DeBERTa adds to each score what the query and the key say about their distance. Distances are few,
so their products are computed once per token; `disentangled_triton` has the kernels, which exist
for GPUs alone. Elsewhere, and for DeBERTas with other terms, transformers' own code runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainfit.kernels.attention import Layout
from trainfit.kernels.efficient_packed import differentiate
from trainfit.kernels.supported import TERMS, model_obstacle, most_distances
from trainfit.kernels.varlen import draw_seed, starts_of, triton_obstacle

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SPLITS = 8
"""Parts in which the gradient of positions is summed, each over some of the sequences."""


@torch.library.custom_op("trainfit::disentangled_attention", mutates_args=())
def disentangled_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, starts: Tensor,
    seed: Tensor | None, longest: int, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend: `[tokens, heads, d]`, and the softmax's logarithms `[heads, tokens]`.

    `positions` `[2, 2·longest, heads, d]` has the vectors that queries, and those that keys are
    multiplied by for each distance to the other token, from 1 - longest on. With a `seed`
    (`draw_seed`), a share of `dropout` of the softmax's results is dropped.
    """
    from trainfit.kernels import disentangled_triton

    tensors = (query, key, value, positions, starts, seed)
    return disentangled_triton.forward(*tensors, longest, scale, dropout)


@torch.library.custom_op("trainfit::disentangled_attention_backward", mutates_args=())
def disentangled_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, positions: Tensor,
    starts: Tensor, seed: Tensor | None, out: Tensor, sums: Tensor, longest: int, scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from trainfit.kernels import disentangled_triton

    tensors = (gradient.contiguous(), query, key, value, positions, starts, seed, out, sums)
    return disentangled_triton.backward(*tensors, longest, scale, dropout)


@disentangled_attention.register_fake
def _(query: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _head = query.shape
    return torch.empty_like(query), query.new_empty(heads, tokens, dtype=torch.float32)


@disentangled_attention_backward.register_fake
def _(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(t) for t in (query, key, value, positions))  # type: ignore[return-value]


differentiate(disentangled_attention, disentangled_attention_backward, tensors=6)


# Without eq: torch 2.11 hashes it while it traces a graph, before its fields are there.
@dataclass(frozen=True, slots=True, eq=False)
class DisentangledAttention:
    """Attention of DeBERTa's layers inside each sequence of one packed row."""

    starts: Tensor
    """Start of each sequence, filler included; ends with the row's width."""
    longest: int
    """Upper bound of the sequences' lengths."""
    chosen: Tensor
    """`[2, 2·longest, embeddings]`: 1 where a relative embedding belongs to a distance, seen from a
    query and from a key. Selecting by a product keeps the order of the gradient's sums fixed."""

    def __call__(self, module: Any, hidden: Tensor, relative: Tensor) -> Tensor:
        """Attend by the weights of `module`, a layer's self-attention, `[1, tokens, width]`."""
        heads = module.num_attention_heads

        def split(x: Tensor) -> Tensor:
            return x.reshape(*x.shape[:-1], heads, -1)

        shared = module.share_att_key
        by_query = module.key_proj if shared else module.pos_key_proj
        by_key = module.query_proj if shared else module.pos_query_proj
        relative = module.pos_dropout(relative)[: 2 * module.pos_ebd_size]
        terms = torch.stack([by_query(relative), by_key(relative)])
        query = split(module.query_proj(hidden[0]))
        dropout = float(module.dropout.p) if module.training else 0.0
        attended, _ = disentangled_attention(
            query,
            split(module.key_proj(hidden[0])),
            split(module.value_proj(hidden[0])),
            split(torch.bmm(self.chosen.to(terms.dtype), terms)),
            self.starts,
            draw_seed(query.device) if dropout else None,
            self.longest,
            (query.shape[-1] * (1 + len(TERMS))) ** -0.5,
            dropout,
        )
        mixed: Tensor = attended.flatten(1)[None]
        return mixed


def packed_attention(
    layout: Layout, config: PretrainedConfig, dtype: torch.dtype
) -> DisentangledAttention:
    """Build the attention of a packed batch, once for all layers, which compute in `dtype`."""
    longest = min(layout.max_seqlen, layout.ids.shape[1])
    to_other = torch.arange(1 - longest, 1 + longest, device=layout.ids.device)
    distances = torch.stack([-to_other, to_other])  # DeBERTa counts from the key to the query
    buckets, most = config.position_buckets, most_distances(config.to_dict())
    if buckets > 0:
        distances = log_buckets(distances, buckets, most)
    span = buckets if buckets > 0 else most
    rows = (distances + span).clamp(0, 2 * span - 1)
    chosen = rows[..., None] == torch.arange(2 * span, device=rows.device)
    return DisentangledAttention(starts_of(layout), longest, chosen.to(dtype))


def log_buckets(distances: Tensor, buckets: int, most: int) -> Tensor:
    """Round distances beyond half the buckets to logarithmic ones.

    transformers' make_log_bucket_position does the same with numbers that it copies from the host,
    which a step that is captured cannot.
    """
    middle = buckets // 2
    inside = (distances < middle) & (distances > -middle)
    size = distances.abs().masked_fill(inside, middle - 1)
    whole = float(np.log(np.float32((most - 1) / middle)))
    rounded = torch.ceil(torch.log(size / middle) / whole * (middle - 1)) + middle
    return torch.where(size <= middle, distances, (rounded * distances.sign()).long())


def obstacle(
    config: PretrainedConfig, *, capability: tuple[int, int] | None, longest: int | None = None
) -> str | None:
    """Reason why a GPU of that compute capability cannot run this; None: it can.

    A `capability` of None stands for a GPU that is new enough.
    """
    if reason := triton_obstacle(capability):
        return reason
    return model_obstacle(config.to_dict(), longest)
