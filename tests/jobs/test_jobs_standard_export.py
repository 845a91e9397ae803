"""An export with transformers' own head is a classifier of transformers, and of peft."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from own_tiny import DECODERS, FAMILIES, config_of, own
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from trainfit.core.errors import BadInput
from trainfit.data import learn_tokenizer
from trainfit.data.tokens import tokenize_texts
from trainfit.jobs import exports
from trainfit.jobs.classification import in_batches
from trainfit.jobs.model_card import code_for
from trainfit.jobs.models.classifier import EncoderClassifier
from trainfit.jobs.predict import answer, load_export

TEXTS = ["one short text", "another one that is quite a bit longer than that", "a"]
CLASSES = ["no", "maybe", "yes"]


def trained(name: str, **settings: Any) -> EncoderClassifier:
    """A model whose adapters and head are not what they were built as."""
    model = own(config_of(name, vocab_size=320), **settings)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def write(folder: Path, model: EncoderClassifier) -> Tensor:
    """Export a model and return its logits."""
    pad = model.encoder.config.pad_token_id
    tokenizer = learn_tokenizer(TEXTS, vocabulary=320, pad_id=pad)
    classes = CLASSES[: model.settings.classes]
    facts = {"classes": classes, "max_length": 38, "pad_id": pad, "eval_batch_size": 8}
    if len(classes) == 1:
        facts["problem_type"] = "regression"
    exports.write_classifier(folder, model, tokenizer, facts)
    tokens = tokenize_texts(tokenizer, TEXTS, [0, 0, 0], max_length=38)
    return in_batches(model, model, tokens, 8, pad).float()


def logits_of(folder: Path, plain: Any) -> Tensor:
    """Without a line of trainfit."""
    # AutoTokenizer takes Qwen's own class for its model type, whatever was saved.
    learned = plain.config.model_type == "qwen2"
    kind = PreTrainedTokenizerFast if learned else AutoTokenizer
    tokenizer = kind.from_pretrained(folder)
    rows = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        found: Tensor = plain.eval()(**rows).logits
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_auto_classes_give_the_same_logits(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    ours = write(folder, trained(name))
    plain, loaded = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert plain.config.id2label == dict(enumerate(CLASSES))
    assert plain.config.problem_type == "single_label_classification"
    torch.testing.assert_close(logits_of(folder, plain), ours, atol=1e-5, rtol=1e-5)
    rows = answer([folder], TEXTS)
    found = torch.tensor([[row[f"p({label})"] for label in CLASSES] for row in rows])
    torch.testing.assert_close(found, ours.softmax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_pipeline_takes_the_folder(name: str, tmp_path: Path) -> None:
    ours = write(tmp_path / "export", trained(name)).softmax(-1)
    classify = pipeline("text-classification", str(tmp_path / "export"), top_k=None)
    for chances, found in zip(ours, classify(TEXTS), strict=True):
        by_name = {one["label"]: one["score"] for one in found}
        assert [by_name[label] for label in CLASSES] == pytest.approx(chances.tolist(), abs=1e-5)


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("name", ["bert", "deberta-v3", "modernbert-mean", "gpt2", "gemma-3"])
def test_adapters_are_merged_and_peft_loads_them_too(
    name: str, method: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    folder = tmp_path / "export"
    model = trained(name, method=method, lora_rank=4)
    ours = write(folder, model)
    merged = AutoModelForSequenceClassification.from_pretrained(folder)
    torch.testing.assert_close(logits_of(folder, merged), ours, atol=1e-5, rtol=1e-5)
    base = AutoModelForSequenceClassification.from_config(merged.config)
    weights = {
        f"{model.head.prefix}.{part.replace('.base_layer.', '.')}": tensor
        for part, tensor in model.encoder.state_dict().items()
        if "lora_" not in part
    }
    base.load_state_dict(weights, strict=False)  # the head is peft's to load
    adapted = PeftModel.from_pretrained(base, folder / "adapter")
    torch.testing.assert_close(logits_of(folder, adapted), ours, atol=1e-5, rtol=1e-5)


def test_half_precision_is_stored_as_it_was_and_read_as_float32(tmp_path: Path) -> None:
    write(tmp_path / "export", trained("bert", method="frozen", dtype="bfloat16"))
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export")
    assert plain.dtype == torch.float32
    again = load_export(tmp_path / "export").model
    name = "encoder.layer.0.output.dense.weight"
    assert torch.equal(plain.bert.get_parameter(name), again.encoder.get_parameter(name))


@pytest.mark.parametrize("name", DECODERS)
def test_an_exported_decoder_is_trained_on_as_it_is(name: str, tmp_path: Path) -> None:
    write(tmp_path / "export", trained(name))
    again = own(str(tmp_path / "export"))
    assert again.traits.causal
    assert again.head.reads == "last"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_text_may_end_with_the_token_that_pads(name: str, tmp_path: Path) -> None:
    """A head of transformers that looks for the last token would go past it."""
    model, folder = trained(name), tmp_path / "export"
    backend = learn_tokenizer(TEXTS, vocabulary=320).backend_tokenizer
    ends = ("[SEP]", backend.token_to_id("[SEP]"))
    backend.post_processor = TemplateProcessing(single="$A [SEP]", special_tokens=[ends])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="[SEP]", pad_token="[SEP]", unk_token="[UNK]"
    )
    facts = {"classes": CLASSES, "max_length": 38, "pad_id": ends[1], "eval_batch_size": 8}
    exports.write_classifier(folder, model, tokenizer, facts)
    ours = in_batches(model, model, tokenize_texts(tokenizer, TEXTS, [0, 0, 0], max_length=38), 8)
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    torch.testing.assert_close(logits_of(folder, plain), ours.float(), atol=1e-5, rtol=1e-5)
    rows = answer([folder], TEXTS)
    found = torch.tensor([[row[f"p({label})"] for label in CLASSES] for row in rows])
    torch.testing.assert_close(found, ours.float().softmax(-1), atol=1e-5, rtol=1e-5)


def test_weights_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    write(tmp_path / "export", trained("bert"))
    path = tmp_path / "export" / "trainfit.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"classes": [*CLASSES, "more"]}))
    exports.write_checksums(tmp_path / "export")
    with pytest.raises(BadInput, match=r"does not fit: classifier\.bias"):
        load_export(tmp_path / "export")


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("kind", ["single_label_classification", "regression"])
def test_the_code_of_a_card_runs(
    pairs: bool,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = trained("bert", classes=1 if kind == "regression" else 3)
    facts = {"problem_type": kind, "target_mean": 5.0, "target_std": 2.0, "pairs": pairs}
    code = code_for(facts, standard=True, how={})
    write(tmp_path / "export", model)
    monkeypatch.chdir(tmp_path / "export")
    capsys.readouterr()
    exec(code, {})
    tokens = AutoTokenizer.from_pretrained(".")("a text", *(["another text"] if pairs else []))
    logits = model(torch.tensor([tokens["input_ids"]]), **types_of(tokens))[0]
    said = ast.literal_eval(capsys.readouterr().out)
    if kind == "regression":
        assert said == pytest.approx(logits.item() * 2 + 5, abs=1e-4)
    else:
        rows = said[0] if isinstance(said[0], list) else said
        shown = {row["label"]: row["score"] for row in rows}
        wanted = logits.softmax(-1).tolist()
        assert [shown[label] for label in CLASSES] == pytest.approx(wanted, abs=1e-5)


def types_of(tokens: Any) -> dict[str, Tensor]:
    """Token types, where the tokenizer gives some."""
    found = tokens.get("token_type_ids")
    return {} if found is None else {"token_type_ids": torch.tensor([found])}
