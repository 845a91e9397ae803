"""Encoder, pooler, head: from tokens to one row of logits per sequence."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from trainfit.kernels.layout import Layout, lay_out
from trainfit.kernels.liger import use_liger
from trainfit.tasks.encoder.backbone import build_encoder, encode, packed_obstacle, traits_of
from trainfit.tasks.encoder.fake import build_anywhere
from trainfit.tasks.encoder.methods import checkpoint_blocks, train_by
from trainfit.tasks.encoder.pooling import build_pooler
from trainfit.tasks.encoder.settings import ClassifierSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


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
