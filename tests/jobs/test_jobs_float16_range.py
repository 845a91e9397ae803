"""Gemma with hidden states beyond float16's range, in float16 on the CPU, against float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from jobs_tiny import tiny
from torch import Tensor, nn
from torch.nn import functional

from trainfit.jobs.models import classifier
from trainfit.jobs.models.classifier import EncoderClassifier

LARGEST = torch.finfo(torch.float16).max


def gemma(**settings: Any) -> EncoderClassifier:
    """A tiny Gemma 3 whose gains make hidden states as large as published ones."""
    torch.manual_seed(0)
    model = tiny("gemma-3-1b-it", **settings)
    with torch.no_grad():
        for name, weight in model.encoder.named_parameters():
            if "post_feedforward_layernorm" in name:
                weight.fill_(60_000.0)
            elif "pre_feedforward_layernorm" in name:
                weight.fill_(400.0)
            elif "up_proj" in name or "gate_proj" in name:
                weight.mul_(4.0)
    return model


def step(model: EncoderClassifier, precision: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Loss and all gradients of one batch."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 60, (4, 12), generator=generator)
    model.zero_grad()
    with torch.autocast("cpu", precision, enabled=precision is not None):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    loss = functional.cross_entropy(logits.float(), torch.tensor([0, 1, 0, 1]))
    loss.backward()
    found = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(found)


def largest(model: EncoderClassifier, suffix: str) -> float:
    """Largest input of the modules with such a name, in float32."""
    seen: list[float] = []
    handles = [
        module.register_forward_pre_hook(lambda _, given: seen.append(given[0].abs().max().item()))
        for name, module in model.named_modules()
        if name.endswith(suffix)
    ]
    with torch.no_grad():
        step_inputs = torch.randint(5, 60, (4, 12), generator=torch.Generator().manual_seed(1))
        model(input_ids=step_inputs, attention_mask=torch.ones_like(step_inputs))
    for handle in handles:
        handle.remove()
    return max(seen)


def relative(found: Tensor, sure: Tensor) -> float:
    return (torch.linalg.norm(found - sure) / torch.linalg.norm(sure)).item()


def test_float16_holds_what_it_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gemma()
    assert largest(model, "input_layernorm") > LARGEST
    assert largest(model, "down_proj") > LARGEST
    loss, slopes = step(model, None)
    found, slants = step(copy.deepcopy(model), torch.float16)
    assert slants.isfinite().all()
    assert found.item() == pytest.approx(loss.item(), abs=0.02)
    assert relative(slants, slopes) < 0.05
    monkeypatch.setattr(classifier, "keep_in_range", lambda _model: None)
    lost, _ = step(gemma(), torch.float16)
    assert not lost.isfinite()


def test_adapters_on_float16_weights_stay_in_range() -> None:
    settings = {"method": "lora", "dtype": "float16"}
    found, slants = step(gemma(**settings).train(False), torch.float16)
    sure, slopes = step(gemma(**settings).train(False).float(), None)
    assert slants.isfinite().all()
    assert found.item() == pytest.approx(sure.item(), abs=0.02)
    assert relative(slants, slopes) < 0.05


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_other_precisions_compute_as_ever(
    precision: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = step(gemma(), precision)
    monkeypatch.setattr(classifier, "keep_in_range", lambda _model: None)
    for one, other in zip(changed, step(gemma(), precision), strict=True):
        assert torch.equal(one, other)


def test_ordinary_numbers_are_not_scaled() -> None:
    """The factor of a token is 1 unless it is needed."""
    block: Any = gemma().encoder.layers[0].mlp
    hidden = torch.randn(1, 3, 32) * 0.01
    with torch.autocast("cpu", torch.float16):
        found = block(hidden)
        plain = block.plain_forward(hidden)
    assert found.dtype == torch.float32
    assert torch.equal(found, plain.float())


def test_a_model_that_fits_is_left_alone() -> None:
    model = tiny("bert-base")
    assert not any(
        isinstance(m, nn.Module) and hasattr(m, "plain_forward") for m in model.modules()
    )
