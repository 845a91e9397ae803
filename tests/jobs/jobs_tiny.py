"""Scaled-down copies of the catalogue's models, and rows of the same sequences in each form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

from trainfit.jobs.models.classifier import EncoderClassifier, build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings

# A wide start makes every term of the model matter: at 0.02 attention is nearly a plain mean.
_COMMON: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "initializer_range": 0.3,
}
_GEMMA = {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
TINY: dict[str, dict[str, Any]] = {
    "bert-base": _COMMON | {"max_position_embeddings": 40},
    "phobert-base-v2": _COMMON | {"max_position_embeddings": 42},
    "deberta-v3-base": _COMMON | {"position_buckets": 4, "max_position_embeddings": 40},
    "modernbert-base": _COMMON
    | {"local_attention": 6, "initializer_cutoff_factor": 3.0}
    | dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0)
    | dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
    "gemma-3-1b-it": _COMMON | _GEMMA | {"num_hidden_layers": 6, "sliding_window": 6},
    "gemma-2-2b": _COMMON | _GEMMA | {"sliding_window": 3, "attn_logit_softcapping": 1.0},
    "gpt2": {
        "vocab_size": 90,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 40,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
OTHERS: dict[str, dict[str, Any]] = {
    "distilbert-base-uncased": _COMMON | {"hidden_dim": 48, "max_position_embeddings": 40},
    "electra-small-discriminator": _COMMON | {"embedding_size": 16, "max_position_embeddings": 40},
    "albert-base-v2": _COMMON | {"embedding_size": 16, "max_position_embeddings": 40},
    "mpnet-base": _COMMON | {"max_position_embeddings": 42},
    "deberta-base": _COMMON | {"max_position_embeddings": 40},
    "smollm3-3b": _COMMON | {"num_key_value_heads": 2, "num_hidden_layers": 4, "pad_token_id": 0},
    "qwen2.5-0.5b": _COMMON | {"num_key_value_heads": 2},
    "phi-2": _COMMON
    | {"num_key_value_heads": 4, "rope_parameters": _ROTARY | {"partial_rotary_factor": 0.5}},
    "phi-3-mini-4k-instruct": _COMMON
    | {"num_key_value_heads": 4, "sliding_window": 3, "pad_token_id": 0},
    "olmo-2-1b": _COMMON | {"num_key_value_heads": 2, "pad_token_id": 0},
    "pythia-70m": _COMMON | {"rope_parameters": _ROTARY | {"partial_rotary_factor": 0.5}},
    "opt-125m": {
        **{key: value for key, value in _COMMON.items() if key != "initializer_range"},
        **{"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 40},
        "init_std": 0.3,
    },
}
"""One model of each further family of the catalogue."""
DECODERS = ("gemma-3-1b-it", "gemma-2-2b", "gpt2")
_LLAMA = {k: v for k, v in _COMMON.items() if k != "initializer_range"} | {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_LLAMA),
    "qwen3": Qwen3Config(**_LLAMA),
    "mistral": MistralConfig(**_LLAMA, sliding_window=3),
}
NO_DROPOUT: dict[str, Any] = {
    "attention_dropout": 0.0,
    "feed_forward_dropout": 0.0,
    "head_dropout": 0.0,
    "lora_dropout": 0.0,
}


def tiny(name: str, seed: int = 0, **settings: Any) -> EncoderClassifier:
    """A small classifier without dropout, whose head says something."""
    torch.manual_seed(seed)
    chosen = (
        NO_DROPOUT
        | {"name": name, "classes": 3, "overrides": (TINY | OTHERS).get(name, {})}
        | settings
    )
    model = build_classifier(ClassifierSettings(**chosen), config=CONFIGS.get(name))
    if not model.head.weight.is_meta:
        torch.nn.init.normal_(model.head.weight, std=0.5)
    return model


@dataclass(frozen=True)
class Rows:
    """The same sequences, padded on the right and packed, with filler at the end."""

    sequences: list[Tensor]
    padded: dict[str, Tensor]
    packed: dict[str, Tensor]


def rows(lengths: tuple[int, ...] = (5, 17, 1, 9), filler: int = 4, seed: int = 1) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(3, 90, (n,), generator=generator) for n in lengths]
    return rows_of(sequences, filler)


def rows_of(sequences: list[Tensor], filler: int = 4, pad: int = 0) -> Rows:
    width = max(len(s) for s in sequences)
    ids = torch.full((len(sequences), width), pad)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    ends = torch.tensor([len(s) for s in sequences]).cumsum(0)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), ends]).int()
    packed = torch.cat([*sequences, torch.full((filler,), pad)])[None]
    return Rows(
        sequences,
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": packed, "cu_seqlens": starts},
    )
