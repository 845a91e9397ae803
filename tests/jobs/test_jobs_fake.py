"""Models build and run without values, compile whole, and make no mask they can do without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs_tiny import TINY, rows, tiny
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from trainfit.hardware.model_shapes import model_shape
from trainfit.jobs.models.backbone import build_encoder
from trainfit.jobs.models.classifier import build_classifier, classification_loss
from trainfit.jobs.models.classifier_settings import ClassifierSettings

EVERY_METHOD = [("gemma-3-1b-it", method) for method in ("frozen", "lora", "dora")]


def two_layers(name: str) -> dict[str, Any]:
    return TINY[name] | {"n_layer" if name == "gpt2" else "num_hidden_layers": 2}


@pytest.mark.parametrize(("name", "method"), [*((name, "full") for name in TINY), *EVERY_METHOD])
def test_a_step_on_fake_tensors(name: str, method: str) -> None:
    settings = {"checkpointing": "selective", "pooling": "attention_query"}
    with FakeTensorMode():
        model = tiny(name, method=method, overrides=two_layers(name), **settings)
        ids = torch.zeros(3, 9, dtype=torch.long)
        starts = torch.zeros(4, dtype=torch.int32)
        for batch in (
            {"input_ids": ids},
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            {"input_ids": ids[:1], "cu_seqlens": starts},
        ):
            loss = classification_loss(model(**batch), torch.zeros(3, dtype=torch.long))
            loss.backward()
    assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None for p in trained)


POOLINGS = ["mean", "first", "last", "max", "attention_kv", "attention_query"]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_in_mixed_precision(pooling: str, dtype: str) -> None:
    name = "gemma-2-2b"
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        model = tiny(name, method="dora", dtype=dtype, pooling=pooling, overrides=two_layers(name))
        batch = {"input_ids": torch.zeros(1, 9, dtype=torch.long)}
        logits = model(**batch, cu_seqlens=torch.zeros(4, dtype=torch.int32))
        loss = classification_loss(logits, torch.zeros(3, dtype=torch.long))
        loss.backward()
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_fake_tensors_are_those_of_the_real_model() -> None:
    real = tiny("modernbert-base", method="dora")
    with FakeTensorMode():
        fake = tiny("modernbert-base", method="dora")
        encoder = build_encoder("modernbert-base", overrides=TINY["modernbert-base"])
    for kind in ("named_parameters", "named_buffers"):
        wanted = {n: (t.shape, t.dtype, t.requires_grad) for n, t in getattr(real, kind)()}
        assert {n: (t.shape, t.dtype, t.requires_grad) for n, t in getattr(fake, kind)()} == wanted
    assert all(isinstance(parameter, FakeTensor) for parameter in encoder.parameters())


@pytest.mark.parametrize("name", ["gemma-3-4b-it", "gemma-2-2b", "modernbert-base", "bert-base"])
def test_full_sizes_build_on_meta(name: str) -> None:
    with torch.device("meta"):
        model = build_classifier(ClassifierSettings(name=name))
    shape = model_shape(name)
    count = sum(p.numel() for p in model.encoder.parameters())
    pooler = 768 * 768 + 768 if name == "bert-base" else 0  # BERT's own, which is not used
    assert count == shape.parameters - pooler
    assert all(parameter.is_meta for parameter in model.parameters())


class Spy:
    """Stands in for SDPA and remembers the masks."""

    def __init__(self) -> None:
        self.masks: list[Tensor | None] = []
        self.original = functional.scaled_dot_product_attention

    def __call__(self, *args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        self.masks.append(attn_mask)
        assert not kwargs["is_causal"]
        return self.original(*args, attn_mask=attn_mask, **kwargs)


@pytest.mark.parametrize("name", ["bert-base", "gemma-3-1b-it", "gpt2"])
def test_masks_only_where_something_is_masked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy()
    model = tiny(name)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    short = rows((4, 3)).padded  # no longer than the window of 4 either
    model(short["input_ids"])
    assert set(spy.masks) == {None}
    spy.masks.clear()
    model(**short)  # each row is a group of its own, without padding
    assert set(spy.masks) == {None}
    spy.masks.clear()
    tiny(name, attention="masked")(**short)
    # One of each shape, made once for all layers; a window's has that shape however short rows are.
    shapes = {(2, 1, 1, 4), (2, 1, 4, 4)} if name == "gemma-3-1b-it" else {(2, 1, 1, 4)}
    assert {None if mask is None else tuple(mask.shape) for mask in spy.masks} == shapes
    assert len({id(mask) for mask in spy.masks}) == len(shapes)


def test_only_windowed_layers_mask_what_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy()
    model = tiny("gemma-3-1b-it")
    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    model(rows((9, 9)).padded["input_ids"])
    shapes = [None if mask is None else tuple(mask.shape) for mask in spy.masks]
    assert shapes == [(1, 1, 9, 9)] * 5 + [None]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["bert-base", "gemma-3-1b-it"])
def test_a_packed_step_compiles_to_one_graph(name: str) -> None:
    torch.compiler.reset()
    model = tiny(name, overrides=two_layers(name))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**rows().packed), model(**rows().packed))
    torch.compiler.reset()
