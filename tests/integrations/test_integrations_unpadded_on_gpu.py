"""On a GPU an unpadded model runs on kernels, and is as near to float32 as the padded one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from unpadded_tiny import batch, config, counting_packed, gradients

import trainfit
from trainfit.kernels import disentangled, varlen

LENGTHS = (5, 61, 1, 128, 33, 90)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2])
SIZES = {"hidden_size": 64, "initializer_range": 0.1}
NAMES = ["bert", "modernbert-cls", "deberta-v3", "llama"]


def of(name: str, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | ({"head_dim": 16} if name == "llama" else {})
    made = config(name, dropout, **sizes)
    return AutoModelForSequenceClassification.from_config(made).cuda()


def inputs(name: str) -> dict[str, Tensor]:
    rows = batch(name, lengths=LENGTHS) | {"labels": LABELS}
    return {part: value.cuda() for part, value in rows.items()}


def results(model: Any, name: str, dtype: torch.dtype) -> list[Tensor]:
    """Logits and the gradient of all weights."""
    model.zero_grad()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        found = model(**inputs(name))
    found.loss.backward()
    flat = [gradient.flatten() for gradient in gradients(model).values()]
    return [found.logits.detach().float(), torch.cat(flat).float()]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that batches were given to."""
    taken: list[str] = []
    for module, maker in ((varlen, "varlen_attention"), (disentangled, "packed_attention")):
        make = getattr(module, maker)

        def making(*given: Any, make: Any = make, maker: str = maker, **options: Any) -> Any:
            taken.append(maker)
            return make(*given, **options)

        monkeypatch.setattr(module, maker, making)
    return taken


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_in_bf16_it_is_as_near_to_float32_as_the_padded_model(
    name: str, kernels: list[str]
) -> None:
    plain = of(name)
    model = trainfit.unpadded(copy.deepcopy(plain), insist=True)
    sure = results(plain, name, torch.float32)
    padded = results(plain, name, torch.bfloat16)
    with counting_packed() as packed:
        found = results(model, name, torch.bfloat16)
    assert packed == [sum(LENGTHS)]
    assert kernels == ["packed_attention" if name == "deberta-v3" else "varlen_attention"]
    for one, other, wanted in zip(found, padded, sure, strict=True):
        assert (one - wanted).norm() <= 2 * (other - wanted).norm() + 1e-3 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_in_float32_it_is_the_padded_model(name: str) -> None:
    plain = of(name)
    model = trainfit.unpadded(copy.deepcopy(plain), insist=True)
    for one, wanted in zip(
        results(model, name, torch.float32), results(plain, name, torch.float32), strict=True
    ):
        assert (one - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert", "deberta-v3"])
def test_kernels_honour_attention_dropout(name: str, kernels: list[str]) -> None:
    model = trainfit.unpadded(of(name), insist=True)
    for part, module in model.named_modules():
        if part.endswith("attention.self") and hasattr(module, "dropout"):
            module.dropout.p = 0.5
    model.train()
    first, again = (results(model, name, torch.bfloat16)[0] for _ in range(2))
    assert kernels
    assert not torch.allclose(first, again)
