"""Settings of a classifier, as plain values that travel as JSON to the planner's process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from trainfit.conf.schema import EncoderModel, TokensModel
from trainfit.core.codec import Range, decode
from trainfit.core.errors import BadConfig, BadInput
from trainfit.core.plan_records import Quantization

Weights = Literal["auto", "random", "pretrained"]
WeightsDtype = Literal["float32", "bfloat16", "float16"]
Method = Literal["full", "frozen", "lora", "dora"]
Pooling = Literal["auto", "none", "mean", "first", "last", "max", "attention_kv", "attention_query"]
Attention = Literal["auto", "varlen", "varlen_efficient", "masked"]
Checkpointing = Literal["none", "selective", "full"]
Probability = Annotated[float, Range(0, 1)]
_AS_CONFIGURED = (
    "quantization",
    "pooling",
    "pool_tokens",
    "head_dropout",
    "attention_dropout",
    "feed_forward_dropout",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
)
"""Fields with the same name in a configuration."""
_TAGS = 32
"""Tags that a model of words is planned and timed with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierSettings:
    """Settings of an encoder classifier."""

    name: str
    """Name in the catalogue or on the hub, or a local folder."""
    classes: Annotated[int, Range(1)] = 2
    weights: Weights = "auto"
    """auto: random for a name of the catalogue, pretrained for a folder or a hub id."""
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)
    """Fields of the transformers config to change, such as num_hidden_layers."""
    dtype: WeightsDtype = "float32"
    """Dtype of the encoder's weights; head, pooler and adapters stay in float32."""
    method: Method = "full"
    quantization: Quantization = "none"
    """Format of the matrices in the encoder's blocks, where they are not trained."""
    pooling: Pooling = "mean"
    """auto: as the head does that transformers gives the model; its decoders stay causal.

    none: every token is classified."""
    words: bool = False
    """With pooling auto: take the head for tokens instead of that for sequences."""
    pool_tokens: Annotated[int, Range(1)] = 1
    """The k of first-k and last-k pooling."""
    attention: Attention = "auto"
    """auto: variable-length kernels for packed rows where available, else a mask. varlen: such a
    kernel or an error; varlen_efficient: torch's memory-efficient one."""
    attention_dropout: Probability | None = None
    """None: the value of the model's config."""
    feed_forward_dropout: Probability | None = None
    """None: the value of the model's config."""
    head_dropout: Probability | None = 0.1
    """None: that of the model's own head, 0.1 for any other."""
    checkpointing: Checkpointing = "none"
    """selective: every second block."""
    liger: bool = False
    """Use Liger's kernels for norms and gated feed-forwards."""
    lora_rank: Annotated[int, Range(1)] = 16
    lora_alpha: Annotated[float, Range(0)] = 32
    lora_dropout: Probability = 0.05

    def __post_init__(self) -> None:
        """Raise BadInput for weights in 4 or 8 bits that would have to be trained."""
        if self.quantization != "none" and self.method == "full":
            raise BadInput(
                f"quantization is {self.quantization}, and method=full trains the weights, which "
                "so few bits cannot hold",
                "set model.method to lora or dora, or model.freeze_encoder=true",
            )


def settings_from(model: EncoderModel, **decided: Any) -> ClassifierSettings:
    """Return the settings of a configuration.

    `decided` are further fields, and those that the configuration leaves at auto: `method` for
    model.freeze_encoder, `checkpointing` for model.use_gradient_checkpointing.
    """
    problems = [
        BadInput(f"{key} is still auto", f"set it to true or false, or decide {field}")
        for key, value, field in (
            ("model.freeze_encoder", model.freeze_encoder, "method"),
            ("model.use_gradient_checkpointing", model.use_gradient_checkpointing, "checkpointing"),
        )
        if value == "auto" and field not in decided
    ]
    if problems:
        raise BadConfig(problems)
    asked = {
        "name": model.name,
        "method": "frozen" if model.freeze_encoder is True else model.method,
        "checkpointing": {True: "full", "selective": "selective"}.get(
            model.use_gradient_checkpointing, "none"
        ),
        **{name: getattr(model, name) for name in _AS_CONFIGURED},
        **({"words": True, "classes": _TAGS} if isinstance(model, TokensModel) else {}),
    }
    return decode(ClassifierSettings, asked | decided, "model")
