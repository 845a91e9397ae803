"""Classifier of an encoder, a pooler and a head: a row of logits per sequence, or per token."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.jobs.models import sources
from trainfit.jobs.models.backbone import build_encoder, encode, packed_path, traits_of
from trainfit.jobs.models.building import (
    OwnHead,
    build_anywhere,
    checkpoint_blocks,
    fill_head,
    find_head,
    train_by,
)
from trainfit.jobs.models.classifier_settings import ClassifierSettings, Pooling
from trainfit.kernels.attention import Layout, lay_out
from trainfit.kernels.fused_ops import IGNORED
from trainfit.kernels.supported import OVERFLOWS_FP16, use_liger

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# ── Gemma in float16 ─────────────────────────────────────────────────────────────────────────────
# Published Gemma 2 and 3 have hidden states beyond 65,504, float16's largest number, and so have
# the inputs of their down-projections. Under an autocast to float16 the stream between blocks and
# the outputs of norms are float32 here, and each token's input of a down-projection is divided by
# a power of two, which its output is multiplied by again. Matrix products stay in float16.

_HEAD_NORMS = ("q_norm", "k_norm")
"""Norms of queries and keys, whose results are small."""
_LARGEST_INPUT = 256.0
"""Bound of the inputs of a down-projection: a sum over thousands of them stays within range."""


def keep_in_range(model: Any) -> None:
    """Scale the values of a model that exceed float16; other models are unchanged."""
    if model.config.model_type not in OVERFLOWS_FP16:
        return
    model.get_input_embeddings().register_forward_hook(_wide_output)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and not name.endswith(_HEAD_NORMS):
            module.register_forward_pre_hook(_wide_input)
        elif kind.endswith("MLP"):
            module.plain_forward = module.forward
            module.forward = MethodType(_feed_forward, module)


def in_float16(tensor: Tensor) -> bool:
    """Tell if matrix products of a tensor are computed in float16."""
    kind = tensor.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16


def _wide_output(_module: nn.Module, _given: Any, output: Tensor) -> Tensor:
    return output.float() if in_float16(output) else output


def _wide_input(_module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (given[0].float(), *given[1:]) if in_float16(given[0]) else given


def _feed_forward(self: Any, hidden: Tensor) -> Tensor:
    """Compute a gated feed-forward, in float16 with a factor for each token."""
    if not in_float16(hidden):
        plain: Tensor = self.plain_forward(hidden)
        return plain
    gate, up = self.act_fn(self.gate_proj(hidden)), self.up_proj(hidden)
    factor = _factor(gate, up)
    inner = (gate / factor.to(gate.dtype)) * up
    wide: Tensor = self.down_proj(inner).float() * factor
    return wide


@torch.no_grad()
def _factor(gate: Tensor, up: Tensor) -> Tensor:
    """Power of two, at least 1, that brings each token's product of the two below the bound."""
    largest = (gate.float() * up.float()).abs().amax(-1, keepdim=True)
    return torch.exp2(torch.ceil(torch.log2(largest / _LARGEST_INPUT))).clamp(1.0, 2.0**15)


# ── the classifier ───────────────────────────────────────────────────────────────────────────────


_PROBES = 8
"""Learned keys and values of the key/value probe."""


def build_pooler(pooling: Pooling, width: int, tokens: int = 1) -> nn.Module:
    """Build the module from hidden states `[B, T, width]` and a `Layout` to `[sequences, width]`.

    `tokens` is the k of first-k and last-k. With none, the hidden states stay as they are.
    """
    poolers: dict[Pooling, Callable[[], nn.Module]] = {
        "none": NoPooler,
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


class NoPooler(nn.Module):
    """Every token by itself, in float32 or wider."""

    def forward(self, hidden: Tensor, _layout: Layout) -> Tensor:
        return _precise(hidden, hidden)


class MeanPooler(nn.Module):
    """Mean of all tokens, of the first k or of the last k (of all if there are fewer)."""

    def __init__(self, which: Literal["mean", "first", "last"], tokens: int) -> None:
        super().__init__()
        self.which = which
        self.tokens = tokens

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        # Of each token's sequence; 1 for padding and filler.
        lengths = torch.cat([layout.lengths, layout.lengths.new_ones(1)])[layout.ids]
        if self.which == "mean":
            share = 1 / _precise(lengths, hidden)
        else:
            first = layout.positions < self.tokens
            last = layout.positions >= lengths - self.tokens
            chosen = first if self.which == "first" else last
            share = chosen / _precise(lengths.clamp(max=self.tokens), hidden)
        return _gather(hidden * share[..., None], layout)


class MaxPooler(nn.Module):
    """Maximum of each feature."""

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        largest = _largest(hidden.flatten(0, 1), layout)[: layout.sequences]
        # An empty sequence has no maximum: zero, as its mean.
        largest = largest.masked_fill(layout.lengths[:, None] == 0, 0)
        return _precise(largest, hidden)


class QueryProbePooler(nn.Module):
    """Attention of a learned query to the tokens of each sequence."""

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
    """Mean over the tokens, each of which attends to learned keys and values."""

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


def _gather(values: Tensor, layout: Layout) -> Tensor:
    """Sum `values` `[B, T, …]` over the tokens of each sequence."""
    flat = values.flatten(0, 1)
    sums = flat.new_zeros(layout.sequences + 1, *flat.shape[1:])
    return sums.index_add(0, layout.ids.flatten(), flat)[: layout.sequences]


def _largest(flat: Tensor, layout: Layout) -> Tensor:
    """Maximum of each column by sequence; the last row is that of padding and filler."""
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
    """Build a classifier; with `config`, its encoder has that shape and random weights."""
    return build_anywhere(partial(_build, settings, config))


def try_building(settings: ClassifierSettings) -> EncoderClassifier:
    """Build a classifier on the meta device in milliseconds; BadInput where that cannot be."""
    with torch.device("meta"), sources.without_warnings():
        return build_classifier(settings)


def _build(settings: ClassifierSettings, config: PretrainedConfig | None) -> EncoderClassifier:
    source = settings.name if config is None else config
    head = find_head(source, settings) if settings.pooling == "auto" else None
    if settings.pooling == "auto" and head is None:
        kind = sources.find(source, settings.weights, settings.overrides)[0].model_type
        pooling: Pooling = "none" if settings.words else "mean"
        instead = "it is linear" if settings.words else "pooling is mean"
        text = f"transformers has no head for {kind} that can be taken: {instead}"
        warnings.warn(text, TrainfitWarning, stacklevel=2)
        settings = replace(settings, pooling=pooling)
    encoder = build_encoder(
        source,
        weights=settings.weights,
        overrides=settings.overrides,
        attention_dropout=settings.attention_dropout,
        feed_forward_dropout=settings.feed_forward_dropout,
        dtype=settings.dtype,
        quantization=settings.quantization,
        published=head is not None,
    )
    if head is not None:
        fill_head(head, encoder, source, settings)
    checkpoint_blocks(encoder, settings.checkpointing)
    train_by(encoder, settings)
    if settings.liger:
        use_liger(encoder)
    keep_in_range(encoder)
    return EncoderClassifier(encoder, settings, head)


class EncoderClassifier(nn.Module):
    """Classifies the sequences of padded rows (`attention_mask`) or a packed one (`cu_seqlens`)."""

    pooler: nn.Module
    dropout: nn.Module
    head: nn.Module

    def __init__(
        self, encoder: PreTrainedModel, settings: ClassifierSettings, head: OwnHead | None = None
    ) -> None:
        super().__init__()
        self.settings = settings
        self.traits = traits_of(encoder)
        self.encoder = encoder
        if head is None:
            self._add_head(encoder.config.hidden_size)
        else:
            self._take_head(head, encoder.config.hidden_size)
        self.train()

    def _add_head(self, width: int) -> None:
        settings = self.settings
        self.pooler = build_pooler(settings.pooling, width, settings.pool_tokens)
        self.dropout = nn.Dropout(0.1 if settings.head_dropout is None else settings.head_dropout)
        self.head = linear = nn.Linear(width, settings.classes)
        nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)

    def _take_head(self, head: OwnHead, width: int) -> None:
        """Take the model's own head, which has its own dropout or gets it before it."""
        asked = self.settings.head_dropout
        before = asked is not None and not head.drop(asked)
        self.pooler = build_pooler(head.reads, width)
        self.dropout = nn.Dropout(asked or 0.0) if before else nn.Identity()
        self.head = head

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **rows: Any
    ) -> Tensor:
        """Compute logits from the arguments of `pool`.

        They are `[sequences, classes]`, or `[B, T, classes]` where nothing is pooled.
        """
        return self.classify(self.pool(input_ids, attention_mask, **rows))

    def pool(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Compute pooled sequences `[sequences, width]`.

        Packed rows are `[1, T]`. `cu_seqlens` `[sequences + 1]` begins with 0 and ends where the
        filler starts.
        """
        layout = lay_out(
            input_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen
        )
        pooled: Tensor = self.pooler(self.encode(input_ids, layout, token_type_ids), layout)
        return pooled

    def encode(
        self, input_ids: Tensor, layout: Layout, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Compute hidden states `[B, T, width]`, without gradients for a frozen encoder."""
        path = self.settings.attention
        with torch.no_grad() if self.settings.method == "frozen" else nullcontext():
            return encode(self.encoder, self.traits, input_ids, layout, token_type_ids, path=path)

    def packs_here(self, longest: int) -> bool:
        """Tell if a kernel attends to packed sequences of such lengths with these settings."""
        allowed = self.settings.attention != "masked"
        return allowed and packed_path(self.encoder, self.traits, longest=longest)[0] is not None

    def classify(self, pooled: Tensor) -> Tensor:
        """Compute the logits of pooled sequences `[sequences, width]`."""
        logits: Tensor = self.head(self.dropout(pooled))
        return logits

    def train(self, mode: bool = True) -> Self:
        """Switch the mode; a frozen encoder stays without dropout, as its outputs are cached."""
        super().train(mode)
        if self.settings.method == "frozen":
            self.encoder.train(False)
        return self


class Head(nn.Module):
    """Dropout and head of a classifier, on pooled outputs of a frozen encoder."""

    def __init__(self, model: EncoderClassifier) -> None:
        super().__init__()
        self.dropout, self.head = model.dropout, model.head

    def forward(self, pooled: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(pooled))
        return logits


def classification_loss(
    logits: Tensor, labels: Tensor, class_weights: Tensor | None = None
) -> Tensor:
    """Sum the cross-entropy of a micro-batch's sequences or tokens in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if class_weights is not None:
        class_weights = class_weights.to(logits)
    rows = logits.flatten(0, -2)
    return functional.cross_entropy(
        rows, labels.flatten(), class_weights, reduction="sum", ignore_index=IGNORED
    )
