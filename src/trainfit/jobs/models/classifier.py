"""Encoder, pooler, head: from tokens to one row of logits per sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from trainfit.core.errors import BadInput
from trainfit.jobs.models.adapters import checkpoint_blocks, train_by
from trainfit.jobs.models.backbone import build_encoder, encode, packed_obstacle, traits_of
from trainfit.jobs.models.building import build_anywhere
from trainfit.jobs.models.classifier_settings import ClassifierSettings, Pooling
from trainfit.kernels.layout import Layout, lay_out
from trainfit.kernels.supported import use_liger

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


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


def build_classifier(
    settings: ClassifierSettings, *, config: PretrainedConfig | None = None
) -> EncoderClassifier:
    """A classifier by its settings; with `config`, an encoder of that shape and random weights."""
    return build_anywhere(partial(_build, settings, config))


def _build(settings: ClassifierSettings, config: PretrainedConfig | None) -> EncoderClassifier:
    encoder = build_encoder(
        settings.name if config is None else config,
        weights=settings.weights,
        overrides=settings.overrides,
        attention_dropout=settings.attention_dropout,
        feed_forward_dropout=settings.feed_forward_dropout,
        dtype=settings.dtype,
    )
    checkpoint_blocks(encoder, settings.checkpointing)
    train_by(encoder, settings)
    if settings.liger:
        use_liger(encoder)
    return EncoderClassifier(encoder, settings)


class EncoderClassifier(nn.Module):
    """Classifies the sequences of padded rows (`attention_mask`) or a packed one (`cu_seqlens`)."""

    def __init__(self, encoder: PreTrainedModel, settings: ClassifierSettings) -> None:
        super().__init__()
        width = encoder.config.hidden_size
        self.settings = settings
        self.traits = traits_of(encoder)
        self.encoder = encoder
        self.pooler = build_pooler(settings.pooling, width, settings.pool_tokens)
        self.dropout = nn.Dropout(settings.head_dropout)
        self.head = nn.Linear(width, settings.classes)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        self.train()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Logits `[sequences, classes]`.

        Packed rows are `[1, T]`. `cu_seqlens` `[sequences + 1]` begins with 0 and ends where the
        filler starts; positions follow from it unless given.
        """
        return self.classify(
            self.pool(
                input_ids,
                attention_mask,
                token_type_ids=token_type_ids,
                position_ids=position_ids,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
            )
        )

    def pool(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Pooled sequences `[sequences, width]`, from what `forward` takes."""
        layout = lay_out(
            input_ids,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
        hidden = self.encode(
            input_ids, layout, token_type_ids=token_type_ids, position_ids=position_ids
        )
        pooled: Tensor = self.pooler(hidden, layout)
        return pooled

    def encode(
        self,
        input_ids: Tensor,
        layout: Layout,
        *,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Hidden states `[B, T, width]`. A frozen encoder's depend on nothing but the tokens."""
        with torch.no_grad() if self.settings.method == "frozen" else nullcontext():
            return encode(
                self.encoder,
                self.traits,
                input_ids,
                layout,
                path=self.settings.attention,
                token_type_ids=token_type_ids,
                position_ids=position_ids,
            )

    @property
    def packs_here(self) -> bool:
        """Whether a kernel attends within packed rows, as the model is set, on this device, now."""
        allowed = self.settings.attention != "masked"
        return allowed and packed_obstacle(self.encoder, self.traits) is None

    def classify(self, pooled: Tensor) -> Tensor:
        """Logits of pooled sequences `[sequences, width]`."""
        logits: Tensor = self.head(self.dropout(pooled))
        return logits

    def train(self, mode: bool = True) -> Self:
        """A frozen encoder stays without dropout: its outputs are features, and may be cached."""
        super().train(mode)
        if self.settings.method == "frozen":
            self.encoder.train(False)
        return self


IGNORED = -100
"""A label that does not count: it belongs to a sequence that only fills up a fixed number."""


def classification_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    class_weights: Tensor | None = None,
    weight: float | None = None,
) -> tuple[Tensor, float]:
    """The summed cross-entropy of a micro-batch, and its weight.

    Give the `weight` where it is known (`label_weight` of the labels before they go to the GPU):
    to ask labels on the GPU for it makes the CPU wait for them.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if class_weights is not None:
        class_weights = class_weights.to(logits)
    loss = functional.cross_entropy(
        logits, labels, class_weights, reduction="sum", ignore_index=IGNORED
    )
    return loss, label_weight(labels, class_weights) if weight is None else weight


def label_weight(labels: Tensor, class_weights: Tensor | None = None) -> float:
    """How much these labels count: their number, or the sum of the weights of their classes.

    Fake and meta tensors hold no values; there every label counts as one.
    """
    if isinstance(labels, FakeTensor) or labels.is_meta:
        return float(labels.numel())
    counted = labels[labels != IGNORED]
    if class_weights is None:
        return float(counted.numel())
    return float(class_weights.double()[counted].sum())
