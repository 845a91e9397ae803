"""Shapes of the models that the documents name, planned and built without a download."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from trainfit.core import codec
from trainfit.core.codec import Length, Range, decode
from trainfit.core.errors import BadConfig, BadInput, did_you_mean, reason
from trainfit.core.libraries import import_generation
from trainfit.core.records import Record

if TYPE_CHECKING:
    from transformers import PretrainedConfig


OWN_GPT = "trainfit_gpt"
"""The `model_type` of trainfit's own GPT, which transformers does not know."""
_WELL_KNOWN = ("bert-base", "roberta-base", "deberta-v3-base", "gemma-3-1b-it", "gpt2", "gpt-small")
"""Examples for whoever gave a name that is near none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Published facts of a model, enough to build it with random weights."""

    slug: str
    hub: str | None
    """The id on the Hugging Face hub; None for trainfit's own models."""
    names: tuple[str, ...]
    """Further spellings that mean the same model."""
    kind: Literal["encoder", "decoder"]
    """Attention as published: a decoder attends backwards only, an encoder both ways."""
    parameters: Annotated[int, Range(1)]
    """Exact number in the backbone, tied weights counted once."""
    parameters_note: str
    """Remark on which weights the number counts and which it leaves out."""
    published: str | None = None
    """The number as published, rounded or cut off, such as "110M"; None for trainfit's own."""
    published_counts: Literal["model", "language model", "classifier without embeddings"] = "model"
    """Weights that the published number counts: the backbone, or transformers' class for a task."""
    source: str
    """Publication of the number; the config is that of the hub."""
    config: dict[str, Any] = field(hash=False)
    """Fields of its transformers config with `model_type`; read-only."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every name that `model_shape` accepts for it."""
        on_hub = [self.hub, self.hub.rpartition("/")[2]] if self.hub else []
        return tuple({name.lower(): name for name in (*self.names, *on_hub, self.slug)}.values())


@cache
def model_shapes() -> tuple[ModelShape, ...]:
    """Read every model of the catalogue."""
    text = resources.files("trainfit.hardware").joinpath("models.json").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = {}
    for row in json.loads(text):
        rows[row["slug"]] = _filled(row, rows[row["like"]] if "like" in row else {})
    complete = [row | {"config": _with_layer_types(row["config"])} for row in rows.values()]
    return decode(tuple[ModelShape, ...], complete, "models.json")


def _filled(row: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Add what a row leaves out, from the model that it is like."""
    config = like.get("config", {}) | row.get("config", {})
    own = {key: value for key, value in row.items() if key != "like"}
    return {**like, "names": [], **own, "config": config}


def _with_layer_types(config: Mapping[str, Any]) -> dict[str, Any]:
    """Repeat the pattern of layers, which is no field of transformers, over all of them."""
    fields = {key: value for key, value in config.items() if key != "layer_pattern"}
    if "layer_pattern" in config:
        layers = config["num_hidden_layers"]
        fields["layer_types"] = (config["layer_pattern"] * layers)[:layers]
    return fields


@cache
def _by_spelling() -> dict[str, ModelShape]:
    return {name.lower(): shape for shape in model_shapes() for name in shape.spellings}


def model_shape(name: str) -> ModelShape:
    """Find a model by its slug, hub id or another of its names, in any case."""
    shape = _by_spelling().get(name.strip().lower())
    if shape is not None:
        return shape
    spellings = [spelling for shape in model_shapes() for spelling in shape.spellings]
    some = f"the catalogue has {len(model_shapes())} models, such as {', '.join(_WELL_KNOWN)}."
    near = did_you_mean(name.strip(), spellings, some)
    fix = f"{near} For any other model give a local folder that holds its config.json"
    raise BadInput(f"unknown model {name!r}", fix)


def transformers_config(shape: ModelShape, **overrides: Any) -> PretrainedConfig:
    """Build a transformers config of the model with `overrides`.

    Some fields act only while the config is built: Gemma 3 halves its sliding window when
    `use_bidirectional_attention` is set.
    """
    if shape.config["model_type"] == OWN_GPT:
        raise BadInput(
            f"{shape.slug} is trainfit's own GPT architecture, not a transformers model",
            "build it with the gpt task, or name a model that is on the hub, such as gpt2",
        )
    import_generation()  # which some of its config classes import
    from transformers import AutoConfig

    # A copy, since a config edits the lists and dicts that it is given.
    config: PretrainedConfig = AutoConfig.for_model(**deepcopy(shape.config) | overrides)
    return config


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes(Record):
    """Sizes of a transformer that decide its memory and its work."""

    family: str
    """The `model_type` of its config."""
    layers: int
    hidden: int
    heads: int
    attention: int
    """Width of all queries together: the heads times their size."""
    keys: int
    """Width of all keys together, and of all values."""
    inner: int
    """Width of the feed-forward."""
    vocabulary: int
    positions: int
    """Longest sequence that it has positions for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Sizes of a model that decide its operations."""

    weights: int
    """Weights that every token is multiplied by."""
    passed: int
    """Part of `weights` that a gradient passes through."""
    trained: int
    """Part of `weights` that is trained."""
    width: int
    """Attention heads times their size."""
    full_layers: int
    windowed_layers: int = 0
    window: int = 0
    """Distance from which on a windowed layer does not see a token."""

    def of_step(self, lengths: Sequence[int]) -> float:
        """Count the forward and backward pass over sequences of these lengths."""
        full = sum(length * length for length in lengths)
        near = sum(_pairs(length, self.window) for length in lengths) if self.windowed_layers else 0
        attention = 4.0 * self.width * (self.full_layers * full + self.windowed_layers * near)
        passes = 3.0 if self.passed else 1.0  # attention has no weights, and two gradients
        return 2.0 * (self.weights + self.passed + self.trained) * sum(lengths) + passes * attention


def _pairs(length: int, window: int) -> int:
    """Pairs of tokens less than `window` apart."""
    near = min(length, window)
    return length * (2 * near - 1) - near * (near - 1)


def sizes_of(fields: Mapping[str, Any]) -> ModelSizes | None:
    """Read the sizes from a model's config; None where it lacks one, or has other weights too."""
    layers, hidden, heads = layers_of(fields), width_of(fields), heads_of(fields)
    vocabulary = fields.get("vocab_size")
    positions = _first(fields, (*_KINDS[_Positions], "block_size"))
    if not (layers and hidden and heads and vocabulary and positions):
        return None
    if any(name.endswith("_experts") for name in fields) or fields.get("conv_kernel_size"):
        return None
    size = fields.get("head_dim") or hidden // heads
    return ModelSizes(
        family=str(fields.get("model_type")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        attention=heads * size,
        keys=(fields.get("num_key_value_heads") or heads) * size,
        inner=_first(fields, _KINDS[_Inner | None]) or 4 * hidden,
        vocabulary=vocabulary,
        positions=positions,
    )


_Layers = Annotated[int, Range(1, 512)]
_Width = Annotated[int, Range(1, 65_536)]
_Inner = Annotated[int, Range(1, 2**20)]
_Heads = Annotated[int, Range(1, 1024)]
_Positions = Annotated[int, Range(1, 2**25)]
_Share = Annotated[float, Range(0, 1)]
_Name = Annotated[str, Length(1, 100)]
_DROPOUTS = """
    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout dropout embd_pdrop
    embedding_dropout hidden_dropout hidden_dropout_prob mlp_dropout pooler_dropout resid_pdrop
"""
_ROPE = "global_rope_theta local_rope_theta query_pre_attn_scalar rope_local_base_freq rope_theta"
_KINDS: dict[Any, tuple[str, ...]] = {
    Annotated[int, Range(1, 2**24)]: ("vocab_size", "embedding_size"),
    _Layers: ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    Annotated[int, Range(1)]: ("num_hidden_groups", "conv_groups"),
    _Width: ("hidden_size", "n_embd", "d_model", "dim"),
    _Heads: ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    _Heads | None: ("num_key_value_heads",),
    Annotated[int, Range(1, 8192)] | None: ("head_dim", "attention_head_size"),
    _Inner | None: ("intermediate_size", "d_ff", "n_inner", "ffn_dim", "hidden_dim"),
    _Positions: ("max_position_embeddings", "n_positions", "n_ctx"),
    Annotated[int, Range(1, 2**25)] | None: ("sliding_window", "local_attention"),
    Annotated[int, Range(0, 65_536)]: ("type_vocab_size",),
    Annotated[int, Range(-1, 2**24)] | None: ("pad_token_id",),
    Annotated[int, Range(-1, 2**20)]: ("position_buckets", "max_relative_positions"),
    _Share | None: tuple(_DROPOUTS.split()),
    _Share: ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rms_norm_eps"),
    Annotated[float, Range(1, 1e12)] | None: tuple(_ROPE.split()),
    Annotated[float, Range(0, 1000)]: ("initializer_range", "initializer_factor"),
    _Name: ("model_type", "hidden_act", "hidden_activation", "activation_function", "conv_act"),
    tuple[str, ...] | None: ("layer_types",),
    str | tuple[str, ...] | None: ("pos_att_type",),
    Annotated[int, Range(0, 1024)] | None: ("conv_kernel_size",),
}
"""Type and bounds of each field, with its names in the families of models."""
_TYPES = {name: kind for kind, names in _KINDS.items() for name in names}
_FIX = "give a folder that save_pretrained wrote"


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read and check the fields of config.json in a model's folder."""
    path = folder / "config.json"
    try:
        fields = codec.read_object(path)
    except FileNotFoundError:
        raise BadInput(f"no config.json in {folder}", _FIX) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read config.json in {folder} ({reason(error)})", _FIX) from None
    check_fields(fields, str(folder))
    return fields


def check_fields(fields: Mapping[str, Any], name: str) -> None:
    """Raise BadInput with everything that is wrong in the config of the model `name`."""
    where = f"the config of {name}"
    nested = fields.get("text_config")
    problems = list(_problems(fields, where))
    if nested is not None and not isinstance(nested, Mapping):
        problems.append(BadInput(f"{where}: text_config is no object", _FIX))
    elif nested is not None:
        problems += _problems(nested, f"{where}: text_config")
    if problems:
        raise problems[0] if len(problems) == 1 else BadConfig(problems)


def _problems(fields: Mapping[str, Any], where: str) -> Iterator[BadInput]:
    wrong = False
    for name, value in fields.items():
        if name not in _TYPES:
            continue
        try:
            codec.decode(_TYPES[name], value, where, name)
        except BadInput as error:
            wrong = True
            yield error
    if not wrong:
        yield from _contradictions(fields, where)


def _contradictions(fields: Mapping[str, Any], where: str) -> Iterator[BadInput]:
    """Yield errors for sizes that contradict each other."""
    width, heads = (_first(fields, _KINDS[kind]) for kind in (_Width, _Heads))
    groups, pad = fields.get("num_key_value_heads"), fields.get("pad_token_id")
    vocabulary, layers = fields.get("vocab_size"), fields.get("num_hidden_layers")
    if width and heads and not fields.get("head_dim") and width % heads:
        what = f"{where}: a width of {width} does not divide among {heads} heads"
        yield BadInput(what, "give a multiple")
    if heads and groups and heads % groups:
        what = f"{where}: {heads} heads do not divide among {groups} for keys and values"
        yield BadInput(what, "give a divisor")
    if vocabulary and pad is not None and pad >= vocabulary:
        what = f"{where}: pad_token_id is {pad} in a vocabulary of {vocabulary}"
        yield BadInput(what, "give one of its ids, or null")
    types = fields.get("layer_types")
    if layers and types and len(types) != layers:
        yield BadInput(f"{where}: {len(types)} layer_types for {layers} layers", "give one each")


def layers_of(fields: Mapping[str, Any]) -> int | None:
    """Number of layers in a model's config, whatever its family calls it."""
    return _first(fields, _KINDS[_Layers])


def width_of(fields: Mapping[str, Any]) -> int | None:
    """Width of the hidden states in a model's config."""
    return _first(fields, _KINDS[_Width])


def heads_of(fields: Mapping[str, Any]) -> int | None:
    """Number of attention heads in a model's config."""
    return _first(fields, _KINDS[_Heads])


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((fields[name] for name in names if name in fields), None)
