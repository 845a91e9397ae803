"""A model of words is transformers' token classifier: logits, loss, gradients and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from jobs_tiny import rows_of
from own_tiny import COMMON, FAMILIES, config_of, own
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from trainfit.core.errors import TrainfitWarning
from trainfit.data.batches import collate_packed, collate_padded
from trainfit.data.tokenizers import learn_tokenizer
from trainfit.data.tokens import Tokens, tokenize_words
from trainfit.jobs import exports
from trainfit.jobs.classification import ClassifierTask, in_batches
from trainfit.jobs.model_card import code_for
from trainfit.jobs.models.classifier import EncoderClassifier, classification_loss
from trainfit.jobs.predict import answer_words, load_export
from trainfit.jobs.targets import WordTags

NAMES = ["bert", "roberta", "distilbert", "deberta-v3", "modernbert-cls", "gpt2", "llama", "qwen3"]
CLASSES = ["B-PER", "I-PER", "O"]
SENTENCES = [["Anna", "May", "left"], ["one", "Bo"], ["nobody", "came", "back", "to", "Anna"]]
TAGS = [[0, 1, 2], [2, 0], [2, 2, 2, 2, 0]]


def tagged(lengths: tuple[int, ...] = (5, 17, 1, 9), seed: int = 1) -> Tokens:
    random = np.random.default_rng(seed)
    sizes = np.array(lengths)
    tags = random.integers(0, 3, sizes.sum()).astype(np.int32)
    tags[random.random(tags.size) < 0.4] = -100
    starts = np.cumsum(sizes) - sizes
    return Tokens(
        ids=random.integers(3, 90, sizes.sum()).astype(np.int32),
        starts=starts,
        lengths=sizes,
        labels=np.add.reduceat(tags != -100, starts, dtype=np.int64),
        tags=tags,
    )


def plain_of(model: EncoderClassifier) -> Any:
    config = model.head.model.config
    plain = AutoModelForTokenClassification.from_config(config, attn_implementation="eager")
    inside = {f"{model.head.prefix}.{n}": t for n, t in model.encoder.state_dict().items()}
    plain.load_state_dict(inside | model.head.model.state_dict())
    return plain.eval()


def named(model: EncoderClassifier) -> dict[str, Tensor]:
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    inside = {n for n in grads if n.startswith("encoder.")}
    return {
        f"{model.head.prefix}.{n[8:]}" if n in inside else n.removeprefix("head.model."): grad
        for n, grad in grads.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_logits_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    model = own(config_of(name), words=True)
    plain, tokens = plain_of(model), tagged()
    pad = plain.config.pad_token_id
    batch = collate_padded(tokens, range(4), 4, 17, pad)
    labels = batch.pop("labels")
    wanted = plain(**batch, labels=labels)
    count = int((labels != -100).sum())
    wanted.loss.backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    size = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    packed = collate_packed(tokens, range(4), 40, 6, pad)
    wider = collate_padded(tokens, range(4), 5, 20, pad)
    for form in (packed, wider):
        model.zero_grad()
        truth = form.pop("labels")
        logits = model(**form)
        here = truth != -100
        torch.testing.assert_close(
            logits[here], wanted.logits[labels != -100], rtol=1e-5, atol=1e-5
        )
        loss = classification_loss(logits, truth) / count
        torch.testing.assert_close(loss, wanted.loss, rtol=1e-5, atol=1e-6)
        loss.backward()
        found = named(model)
        assert found.keys() == expected.keys()
        for part, gradient in found.items():
            assert (gradient - expected[part]).norm() < 1e-5 * size, part


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0]])
def test_micro_batches_add_up_to_the_mean_over_words(weights: list[float] | None) -> None:
    model, tokens = own(config_of("bert"), words=True), tagged((5, 17, 1, 9, 3, 12))
    task = ClassifierTask(
        lambda: model,
        tokens,
        tokens,
        effective_batch=6,
        target=WordTags(("A", "B", "C")),
        class_weights=weights,
    )
    whole = collate_padded(tokens, range(6), 6, 17)
    logits = model(whole["input_ids"], whole["attention_mask"])
    given = None if weights is None else torch.tensor(weights)
    wanted = functional.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten(), given)
    parts = [task.collate(each, 1, 40, 4) for each in ([3, 0], [1], [5, 2, 4])]
    loss = sum(task.loss(model, part) for part in parts) / task.weight(range(6))
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_outputs_of_words_come_in_their_order(packed: bool) -> None:
    model, tokens = own(config_of("bert"), words=True).eval(), tagged((5, 17, 1, 9, 3, 12))
    found = in_batches(model, model, tokens, 2, packed=packed)
    wanted = []
    for at in range(len(tokens)):
        start = int(tokens.starts[at])
        assert tokens.tags is not None
        here = tokens.tags[start : start + int(tokens.lengths[at])] != -100
        ids = torch.from_numpy(tokens.sequence(at)).long()[None]
        wanted.append(model(ids, torch.ones_like(ids))[0, torch.from_numpy(here)])
    torch.testing.assert_close(found, torch.cat(wanted).double(), rtol=1e-5, atol=1e-5)
    assert len(found) == len(tokens.truth)


def test_a_model_without_such_a_class_gets_a_linear_head(tmp_path: Path) -> None:
    kinds = transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    assert transformers.OlmoConfig not in kinds
    with pytest.warns(TrainfitWarning, match="no head for olmo that can be taken: it is linear"):
        model = own(transformers.OlmoConfig(**COMMON | {"vocab_size": 320}), words=True)
    batch = rows_of([torch.arange(3, 8), torch.arange(5, 7)], pad=0)
    padded, packed = model(**batch.padded), model(**batch.packed)
    torch.testing.assert_close(packed[0, :5], padded[0], rtol=1e-5, atol=1e-5)
    _same_after_export(tmp_path / "export", model.eval())


def _same_after_export(folder: Path, model: EncoderClassifier) -> tuple[Any, Tensor]:
    """Export a model and load it again; return the tokenizer and its logits of the words."""
    pad = model.encoder.config.pad_token_id
    tokenizer = learn_tokenizer(
        [" ".join(row) for row in SENTENCES] * 9, vocabulary=300, pad_id=pad
    )
    facts = {
        "task": "tokens",
        "problem_type": "token_classification",
        "classes": CLASSES,
        "max_length": 38,
        "pad_id": pad,
        "eval_batch_size": 2,
    }
    exports.write_classifier(folder, model, tokenizer, facts)
    tokens = tokenize_words(tokenizer, SENTENCES, TAGS, max_length=38)
    wanted = in_batches(model, model, tokens, 8, pad).float()
    again = load_export(folder)
    found = in_batches(again.model, again.model, tokens, 8, pad).float()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    return tokenizer, wanted


@pytest.mark.parametrize(
    ("name", "method"),
    [("bert", "full"), ("roberta", "full"), ("modernbert-cls", "lora"), ("gpt2", "full")],
)
def test_an_export_is_a_token_classifier_of_transformers(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in FAMILIES
    model = own(config_of(name, vocab_size=320), words=True, method=method)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    folder = tmp_path / "export"
    _, wanted = _same_after_export(folder, model.eval())
    plain = AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert [plain.config.id2label[number] for number in range(3)] == CLASSES
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    found = []
    for words in SENTENCES:
        batch = tokenizer(" ".join(words), return_tensors="pt")
        of = tokenizer(words, is_split_into_words=True).word_ids()
        first = [word is not None and word not in of[:at] for at, word in enumerate(of)]
        found.append(plain(**batch).logits[0, torch.tensor(first)])
    torch.testing.assert_close(torch.cat(found), wanted, rtol=1e-5, atol=1e-5)
    answers = answer_words([folder], dict(enumerate(SENTENCES, 1)))
    assert [row["word"] for row in answers] == [word for row in SENTENCES for word in row]
    assert [row["tag"] for row in answers] == [CLASSES[k] for k in wanted.argmax(1).tolist()]
    chances = wanted.softmax(1).amax(1).tolist()
    assert [row["p"] for row in answers] == pytest.approx(chances, abs=1e-5)
    if type(AutoTokenizer.from_pretrained(folder)) is transformers.PreTrainedTokenizerFast:
        tag = pipeline("token-classification", str(folder), ignore_labels=[])
        of = tokenizer(SENTENCES[0], is_split_into_words=True).word_ids()
        said = {one["index"]: one for one in tag(" ".join(SENTENCES[0]))}
        for word, answer in enumerate(answers[:3]):
            one = said[of.index(word)]
            assert one["entity"] == answer["tag"]
            assert one["score"] == pytest.approx(answer["p"], abs=1e-5)
        monkeypatch.chdir(folder)
        code = code_for(
            {"problem_type": "token_classification", "classes": CLASSES}, standard=True, how={}
        )
        exec(compile(code, "card", "exec"), {})


def test_words_beyond_the_length_have_no_tag(tmp_path: Path) -> None:
    model = own(config_of("bert", vocab_size=320), words=True).eval()
    _same_after_export(tmp_path / "export", model)
    long = ["Anna"] * 60
    with (
        pytest.warns(TrainfitWarning, match="24 words have no tag"),
        pytest.warns(TrainfitWarning, match="skipped 1 of 3 rows without words"),
    ):
        answers = answer_words([tmp_path / "export"], {1: long, 3: [], 4: ["Bo"]})
    assert [row["tag"] is None for row in answers] == [False] * 36 + [True] * 24 + [False]
    assert [row["row"] for row in answers] == [1] * 60 + [4]
