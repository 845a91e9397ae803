"""From one vector per token to one per sequence, alike for padded and packed rows.

Tokens are gathered by the sequence they belong to; padding and filler go to a row that is dropped.
Sums are made in float32 at least: a mean over hundreds of bf16 tokens would lose its digits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfit.errors import BadInput
from trainfit.kernels.layout import Layout
from trainfit.tasks.encoder.settings import Pooling

_PROBES = 8
"""Learned keys and values of the key/value probe."""


def build_pooler(pooling: Pooling, width: int, tokens: int = 1) -> nn.Module:
    """A module that turns hidden states `[B, T, width]` and a `Layout` into `[sequences, width]`.

    `tokens` is the k of first-k and last-k.
    """
    poolers: dict[Pooling, Callable[[], nn.Module]] = {
        "mean": partial(MeanPooler, "mean", tokens),
        "first": partial(MeanPooler, "first", tokens),
        "last": partial(MeanPooler, "last", tokens),
        "max": MaxPooler,
        "attention_kv": partial(KeyValueProbePooler, width),
        "attention_query": partial(QueryProbePooler, width),
    }
    if pooling not in poolers:
        raise BadInput(f"unknown pooling {pooling!r}", f"choose {', '.join(poolers)}")
    return poolers[pooling]()


class MeanPooler(nn.Module):
    """The mean of all tokens, of the first k or of the last k; all, where there are fewer."""

    def __init__(self, which: Literal["mean", "first", "last"], tokens: int) -> None:
        super().__init__()
        self.which = which
        self.tokens = tokens

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        lengths = _per_token(layout.lengths, layout)
        if self.which == "mean":
            share = 1 / _precise(lengths, hidden)
        else:
            first = layout.positions < self.tokens
            last = layout.positions >= lengths - self.tokens
            chosen = first if self.which == "first" else last
            share = chosen / _precise(lengths.clamp(max=self.tokens), hidden)
        return _gather(hidden * share[..., None], layout)


class MaxPooler(nn.Module):
    """The largest value of each feature."""

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        largest = _largest(hidden.flatten(0, 1), layout)[: layout.sequences]
        # A sequence of no tokens has no largest; zero, as its mean would be.
        largest = largest.masked_fill(layout.lengths[:, None] == 0, 0)
        return _precise(largest, hidden)


class QueryProbePooler(nn.Module):
    """A learned query attends to the tokens of each sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = _heads(width)
        self.probe = nn.Parameter(torch.randn(self.heads, width // self.heads))
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        hidden = _precise(hidden, hidden)
        key = self.key(hidden).unflatten(-1, self.probe.shape)
        value = self.value(hidden).unflatten(-1, self.probe.shape)
        logits = (key * self.probe).sum(-1) * self.probe.shape[-1] ** -0.5
        shares = _softmax(logits, layout)
        pooled: Tensor = self.output(_gather(shares[..., None] * value, layout).flatten(1))
        return pooled


class KeyValueProbePooler(nn.Module):
    """Each token attends to learned keys and values; what it finds is averaged."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = _heads(width)
        shape = (self.heads, _PROBES, width // self.heads)
        self.keys = nn.Parameter(torch.randn(shape))
        self.values = nn.Parameter(torch.randn(shape))
        self.query = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mean = MeanPooler("mean", 1)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        query = self.query(_precise(hidden, hidden)).unflatten(-1, (self.heads, -1))
        found = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            self.keys.to(query.dtype).expand(len(query), -1, -1, -1),
            self.values.to(query.dtype).expand(len(query), -1, -1, -1),
        )
        pooled: Tensor = self.output(self.mean(found.transpose(1, 2).flatten(2), layout))
        return pooled


def _heads(width: int) -> int:
    return next(heads for heads in (8, 4, 2, 1) if width % heads == 0)


def _precise(values: Tensor, like: Tensor) -> Tensor:
    return values.to(torch.promote_types(like.dtype, torch.float32))


def _per_token(values: Tensor, layout: Layout) -> Tensor:
    """The value of its sequence for each token; 1 for padding and filler."""
    return torch.cat([values, values.new_ones(1)])[layout.ids]


def _gather(values: Tensor, layout: Layout) -> Tensor:
    """The sum of `values` `[B, T, …]` over the tokens of each sequence."""
    flat = values.flatten(0, 1)
    sums = flat.new_zeros(layout.sequences + 1, *flat.shape[1:])
    return sums.index_add(0, layout.ids.flatten(), flat)[: layout.sequences]


def _largest(flat: Tensor, layout: Layout) -> Tensor:
    """The largest of each column over each sequence, and in a last row over what is in none."""
    start = flat.new_full((layout.sequences + 1, flat.shape[1]), float("-inf"))
    index = layout.ids.flatten()[:, None].expand_as(flat)
    return start.scatter_reduce(0, index, flat, "amax")


def _softmax(logits: Tensor, layout: Layout) -> Tensor:
    """Softmax of `logits` `[B, T, heads]` over the tokens of each sequence."""
    logits = _precise(logits, logits)
    with torch.no_grad():
        peak = _largest(logits.flatten(0, 1), layout)[layout.ids]
    weights = (logits - peak).exp()
    sums = _gather(weights, layout)
    return weights / torch.cat([sums, sums.new_ones(1, sums.shape[1])])[layout.ids]
