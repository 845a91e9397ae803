"""Configs of models: every published one is taken, and absurd ones before anything is built."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from job_tiny import TINY_BERT
from trainfit.core.errors import BadInput
from trainfit.hardware.model_shapes import OWN_GPT, check_fields, model_shapes, read_model_config

FAMILIES = (
    "albert bert camembert deberta deberta-v2 distilbert electra ernie gemma gemma2 gemma3_text "
    "gpt2 gpt_neo gpt_neox llama mistral modernbert mpnet opt phi phi3 qwen2 qwen3 roberta t5 "
    "xlm-roberta xlnet"
)


@pytest.mark.parametrize("family", FAMILIES.split())
def test_a_family_s_own_defaults_are_taken(family: str):
    check_fields(AutoConfig.for_model(family).to_dict(), family)


def test_the_catalogue_is_taken():
    shapes = [shape for shape in model_shapes() if shape.config["model_type"] != OWN_GPT]
    assert len(shapes) > 5
    for shape in shapes:
        check_fields(shape.config, shape.slug)
        check_fields({"model_type": "both", "text_config": shape.config}, shape.slug)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; use a whole number (1 to"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true"),
        ({"vocab_size": 2 * 10**9}, "vocab_size is 2000000000"),
        ({"hidden_size": "32"}, 'hidden_size is "32"'),
        ({"hidden_size": 33}, "a width of 33 does not divide among 4 heads"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "4 heads do not divide among 3"),
        ({"pad_token_id": 400}, "pad_token_id is 400 in a vocabulary of 400"),
        ({"hidden_dropout_prob": 2}, "hidden_dropout_prob is 2"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps is"),
        ({"model_type": None}, "model_type is null"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 1 layers"),
        ({"text_config": 3}, "text_config is no object"),
        ({"text_config": {**TINY_BERT, "vocab_size": 0}}, "text_config: vocab_size is 0"),
    ],
)
def test_an_absurd_field_is_named_with_its_bound(change: dict[str, Any], said: str):
    check_fields(TINY_BERT, "mine")
    with pytest.raises(BadInput) as caught:
        check_fields(TINY_BERT | change, "mine")
    assert said in str(caught.value)
    assert str(caught.value).startswith("the config of mine: ")


def test_all_mistakes_are_told_at_once():
    with pytest.raises(BadInput) as caught:
        check_fields(TINY_BERT | {"vocab_size": 0, "hidden_size": -1}, "mine")
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "[" * 100_000, '{"vocab_size": 1' + "0" * 5000 + "}", "\udcff"]
)
def test_a_config_that_is_none_is_one_line(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadInput, match=r"cannot read config\.json") as caught:
        read_model_config(tmp_path)
    assert len(str(caught.value)) < 400


def test_a_pipe_is_no_config(tmp_path: Path):
    with pytest.raises(BadInput, match=r"no config\.json"):
        read_model_config(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(BadInput, match="a pipe"):
        read_model_config(tmp_path)


def test_a_model_larger_than_the_machine_is_refused_unbuilt(tmp_path: Path):
    from trainfit.jobs.models.backbone import build_encoder

    huge = {"hidden_size": 65_536, "num_hidden_layers": 200, "intermediate_size": 2**20}
    (tmp_path / "config.json").write_text(json.dumps(TINY_BERT | huge))
    with pytest.raises(BadInput, match=r"the weights of bert take [\d,.]+ GiB of the"):
        build_encoder(str(tmp_path), weights="random")


def test_what_transformers_does_not_know_is_one_line(tmp_path: Path):
    from trainfit.jobs.models.backbone import build_encoder

    for change in ({"model_type": "nowhere"}, {"hidden_act": "nowhere"}):
        (tmp_path / "config.json").write_text(json.dumps(TINY_BERT | change))
        with pytest.raises(BadInput, match="cannot build a "):
            build_encoder(str(tmp_path), weights="random")
