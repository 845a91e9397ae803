"""Settings of a classifier, and facts of its model that decide how it can be planned.

Both are plain values, without torch: settings travel as JSON to the planner's process, and facts
are read from the model's config alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from trainfit.conf.schema import EncoderModel, TokensModel
from trainfit.core.codec import Range, decode
from trainfit.core.errors import BadConfig, BadInput
from trainfit.core.plan_records import Quantization
from trainfit.data.hub import may_be_on_hub
from trainfit.data.model_files import read_config
from trainfit.hardware import model_shapes
from trainfit.kernels import supported
from trainfit.kernels.supported import (
    CAPPED_HEADS,
    LARGEST_HEAD,
    NOT_RECOMPUTED,
    OVERFLOWS_FP16,
    OWN_ATTENTION,
    model_obstacle,
)

if TYPE_CHECKING:
    from trainfit.data.tokens import Tokens

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


# ── facts of a model ──────────────────────────────────────────────────────────────────────────────


_TABLES = {"albert", "bert", "distilbert", "electra"}
_OFFSET_TABLES = {"camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"}
"""Types of encoders with a table of positions, from the first row or after that of padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts of a model's config that decide how it can be planned."""

    layers: int
    own_gpt: bool
    unpackable: str | None
    own_attention: bool
    packed_attention: str
    window: int | None
    """Tokens that windowed layers see to either side, at least; None: all see every token."""
    fp16_overflows: bool
    """Hidden states leave the range of float16."""
    not_recomputed: str | None
    no_liger: str | None
    vocabulary: int
    """Number of tokens in its vocabulary."""
    positions: int | None
    """Longest sequence of a model with a table of positions; None: any, or not known."""


def model_facts(name: str, pooling: str = "mean", longest: int | None = None) -> ModelFacts:
    """Read the facts of a model from the catalogue, a folder or the hub, without building it.

    With `pooling` auto a decoder is causal. `longest` is the length of the longest sequence.
    """
    fields = model_fields(name)
    kind = fields.get("model_type")
    layers = model_shapes.layers_of(fields)
    if not isinstance(kind, str) or not isinstance(layers, int) or layers < 1:
        lacks = "num_hidden_layers" if isinstance(kind, str) else "model_type"
        fix = "give a complete config.json, of the BERT, DeBERTa, Gemma, Llama or Qwen families"
        raise BadInput(f"the config of {name} has no {lacks}", fix)
    unpackable = _unpackable(name, kind, fields, longest)
    if unpackable is None and pooling == "auto" and fields.get("attn_logit_softcapping"):
        unpackable = f"{name} has soft-capped logits, whose kernel for packed rows looks both ways"
    return ModelFacts(
        layers=layers,
        own_gpt=kind == model_shapes.OWN_GPT,
        unpackable=unpackable,
        own_attention=kind in OWN_ATTENTION,
        packed_attention=_packed_attention(kind, fields),
        window=_window(fields),
        fp16_overflows=kind in OVERFLOWS_FP16,
        not_recomputed=f"transformers cannot compute the blocks of {name} again"
        if kind in NOT_RECOMPUTED
        else None,
        no_liger=supported.obstacle(kind),
        vocabulary=int(fields.get("vocab_size") or 0),
        positions=_positions(kind, fields),
    )


def model_fields(name: str) -> dict[str, Any]:
    """Read the fields of a model's config (of its text part) from a folder, catalogue or hub."""
    folder = Path(name)
    if folder.is_dir():
        fields = model_shapes.read_model_config(folder)
    else:
        try:
            fields = model_shapes.model_shape(name).config
        except BadInput:
            if not may_be_on_hub(name):
                raise
            fields = read_config(name)
    text: dict[str, Any] = fields.get("text_config") or fields
    return text


def _unpackable(name: str, kind: str, fields: dict[str, Any], longest: int | None) -> str | None:
    if kind in OWN_ATTENTION:
        reason = model_obstacle(fields, longest)
        return None if reason is None else f"{name} has its own attention, and {reason}"
    heads, width = model_shapes.heads_of(fields), model_shapes.width_of(fields)
    head = fields.get("head_dim") or (width // heads if heads and width else 64)
    capped = bool(fields.get("attn_logit_softcapping"))
    if head % 8 or head > LARGEST_HEAD or (capped and head not in CAPPED_HEADS):
        return f"{name} has heads of {head}"
    return None


def _packed_attention(kind: str, fields: dict[str, Any]) -> str:
    if kind in OWN_ATTENTION:
        return "disentangled"
    return "softcapped" if fields.get("attn_logit_softcapping") else "varlen"


def _window(fields: dict[str, Any]) -> int | None:
    """Half of the config's window: some families count both sides, and Gemma 3 halves its own."""
    size = fields.get("sliding_window") or fields.get("local_attention")
    kinds = fields.get("layer_types") or ["sliding_attention"]
    if not size or "sliding_attention" not in kinds or fields.get("use_sliding_window") is False:
        return None
    return int(size) // 2


def _positions(kind: str, fields: dict[str, Any]) -> int | None:
    """Rows of a table of positions, less those that RoBERTa and its kin leave out."""
    size = fields.get("max_position_embeddings")
    if kind not in _TABLES | _OFFSET_TABLES or not isinstance(size, int):
        return None
    if kind in _TABLES:
        return size
    pad = fields.get("pad_token_id", 1)
    return size - pad - 1 if isinstance(pad, int) else None


def check_vocabulary(name: str, parts: Iterable[Tokens]) -> None:
    """Raise BadInput for a token that a model has no embedding for."""
    rows = model_facts(name).vocabulary
    arrays = {id(part.ids): part.ids for part in parts}  # most parts share one
    largest = max(int(ids.max()) for ids in arrays.values())
    if rows and largest >= rows:
        raise BadInput(
            f"the tokenizer makes token {largest}, and {name} has embeddings for {rows} only",
            "give a folder whose tokenizer goes with its weights",
        )
