"""Small models of many families, with the head that transformers gives each."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from jobs_tiny import NO_DROPOUT
from transformers import PretrainedConfig

from trainfit.jobs.models.classifier import EncoderClassifier, build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings

COMMON: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
GROUPED = COMMON | {"num_key_value_heads": 2, "head_dim": 8}
GEMMA = GROUPED | {"query_pre_attn_scalar": 8}
MODERN = (
    COMMON
    | {"local_attention": 6, "initializer_cutoff_factor": 3.0}
    | dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 1)
)
DEBERTA = COMMON | {
    "position_buckets": 4,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
}
GPT2 = {"vocab_size": 90, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 40}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", COMMON),
    "roberta": ("RobertaConfig", COMMON | {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaConfig", COMMON | {"pad_token_id": 1}),
    "distilbert": (
        "DistilBertConfig",
        {"vocab_size": 90, "dim": 32, "n_heads": 4, "n_layers": 3, "hidden_dim": 48},
    ),
    "electra": ("ElectraConfig", COMMON | {"embedding_size": 16}),
    "albert": ("AlbertConfig", COMMON | {"embedding_size": 16}),
    "deberta-v3": ("DebertaV2Config", DEBERTA),
    "modernbert-cls": ("ModernBertConfig", MODERN | {"classifier_pooling": "cls"}),
    "modernbert-mean": ("ModernBertConfig", MODERN | {"classifier_pooling": "mean"}),
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2 | {"initializer_range": 0.3, "pad_token_id": 0}),
    "llama": ("LlamaConfig", GROUPED),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", GROUPED),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": 3}),
    "gemma-2": ("Gemma2Config", GEMMA | {"sliding_window": 3, "attn_logit_softcapping": 1.0}),
    "gemma-3": ("Gemma3TextConfig", GEMMA | {"num_hidden_layers": 6, "sliding_window": 6}),
}
FAMILIES = ENCODERS | DECODERS


def config_of(name: str, **others: Any) -> PretrainedConfig:
    kind, fields = FAMILIES[name]
    config: PretrainedConfig = getattr(transformers, kind)(**fields | others)
    return config


def own(source: str | PretrainedConfig, **settings: Any) -> EncoderClassifier:
    """A classifier without dropout with the model's own head."""
    torch.manual_seed(0)
    name = source if isinstance(source, str) else "tiny"
    chosen = NO_DROPOUT | {"name": name, "classes": 3, "pooling": "auto"} | settings
    config = None if isinstance(source, str) else source
    return build_classifier(ClassifierSettings(**chosen), config=config)
