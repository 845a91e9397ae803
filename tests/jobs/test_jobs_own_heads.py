"""With pooling auto, a classifier is the one that transformers has, on padded and packed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jobs_tiny import NO_DROPOUT, rows_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from trainfit.core.errors import TrainfitWarning
from trainfit.jobs.job_plan import model_facts
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
LABELS = torch.tensor([0, 2, 1, 1])


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


def plain_of(model: EncoderClassifier) -> Any:
    """Return the classifier that transformers builds, with the same weights and no dropout."""
    config = model.head.model.config
    plain = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    plain.load_state_dict(named_as_in_transformers(model))
    return plain.eval()


def named_as_in_transformers(model: EncoderClassifier) -> dict[str, Tensor]:
    prefix = model.head.prefix
    inside = {f"{prefix}.{name}": value for name, value in model.encoder.state_dict().items()}
    return inside | model.head.model.state_dict()


def sequences(seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 90, (n,), generator=generator) for n in (5, 17, 1, 9)]


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    functional.cross_entropy(logits, LABELS, reduction="sum").backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def own_gradients(model: EncoderClassifier, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    found = gradients(model, model(**batch))
    of_head = {n.removeprefix("head.model."): g for n, g in found.items() if n[:5] == "head."}
    prefix = model.head.prefix
    inside = {
        f"{prefix}.{name.removeprefix('encoder.')}": gradient
        for name, gradient in found.items()
        if name.startswith("encoder.")
    }
    return of_head | inside


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    model = own(config_of(name))
    plain = plain_of(model)
    pad = plain.config.pad_token_id
    batch = rows_of(sequences(), pad=pad)
    assert batch.padded["input_ids"].shape[0] == len(LABELS)
    wanted = plain(**batch.padded).logits
    expected = gradients(plain, wanted)
    size = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for form in (batch.padded, batch.packed):
        torch.testing.assert_close(model(**form), wanted, rtol=1e-5, atol=1e-5)
        found = own_gradients(model, form)
        assert found.keys() == expected.keys()
        for part, gradient in found.items():
            assert (gradient - expected[part]).norm() < 1e-5 * size, part


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_with_its_own_head_looks_back_alone(name: str) -> None:
    model = own(config_of(name)).eval()
    assert model.traits.causal
    assert not own(config_of(name), pooling="mean").traits.causal


@pytest.mark.parametrize("name", ["bert", "deberta-v3", "modernbert-mean", "gemma-3"])
@pytest.mark.parametrize("method", ["full", "lora", "dora", "frozen"])
def test_the_head_is_trained_whole_whatever_the_method(name: str, method: str) -> None:
    model = own(config_of(name), method=method, checkpointing="selective")
    batch = rows_of(sequences())
    functional.cross_entropy(model(**batch.packed), LABELS).backward()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in model.named_parameters() if p.grad is not None}
    assert {n for n, _ in model.named_parameters() if n.startswith("head.")} <= trained
    inside = {n for n in trained if n.startswith("encoder.")}
    assert bool(inside) is (method != "frozen")
    assert method == "full" or all("lora_" in n for n in inside)
    with FakeTensorMode():
        fake = own(config_of(name), method=method)
        ids, starts = torch.zeros(1, 9, dtype=torch.long), torch.zeros(4, dtype=torch.int32)
        fake(ids, cu_seqlens=starts).sum().backward()
    assert set(dict(fake.named_parameters())) == set(dict(model.named_parameters()))


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert-cls", "llama"])
def test_pretrained_weights_of_the_head_are_taken(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = config_of(name, num_labels=3)
    plain = AutoModelForSequenceClassification.from_config(config).eval()
    plain.save_pretrained(tmp_path)
    batch = rows_of(sequences(), pad=config.pad_token_id)
    model = own(str(tmp_path)).eval()
    torch.testing.assert_close(model(**batch.packed), plain(**batch.padded).logits)
    assert own(str(tmp_path), classes=5)(**batch.packed).shape == (4, 5)


def test_the_dropout_of_a_head_is_its_own_unless_it_is_set() -> None:
    def rates(model: EncoderClassifier) -> set[float]:
        parts = (model.dropout, model.head)
        return {m.p for part in parts for m in part.modules() if isinstance(m, nn.Dropout)}

    bert, llama = config_of("bert", classifier_dropout=0.3), config_of("llama")
    assert rates(own(bert, head_dropout=None)) == {0.3}
    assert rates(own(bert, head_dropout=0.2)) == {0.2}
    assert rates(own(llama, head_dropout=None)) == set()
    assert rates(own(llama, head_dropout=0.2)) == {0.2}
    assert rates(own(llama, head_dropout=None, pooling="mean")) == {0.1}


def test_a_model_without_such_a_class_gets_the_mean() -> None:
    config = transformers.GraniteConfig(**COMMON)
    with pytest.warns(TrainfitWarning, match="no head for granite"):
        model = own(config)
    assert model.settings.pooling == "mean"
    assert not model.traits.causal


def test_soft_capped_logits_of_a_causal_decoder_are_not_packed() -> None:
    assert model_facts("gemma-2-2b").unpackable is None
    assert "soft-capped" in str(model_facts("gemma-2-2b", "auto").unpackable)
    assert model_facts("gemma-3-1b-it", "auto").unpackable is None
