"""Model folders with hostile configs and tokenizers."""

from __future__ import annotations

import json
import random
from typing import Any

from fuzz_case import FIFO, FOLDER, LOOP, ZERO, Case, Edit, kind
from fuzz_damage import DAMAGES
from fuzz_templates import TINY
from fuzz_values import JSON_VALUES

from job_tiny import TINY_BERT

_BERT: dict[str, Any] = TINY_BERT | {"hidden_act": "gelu"}
_GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 400,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 96,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
}
_DEBERTA = _BERT | {
    "model_type": "deberta-v2",
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 400,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 1,
    "n_positions": 96,
}
_NESTED = {"model_type": "gemma3", "text_config": _GEMMA}
_BASES = [_BERT, _BERT, _GEMMA, _DEBERTA, _GPT2, _NESTED]

_SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
_ABSURD: list[Any] = [-1, 0, 10**9, 2 * 10**9, 10**30, 1.5, "x", None, [], True, float("nan")]
_REFUSED: list[dict[str, Any]] = [
    *({name: value} for name in _SIZES for value in _ABSURD),
    *({"intermediate_size": value} for value in (-1, 10**9, "x", 10**30)),
    *({"max_position_embeddings": value} for value in (-1, 0, 3 * 10**9, "x")),
    {"num_attention_heads": 5},
    {"hidden_size": 33},
    {"hidden_act": "nowhere"},
    {"hidden_act": 3},
    {"model_type": "nowhere"},
    {"model_type": None},
    {"model_type": 3},
    {"model_type": ["bert"]},
    {"model_type": "x" * 5000},
    {"pad_token_id": -7},
    {"pad_token_id": 10**9},
    {"hidden_dropout_prob": float("nan")},
    {"hidden_dropout_prob": 2},
    {"hidden_dropout_prob": -1},
    {"initializer_range": -1},
    {"initializer_range": "x"},
    {"layer_norm_eps": "x"},
    {"type_vocab_size": -2},
    {"type_vocab_size": 10**10},
]
_REFUSED_NAMES: list[dict[str, Any]] = [
    *(_BERT | {name: "nowhere"} for name in ("hidden_act", "dtype", "torch_dtype", "problem_type")),
    *(_GPT2 | {"activation_function": name} for name in ("nowhere", "GELU", "Tensor")),
    _GEMMA | {"hidden_activation": "nowhere"},
    _GEMMA | {"layer_types": ["full_attention", "nowhere"]},
    _GEMMA | {"rope_scaling": {"rope_type": "nowhere"}},
    _GEMMA | {"query_pre_attn_scalar": -1},
    _GEMMA | {"rope_theta": -1},
    _DEBERTA | {"hidden_act": "nowhere"},
    _DEBERTA | {"pooler_hidden_act": "nowhere"},
    _DEBERTA | {"conv_kernel_size": 3, "conv_act": "nowhere"},
    {"model_type": "gemma3", "text_config": _GEMMA | {"hidden_activation": "nowhere"}},
]
"""Names that only transformers knows, in the fields of each family."""
_COMMANDS = [
    ["train", "textclass", "--dry-run", "runs_dir=runs"],
    ["plan", "textclass"],
    ["plan", "textclass", "--gpu", "t4"],
]


def _case(chosen: random.Random, config: Any, expect: Any, **more: Any) -> Case:
    own = ("model.weights", "model.name")
    words = [w for w in TINY["textclass"] if not w.startswith(own)]
    text = config if isinstance(config, str) else json.dumps(config)
    command = chosen.choice(_COMMANDS)
    real = chosen.random() < 0.3
    given = {"files": {"model/config.json": text}, "template": "textclass", **more}
    weights = chosen.choice([[], ["model.weights=random"]])
    words.append("model.name={here}/model")
    return Case([*command, *words, *weights], expect=expect, real_plan=real, **given)


@kind(10)
def absurd_models(chosen: random.Random) -> Case:
    changed = [_BERT | change for change in _REFUSED]
    return _case(chosen, chosen.choice([*changed, *_REFUSED_NAMES]), "refused")


_MORE_FIELDS = (
    "architectures",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "problem_type",
    "return_dict",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
)


@kind(14)
def changed_models(chosen: random.Random) -> Case:
    """Any field of a config replaced by any value."""
    config = dict(chosen.choice(_BASES))
    fields = config
    if "text_config" in config and chosen.random() < 0.8:
        fields = config["text_config"] = dict(config["text_config"])
    key = chosen.choice(sorted({*fields, *_MORE_FIELDS}))
    if chosen.random() < 0.2:
        fields.pop(key, None)
    else:
        fields[key] = chosen.choice(JSON_VALUES)
    return _case(chosen, config, "any")


_TEXTS = [
    "",
    "{",
    "[]",
    "null",
    "3",
    '"x"',
    "[" * 100000,
    '{"a":' * 5000 + "1" + "}" * 5000,
    '{"model_type": "bert", "model_type": "gpt2"}',
    "\ufeff{}",
    "{}",
    '{"model_type": "bert"',
    '{"vocab_size": ' + "9" * 5000 + "}",
    "\ud800",
    "x" * (1 << 20),
]


@kind(4)
def broken_configs(chosen: random.Random) -> Case:
    if chosen.random() < 0.7:
        return _case(chosen, chosen.choice(_TEXTS), "refused")
    content = chosen.choice([FIFO, FOLDER, LOOP, ZERO])
    return _case(chosen, {}, "refused", files={"model/config.json": content})


@kind(10)
def damaged_models(chosen: random.Random) -> Case:
    """Weights and tokenizer files that were whole."""
    words = [w for w in TINY["textclass"] if not w.startswith("model.weights")]
    dry = chosen.choice([["--dry-run"], []])
    among = chosen.choice(["*.json", "*.safetensors", "tokenizer*.json", "tokenizer.json"])
    how = chosen.choice(["json", "json", "json", *DAMAGES])
    if among != "*.safetensors" and chosen.random() < 0.5:
        how = "json"
    edit = Edit(how, chosen.randrange(2**32), among)
    return Case(
        ["train", "textclass", *dry, "runs_dir=runs", *words], template="model", edits=(edit,)
    )
