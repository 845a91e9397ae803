"""Configs of models that somebody else wrote, checked before anything is built from them.

A size decides how much is allocated, and a wrong type shows up deep inside a library. So each known
field has bounds, wide enough for every published model, under each name that it goes by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from trainfit import codec
from trainfit.codec import Length, Range
from trainfit.errors import BadConfig, BadInput, reason

_Layers = Annotated[int, Range(1, 512)]
_Width = Annotated[int, Range(1, 65_536)]
_Inner = Annotated[int, Range(1, 2**20)]
_Heads = Annotated[int, Range(1, 1024)]
_Positions = Annotated[int, Range(1, 2**25)]
_Share = Annotated[float, Range(0, 1)]
_Name = Annotated[str, Length(1, 100)]
_KINDS: dict[Any, tuple[str, ...]] = {
    Annotated[int, Range(1, 2**24)]: ("vocab_size", "embedding_size"),
    _Layers: ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    _Width: ("hidden_size", "n_embd", "d_model", "dim"),
    _Heads: ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    _Heads | None: ("num_key_value_heads",),
    Annotated[int, Range(1, 8192)] | None: ("head_dim",),
    _Inner | None: ("intermediate_size", "d_ff", "n_inner"),
    _Positions: ("max_position_embeddings", "n_positions", "n_ctx"),
    Annotated[int, Range(1, 2**25)] | None: ("sliding_window", "local_attention"),
    Annotated[int, Range(0, 65_536)]: ("type_vocab_size",),
    Annotated[int, Range(-1, 2**24)] | None: ("pad_token_id",),
    Annotated[int, Range(-1, 2**20)]: ("position_buckets", "max_relative_positions"),
    _Share | None: (
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "classifier_dropout",
        "dropout",
        "embd_pdrop",
        "embedding_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "mlp_dropout",
        "pooler_dropout",
        "resid_pdrop",
    ),
    Annotated[float, Range(0, 1)]: (
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_eps",
        "rms_norm_eps",
    ),
    Annotated[float, Range(0, 1000)]: ("initializer_range", "initializer_factor"),
    _Name: ("model_type", "hidden_act", "hidden_activation", "activation_function"),
    tuple[str, ...] | None: ("layer_types",),
    str | tuple[str, ...] | None: ("pos_att_type",),
    Annotated[int, Range(0, 1024)] | None: ("conv_kernel_size",),
}
"""Type and bounds of each field, by the names that models have for it."""
_TYPES = {name: kind for kind, names in _KINDS.items() for name in names}
_FIX = "give a folder that save_pretrained wrote"


def read_model_config(folder: Path) -> dict[str, Any]:
    """The fields of config.json in a model's folder, checked."""
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
            codec.decode(_TYPES[name], value, where)
        except BadInput as error:
            wrong = True
            what = error.what.removeprefix(f"{where}: value")
            yield BadInput(f"{where}: {name}{what}", error.fix)
    if not wrong:
        yield from _contradictions(fields, where)


def _contradictions(fields: Mapping[str, Any], where: str) -> Iterator[BadInput]:
    """Sizes that do not go together."""
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


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((fields[name] for name in names if name in fields), None)
