"""With pooling auto, a classifier is the one that transformers has, on padded and packed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jobs_tiny import rows_of
from own_tiny import COMMON, DECODERS, FAMILIES, config_of, own
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import AutoModelForSequenceClassification

from trainfit.core.errors import TrainfitWarning
from trainfit.jobs.models.classifier import EncoderClassifier
from trainfit.jobs.models.classifier_settings import model_facts

LABELS = torch.tensor([0, 2, 1, 1])


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
@pytest.mark.parametrize(
    "method", ["full", pytest.param("lora", marks=pytest.mark.soak), "dora", "frozen"]
)
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


def test_a_pooler_that_the_encoder_by_itself_lacks_is_the_head_s(tmp_path: Path) -> None:
    config = transformers.NomicBertConfig(**COMMON, num_labels=3)
    torch.manual_seed(3)
    plain = AutoModelForSequenceClassification.from_config(config).eval()
    plain.save_pretrained(tmp_path)
    batch = rows_of(sequences())
    model = own(str(tmp_path)).eval()
    torch.testing.assert_close(
        model(**batch.packed), plain(**batch.padded).logits, atol=1e-5, rtol=1e-5
    )


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
