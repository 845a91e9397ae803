"""Hooks, layers and changes of a script's own: its model works on as it does alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification, BertForTokenClassification, BertModel
from transformers.integrations.neftune import neftune_post_forward_hook
from unpadded_tiny import batch, config, pair

import trainfit
from trainfit.integrations.speeding import apply_speedups
from trainfit.integrations.unpadding import facts_in


def classifier() -> BertForSequenceClassification:
    """A small classifier without dropout."""
    torch.manual_seed(0)
    return BertForSequenceClassification(config("bert"))


def test_hooks_that_come_later_keep_the_rows_too() -> None:
    model, given, seen = classifier(), batch("bert"), []
    apply_speedups(model, ["unpadded"])
    [facts] = facts_in(model)
    expected = model(**given).logits
    assert facts.tally.packed == 1
    layer = model.bert.encoder.layer[0]
    handle = layer.register_forward_hook(lambda _m, _i, out: seen.append(out.shape))
    torch.testing.assert_close(model(**given).logits, expected)
    assert (seen[0][:2], facts.tally.packed) == (given["input_ids"].shape, 1)
    handle.remove()
    model.classifier.register_forward_hook(lambda _m, _i, out: seen.append(out.shape))
    model(**given)
    assert facts.tally.packed == 2  # above the body rows are as they were


def test_a_hook_on_the_body_of_a_head_per_token_keeps_its_rows() -> None:
    model, seen = BertForTokenClassification(config("bert")), []
    model.bert.register_forward_hook(lambda _m, _i, out: seen.append(out[0].shape))
    assert "a hook on BertModel" in apply_speedups(model, ["unpadded"]).line()
    model(**(given := batch("bert")))
    assert seen[0][:2] == given["input_ids"].shape


def test_noise_on_embeddings_is_scaled_by_the_width_of_rows() -> None:
    model = classifier()
    trainfit.unpadded(model)
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    model.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    model(**batch("bert"))
    assert facts_in(model)[0].tally.packed == 0


class OwnAttention(nn.Module):
    """A script's attention, which knows padded rows alone."""

    def forward(self, hidden: Any, *_: Any, **_rest: Any) -> Any:
        """Take the mean of a row."""
        return hidden.mean(1, keepdim=True).expand_as(hidden), None


def test_layers_of_the_script_keep_their_rows() -> None:
    plain = classifier().eval()
    plain.bert.encoder.layer[0].attention.self = OwnAttention()
    model = copy.deepcopy(plain)
    found = apply_speedups(model, ["unpadded"])
    torch.testing.assert_close(model(**batch("bert")).logits, plain(**batch("bert")).logits)
    assert "OwnAttention, a layer of the script, would see packed rows" in found.line()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_may_be_set_after_the_training(implementation: str) -> None:
    plain = classifier().eval()
    model = trainfit.unpadded(copy.deepcopy(plain))
    model.set_attn_implementation(implementation)
    torch.testing.assert_close(model(**batch("bert")).logits, plain(**batch("bert")).logits)


def test_padding_that_a_script_reads_before_it_trains() -> None:
    plain = BertModel(config("bert")).eval()
    model = copy.deepcopy(plain)
    apply_speedups(model, ["unpadded"])
    with torch.no_grad():
        found, expected = (one(**batch("bert"))[0].mean(1) for one in (model, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["classes", "tokens"])
def test_a_model_is_exported_as_it_is(name: str) -> None:
    plain, model = pair("bert", name)
    given = batch("bert")
    found = torch.export.export(model, (), given).module()(**given).logits
    torch.testing.assert_close(found, plain(**given).logits)
