"""Every model of the catalogue as transformers builds it: published count, fields and names."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import transformers

from trainfit.hardware.model_shapes import (
    ModelShape,
    model_shape,
    model_shapes,
    sizes_of,
    transformers_config,
)
from trainfit.jobs.models.backbone import traits_of
from trainfit.jobs.models.classifier_settings import model_facts

ON_HUB = [shape for shape in model_shapes() if shape.hub is not None]
CLASSES = {
    "model": transformers.AutoModel,
    "language model": transformers.AutoModelForCausalLM,
    "classifier without embeddings": transformers.AutoModelForSequenceClassification,
}
# DeBERTa's classes read these without declaring them.
UNDECLARED = {"position_buckets", "norm_rel_ebd", "share_att_key", "conv_kernel_size", "conv_act"}


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def stated(text: str) -> tuple[float, float]:
    """A published number and what its last digit stands for: trailing zeros may be rounded."""
    digits, scale = re.fullmatch(r"([\d.,]+)([MB]?)", text).groups()  # type: ignore[union-attr]
    times = {"": 1, "M": 10**6, "B": 10**9}[scale]
    if not scale:
        return float(digits.replace(",", "")), 1
    whole, _, decimals = digits.partition(".")
    zeros = len(whole) - len(whole.rstrip("0"))
    return float(digits) * times, times * (10 ** -len(decimals) if decimals else 10**zeros)


def test_stated_digits() -> None:
    assert stated("110M") == (110e6, 10e6)
    assert stated("109M") == (109e6, 1e6)
    assert stated("4.0B") == (4e9, 1e8)
    assert stated("70,426,624") == (70_426_624, 1)


@pytest.mark.parametrize("shape", ON_HUB, ids=lambda shape: shape.slug)
def test_the_built_model_has_the_published_count_and_every_field(shape: ModelShape) -> None:
    config = transformers_config(shape)
    with torch.device("meta"):
        model = CLASSES[shape.published_counts].from_config(config)
    assert count(model.base_model) == shape.parameters
    counted = count(model)
    if shape.published_counts == "classifier without embeddings":
        counted -= model.get_input_embeddings().weight.numel()
    assert shape.published is not None
    number, unit = stated(shape.published)
    assert abs(counted - number) < unit  # rounded or cut off
    declared = {field.name for field in dataclasses.fields(config)}
    assert shape.config.keys() - declared <= UNDECLARED | {"model_type"}
    for key, value in shape.config.items():
        assert getattr(config, key) == value, key
    if (positions := model_facts(shape.slug).positions) is not None:
        assert positions == traits_of(model.base_model).positions


def test_it_has_the_models_that_people_fine_tune() -> None:
    assert len(ON_HUB) >= 80
    assert sum(shape.kind == "encoder" for shape in ON_HUB) >= 50


@pytest.mark.parametrize(
    ("name", "hub"),
    [
        ("roberta-base", "FacebookAI/roberta-base"),
        ("facebookai/ROBERTA-base", "FacebookAI/roberta-base"),
        ("xlm-roberta-base", "FacebookAI/xlm-roberta-base"),
        ("bert-large-uncased", "google-bert/bert-large-uncased"),
        ("distilbert-base-uncased", "distilbert/distilbert-base-uncased"),
        ("camembert-base", "almanach/camembert-base"),
        ("albert-base-v2", "albert/albert-base-v2"),
        ("scibert_scivocab_uncased", "allenai/scibert_scivocab_uncased"),
        ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("mistral-7b", "mistralai/Mistral-7B-v0.1"),
        ("gpt2-xl", "openai-community/gpt2-xl"),
    ],
)
def test_short_names_hub_ids_and_former_ids_are_found(name: str, hub: str) -> None:
    assert model_shape(name).hub == hub


def test_sizes_are_read_whatever_a_family_calls_them() -> None:
    found = sizes_of(model_shape("distilbert-base-uncased").config)
    assert found is not None
    assert (found.layers, found.hidden, found.heads, found.inner) == (6, 768, 12, 3072)
    opt = sizes_of(model_shape("opt-1.3b").config)
    assert opt is not None
    assert (opt.layers, opt.hidden, opt.heads, opt.inner) == (24, 2048, 32, 8192)
    for shape in ON_HUB:
        config, sizes = transformers_config(shape), sizes_of(shape.config)
        if sizes is None:
            assert shape.config.get("conv_kernel_size")
        else:
            assert (sizes.layers, sizes.hidden) == (config.num_hidden_layers, config.hidden_size)
