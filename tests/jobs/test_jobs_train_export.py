"""The exported model without trainfit: plain transformers, peft and torch give the same logits."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_tiny import TINY, tiny
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from trainfit.core import codec
from trainfit.data import learn_tokenizer
from trainfit.data.tokens import tokenize_texts
from trainfit.jobs import exports
from trainfit.jobs.classification import predict
from trainfit.jobs.model_card import code_for
from trainfit.jobs.models.classifier import EncoderClassifier
from trainfit.jobs.predict import load_export

FAMILIES = ("bert-base", "modernbert-base", "gemma-2-2b", "gemma-3-1b-it", "deberta-v3-base")
TEXTS = ["one short text", "another one that is quite a bit longer than that", "a"]


def write(folder: Path, model: EncoderClassifier) -> Any:
    tokenizer = learn_tokenizer(TEXTS, vocabulary=320)
    facts = {"classes": ["x", "y", "z"], "max_length": 38, "pad_id": 0, "eval_batch_size": 8}
    exports.write_classifier(folder, model, tokenizer, facts)
    return tokenizer


def trained(name: str, method: str, **settings: Any) -> EncoderClassifier:
    """A model whose adapters and head are not what they were built as."""
    sizes = TINY[name] | {"vocab_size": 320}
    model = tiny(name, method=method, overrides=sizes, **settings)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def plain_logits(folder: Path, adapter: bool) -> Tensor:
    """Without a line of trainfit."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = AutoModel.from_pretrained(folder / "encoder").eval()
    if adapter:
        from peft import PeftModel

        encoder = PeftModel.from_pretrained(encoder, folder / "adapter").eval()
    head = load_file(folder / "head.safetensors")
    assert json.loads((folder / "head.json").read_text())["pooling"] == "mean"
    rows = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        rows.append(hidden.mean(1) @ head["head.weight"].T + head["head.bias"])
    return torch.cat(rows)


@pytest.mark.parametrize("method", ["full", "frozen", "lora", "dora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_plain_transformers_gives_the_same_logits(tmp_path: Path, name: str, method: str):
    model = trained(name, method)
    tokenizer = write(tmp_path / "export", model)
    tokens = tokenize_texts(tokenizer, TEXTS, [0, 0, 0], max_length=38)
    ours = torch.from_numpy(predict(model, tokens, 8))
    adapter = method in ("lora", "dora")
    assert (tmp_path / "export" / "adapter").is_dir() == adapter
    plain = plain_logits(tmp_path / "export", adapter).double().softmax(-1)
    torch.testing.assert_close(plain, ours, atol=2e-6, rtol=1e-5)
    again = load_export(tmp_path / "export")
    theirs = torch.from_numpy(predict(again.model, tokens, 8))
    torch.testing.assert_close(theirs, ours, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["single_label_classification", "regression"])
@pytest.mark.parametrize(("method", "dtype"), [("full", "float32"), ("dora", "bfloat16")])
def test_the_code_of_a_card_gives_the_same_numbers(
    tmp_path: Path,
    kind: str,
    method: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    model = trained("gemma-2-2b", method, dtype=dtype)
    tokenizer = write(tmp_path / "export", model)
    facts = {"problem_type": kind, "target_mean": 5.0, "target_std": 2.0, "max_length": 38}
    code = code_for(facts, standard=False, how=codec.encode(model.settings))
    monkeypatch.chdir(tmp_path / "export")
    capsys.readouterr()
    exec(code, {})
    said = capsys.readouterr().out.strip().removeprefix("tensor(").removesuffix(")")
    ours = model(torch.tensor([tokenizer("a text")["input_ids"]]))
    wanted = ours * 2 + 5 if kind == "regression" else ours
    off = 2e-4 if dtype == "float32" else 0.1
    assert ast.literal_eval(said)[0] == pytest.approx(wanted[0].tolist(), abs=off)


def test_the_exported_decoder_looks_both_ways_in_plain_transformers(tmp_path: Path):
    """A causal one would give the first token the same output whatever comes later."""
    write(tmp_path / "export", trained("gemma-3-1b-it", "full"))
    encoder = AutoModel.from_pretrained(tmp_path / "export" / "encoder").eval()
    first, second = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 6, 7, 9]])
    with torch.no_grad():
        a, b = (encoder(input_ids=ids).last_hidden_state[0, 0] for ids in (first, second))
    assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize("pooling", ["first", "last", "max", "attention_kv", "attention_query"])
def test_every_pooler_comes_back(tmp_path: Path, pooling: str):
    model = trained("bert-base", "full", pooling=pooling)
    tokenizer = write(tmp_path / "export", model)
    tokens = tokenize_texts(tokenizer, TEXTS, [0, 0, 0], max_length=38)
    again = load_export(tmp_path / "export").model
    ours, theirs = (torch.from_numpy(predict(m, tokens, 8)) for m in (model, again))
    torch.testing.assert_close(theirs, ours)


def test_an_export_replaces_the_one_before_and_leaves_nothing_half_written(tmp_path: Path):
    write(tmp_path / "export", trained("bert-base", "lora"))
    write(tmp_path / "export", trained("bert-base", "full"))
    assert not (tmp_path / "export" / "adapter").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
