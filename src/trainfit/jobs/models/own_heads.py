"""The head that transformers gives a model for classification, on gathered hidden states.

`AutoModelForSequenceClassification`, or `AutoModelForTokenClassification`, is built without its
encoder. In the encoder's place stands a module that hands on the hidden states that the head reads,
one per sequence or all, so that the class's own code computes the logits, whatever its family, and
the weights keep their names.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from trainfit.core.errors import refusing
from trainfit.data.model_files import read_named
from trainfit.jobs.models import sources
from trainfit.jobs.models.classifier_settings import ClassifierSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Reads = Literal["first", "last", "mean", "none"]
"""Tokens that a head reads: the first, the last, the mean of all, or each by itself (none)."""


class OwnHead(nn.Module):
    """A sequence- or token-classification class of transformers, without its encoder."""

    def __init__(self, model: PreTrainedModel, reads: Reads) -> None:
        super().__init__()
        self.model = model
        self.reads = reads

    def forward(self, pooled: Tensor) -> Tensor:
        """Compute logits from the hidden states that the head reads.

        They are `[sequences, width]`, or `[B, T, width]` where it reads each token by itself.
        """
        hidden = pooled if self.reads == "none" else pooled[:, None]
        # The token is no padding, or all are: a head that looks for the last finds the only one.
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=pooled.device)
        logits: Tensor = self.model(input_ids=ids, inputs_embeds=hidden).logits
        return logits

    @property
    def prefix(self) -> str:
        """Name of the encoder in the class."""
        return self.model.base_model_prefix

    def names(self, encoder: PreTrainedModel) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the weights of the whole classifier with this encoder."""
        inside = {f"{self.prefix}.{name}": one for name, one in encoder.state_dict().items()}
        both = inside | self.model.state_dict()
        return {name: tuple(tensor.shape) for name, tensor in both.items()}

    def drop(self, probability: float) -> bool:
        """Set the dropout of the head; return False if it has none."""
        layers = [one for one in self.model.modules() if isinstance(one, nn.Dropout)]
        for layer in layers:
            layer.p = probability
        return bool(layers)


class _Given(nn.Module):
    """Stands for the encoder: returns the hidden states that it is given, and the pooler's."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.pooler = getattr(encoder, "pooler", None)
        self.activation = getattr(encoder, "pooler_activation", None)  # ALBERT's pooler is a matrix

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        pooled = None
        if self.pooler is not None and self.activation is not None:
            pooled = self.activation(self.pooler(inputs_embeds[:, 0]))
        elif self.pooler is not None:
            pooled = self.pooler(inputs_embeds)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=inputs_embeds,  # type: ignore[arg-type]
            pooler_output=pooled,
        )


def find_head(source: str | PretrainedConfig, settings: ClassifierSettings) -> OwnHead | None:
    """Build the model's own head on the meta device; None where transformers has none to take."""
    config, _ = sources.find(source, settings.weights, settings.overrides, published=True)
    text = config.get_text_config()
    with refusing(partial(sources.unbuildable, text.model_type)):
        shell = _without_encoder(text, settings)
        reads = None if shell is None else _reads(shell)
    return None if shell is None or reads is None else OwnHead(shell, reads)


def fill_head(
    head: OwnHead,
    encoder: PreTrainedModel,
    source: str | PretrainedConfig,
    settings: ClassifierSettings,
) -> None:
    """Give a head its weights: those beside the encoder's, and random ones for all others.

    The encoder's pooler becomes the head's, since it is trained where the encoder is not.
    """
    model: Any = head.model
    model.to_empty(device=encoder.device)
    for module in model.modules():
        model._init_weights(module)
    given = getattr(model, head.prefix)
    if given.pooler is not None:
        given.pooler = encoder.pooler
    if getattr(encoder, "pooler", None) is not None:
        encoder.register_module("pooler", None)
    _, place = sources.find(source, settings.weights, settings.overrides, published=True)
    if place is not None:
        _load(model, read_named(place, set(model.state_dict())))
    head.float()


def _without_encoder(
    config: PretrainedConfig, settings: ClassifierSettings
) -> PreTrainedModel | None:
    from transformers import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    )

    known: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if settings.words:
        known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    if type(config) not in known:
        return None
    kind: Any = known[type(config)]
    config = copy.deepcopy(config)
    config.num_labels = settings.classes
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # else last-token heads take one sequence at a time
    with torch.device("meta"):
        model: PreTrainedModel = kind(config)
    encoder = getattr(model, model.base_model_prefix, None)
    if encoder is None or encoder is model:
        return None
    setattr(model, model.base_model_prefix, _Given(encoder))
    return model


@torch.no_grad()
def _reads(shell: PreTrainedModel) -> Reads | None:
    """Find out by trial which tokens a head reads; None for none of the known ways."""
    with torch.device("cpu"):
        model: Any = copy.deepcopy(shell)
        model.to_empty(device="cpu").eval()
        for weight in (*model.parameters(), *model.buffers()):
            weight.copy_(torch.arange(weight.numel()).sin().reshape(weight.shape))
        width = shell.config.hidden_size
        hidden = torch.arange(3 * width).cos().reshape(1, 3, width)
        ids = torch.full((1, 3), (shell.config.pad_token_id or 0) + 1)
        ways: dict[Reads, Tensor] = {
            "first": hidden[:, :1],
            "last": hidden[:, -1:],
            "mean": hidden.mean(1, keepdim=True),
            "none": hidden.transpose(0, 1),
        }
        try:
            wanted = model(input_ids=ids, inputs_embeds=hidden).logits
            for way, state in ways.items():
                found = model(
                    input_ids=ids[:, :1].expand(len(state), 1), inputs_embeds=state
                ).logits
                if found.numel() == wanted.numel() and torch.allclose(
                    found.reshape(wanted.shape), wanted, rtol=1e-3, atol=1e-4
                ):
                    return way
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
            return None  # it needs more than hidden states
    return None


@torch.no_grad()
def _load(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Take the weights whose shapes fit, as a head of as many classes."""
    own = model.state_dict()
    for name, weight in weights.items():
        if own[name].shape == weight.shape:
            own[name].copy_(weight)
