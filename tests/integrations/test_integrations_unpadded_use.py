"""An unpadded model is copied, saved, adapted, compiled and wrapped as any other."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    T5Config,
    T5Model,
)
from unpadded_tiny import batch, check_same, config, counting_packed, gradients, pair

import trainfit
from trainfit.core.errors import BadInput

LABELS = {"labels": torch.tensor([0, 2, 1, 1])}
CASES = [("bert", "classes"), ("deberta-v3", "classes"), ("llama", "causal")]


def inputs_of(name: str, head: str) -> dict[str, Any]:
    rows = batch(name)
    return rows | (_shifted(rows, head) | {"use_cache": False} if head == "causal" else LABELS)


# ── the object ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "head"), CASES)
def test_copies_and_pickles_go_without_padding(name: str, head: str) -> None:
    plain, model = pair(name, head)
    again = pickle.loads(pickle.dumps(model))  # noqa: S301
    for other in (copy.deepcopy(model), again):
        assert check_same(plain, other, inputs_of(name, head))
        with torch.no_grad():  # a copy has weights of its own
            next(other.parameters()).zero_()
        assert check_same(plain, model, inputs_of(name, head))


@pytest.mark.parametrize(("name", "head"), CASES)
def test_the_model_is_still_itself(name: str, head: str, tmp_path: Path) -> None:
    plain, model = pair(name, head)
    assert isinstance(model, type(plain))
    assert type(model).__name__ == type(plain).__name__
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert list(model.state_dict()) == list(plain.state_dict())
    for one, folder in ((plain, tmp_path / "plain"), (model, tmp_path / "unpadded")):
        one.save_pretrained(folder)
    texts = [(tmp_path / one / "config.json").read_text() for one in ("plain", "unpadded")]
    assert texts[0] == texts[1]
    loaded = type(plain).from_pretrained(tmp_path / "unpadded")
    with counting_packed() as packed:
        torch.testing.assert_close(
            loaded(**inputs_of(name, head)).logits, plain(**inputs_of(name, head)).logits
        )
    assert packed == []


@pytest.mark.parametrize(("name", "head"), CASES)
def test_padded_undoes_it(name: str, head: str) -> None:
    plain, model = pair(name, head)
    assert trainfit.unpadded(model) is model  # twice is once
    assert trainfit.padded(model) is model
    assert type(model) is type(plain)
    assert model.config._attn_implementation == plain.config._attn_implementation
    assert check_same(plain, model, inputs_of(name, head)) == []
    assert check_same(plain, trainfit.unpadded(model), inputs_of(name, head))


def test_replicas_on_other_gpus_compute_with_their_own_weights() -> None:
    _, model = pair("bert")
    rows = batch("bert")
    replica = model._replicate_for_data_parallel()
    replica.bert = model.bert._replicate_for_data_parallel()
    replica.bert.embeddings = copy.deepcopy(model.bert.embeddings)
    with torch.no_grad():
        replica.bert.embeddings.word_embeddings.weight.mul_(2)
        model_logits, replica_logits = model(**rows).logits, replica(**rows).logits
        model.bert.embeddings.word_embeddings.weight.mul_(2)
        torch.testing.assert_close(replica_logits, model(**rows).logits)
    assert not torch.allclose(model_logits, replica_logits)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_models_with_capped_logits_are_as_their_implementation_has_them(
    implementation: str,
) -> None:
    torch.manual_seed(0)
    auto = AutoModelForSequenceClassification
    plain = auto.from_config(config("gemma-2"), attn_implementation=implementation).eval()
    model = trainfit.unpadded(copy.deepcopy(plain))
    assert check_same(plain, model, batch("gemma-2") | LABELS)


# ── what others do with it ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "head"), CASES)
def test_gradient_checkpointing(name: str, head: str) -> None:
    plain, model = pair(name, head)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train(), plain.train()
    packed = [check_same(plain, model, inputs_of(name, head)) for _ in range(2)]
    assert packed[1]  # a head per token is watched first


@pytest.mark.parametrize("before", [True, False])
def test_adapters(before: bool) -> None:
    settings = LoraConfig(target_modules=["query", "value"], task_type="SEQ_CLS", r=2)
    plain, _ = pair("bert")
    other = copy.deepcopy(plain)
    other = trainfit.unpadded(other) if before else other
    torch.manual_seed(1)
    plain = get_peft_model(plain, settings).eval()
    other = get_peft_model(other, settings).eval()
    other.load_state_dict(plain.state_dict())
    other = other if before else trainfit.unpadded(other)
    assert check_same(plain, other, batch("bert") | LABELS)
    assert {name for name in gradients(other) if "lora_" in name}


def test_accelerate() -> None:
    AcceleratorState._reset_state(True)  # of other tests
    plain, model = pair("bert", "body")
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    with counting_packed() as packed:
        found = prepared(**batch("bert")).last_hidden_state
    real = batch("bert")["attention_mask"].bool()
    torch.testing.assert_close(
        found[real], plain(**batch("bert")).last_hidden_state[real], atol=0.1, rtol=0.1
    )
    assert packed
    trainfit.padded(model)  # the wrapper still holds the former forward
    assert prepared(**batch("bert")).last_hidden_state[~real].any()
    AcceleratorState._reset_state(True)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    plain, model = pair("bert")
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        with counting_packed() as packed:
            wrapped(**inputs_of("bert", "classes")).loss.backward()
        assert packed
        plain(**inputs_of("bert", "classes")).loss.backward()
        for part, gradient in gradients(plain).items():
            torch.testing.assert_close(gradients(model)[part], gradient, rtol=1e-4, atol=1e-5)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.soak
@pytest.mark.parametrize(("name", "head"), CASES)
def test_compile(name: str, head: str) -> None:
    plain, model = pair(name, head, num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager")
    for lengths in ((5, 11, 1, 8), (4, 2, 7, 7)):
        rows = batch(name, lengths=lengths)
        assert check_same(plain, compiled, inputs_of(name, head) | rows | _shifted(rows, head))


def _shifted(rows: dict[str, Tensor], head: str) -> dict[str, Tensor]:
    real = rows["attention_mask"].bool()
    return {"labels": torch.where(real, rows["input_ids"], -100)} if head == "causal" else {}


@pytest.mark.parametrize("name", ["bert", "deberta-v3"])
def test_attention_dropout_is_honoured(name: str) -> None:
    _, model = pair(name, "body")
    rates = {n: m for n, m in model.named_modules() if isinstance(m, nn.Dropout)}
    chosen = [n for n in rates if n.endswith("attention.self.dropout")]
    assert chosen
    rows = batch(name)
    real = rows["attention_mask"].bool()
    model.train()(**rows).last_hidden_state[real].sum().backward()  # is watched
    kept = model(**rows).last_hidden_state
    torch.testing.assert_close(model(**rows).last_hidden_state, kept)
    for one in chosen:
        rates[one].p = 0.5
    with counting_packed() as packed:
        dropped = [model(**rows).last_hidden_state for _ in range(2)]
    assert len(packed) == 2
    assert not torch.allclose(*dropped)


# ── heads of others ───────────────────────────────────────────────────────────────────────────


class Pooled(nn.Module):
    """A classifier as scripts have it: a body of transformers and a mean over its columns."""

    def __init__(self, body: nn.Module, masked: bool) -> None:
        super().__init__()
        self.body, self.masked = body, masked
        self.score = nn.Linear(32, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        seen = attention_mask[..., None] if self.masked else torch.ones_like(hidden[..., :1])
        return {"logits": self.score((hidden * seen).sum(1) / seen.sum(1))}


@pytest.mark.parametrize("masked", [True, False])
def test_a_head_of_a_script_is_watched_for_one_backward_pass(masked: bool) -> None:
    torch.manual_seed(0)
    plain = Pooled(AutoModel.from_config(config("bert"), add_pooling_layer=False), masked).eval()
    model = trainfit.unpadded(copy.deepcopy(plain))
    for side in ("right", "left"):
        taken = []
        for _ in range(3):
            plain.zero_grad(), model.zero_grad()
            with counting_packed() as packed:
                found, wanted = model(**batch("bert", side)), plain(**batch("bert", side))
            torch.testing.assert_close(found["logits"], wanted["logits"], rtol=1e-5, atol=1e-5)
            found["logits"].square().sum().backward()
            wanted["logits"].square().sum().backward()
            for part, gradient in gradients(model).items():
                torch.testing.assert_close(gradient, gradients(plain)[part], rtol=1e-4, atol=1e-4)
            taken.append(bool(packed))
        assert taken == [False, masked, masked], side


def test_gradients_that_are_all_zero_say_nothing_about_a_head() -> None:
    torch.manual_seed(0)
    body = AutoModel.from_config(config("bert"), add_pooling_layer=False)
    model = trainfit.unpadded(Pooled(body, masked=True).eval())
    nn.init.zeros_(model.score.weight)
    for factor, packs in ((0.0, False), (float("nan"), False), (1.0, False), (1.0, True)):
        with counting_packed() as packed:
            logits = model(**batch("bert"))["logits"]
        assert bool(packed) is packs
        (logits * factor).sum().backward()
        nn.init.ones_(model.score.weight) if factor == 0.0 else None


@pytest.mark.parametrize("masked", [True, False])
def test_a_loss_outside_of_the_model_is_watched_in_training(masked: bool) -> None:
    plain, model = pair("bert", "tokens")
    rows = batch("bert")
    real = rows["attention_mask"].bool()
    model.train()
    for step in range(3):
        with counting_packed() as packed:
            losses = [one(**rows).logits.square() for one in (plain, model)]
        losses = [loss[real].sum() if masked else loss.sum() for loss in losses]
        torch.testing.assert_close(*losses)
        losses[1].backward()
        assert bool(packed) is (masked and step > 0)


@pytest.mark.parametrize("auto", [AutoModelForQuestionAnswering, AutoModelForMultipleChoice])
def test_heads_that_are_not_known_are_right(auto: Any) -> None:
    torch.manual_seed(0)
    plain = auto.from_config(config("bert", num_labels=2)).eval()
    model = trainfit.unpadded(copy.deepcopy(plain))
    rows: dict[str, Any] = batch("bert")
    asks = auto is AutoModelForQuestionAnswering
    if asks:
        rows |= {"start_positions": torch.zeros(4).long(), "end_positions": torch.zeros(4).long()}
    else:
        rows = {name: value[None] for name, value in rows.items()} | {"labels": torch.tensor([2])}
    for step in range(2):
        plain.zero_grad(), model.zero_grad()
        with counting_packed() as packed:
            found, wanted = model(**rows).loss, plain(**rows).loss
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        found.backward(), wanted.backward()
        assert bool(packed) is (step == 1 and not asks)


class Own(BertForSequenceClassification):
    """A subclass of a script."""


def test_a_subclass_of_a_script_is_taken() -> None:
    torch.manual_seed(0)
    model = Own(config("bert")).eval()
    plain = copy.deepcopy(model)
    trainfit.unpadded(model)
    for step in range(2):
        assert bool(check_same(plain, model, batch("bert") | LABELS)) is (step == 1)


def test_models_that_cannot_are_refused_in_one_line() -> None:
    tiny = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, vocab_size=20)
    convolved = AutoModel.from_config(config("deberta-v3", conv_kernel_size=3))
    for model, word in (
        (T5Model(tiny), "t5"),
        (nn.Linear(2, 2), "no model of"),
        (convolved, "convol"),
    ):
        with pytest.raises(BadInput, match=word):
            trainfit.unpadded(model)


def test_a_deberta_in_float32_on_a_gpu_is_left_unless_one_insists(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainfit.integrations.unpadded_calls._on_gpu", lambda _body: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def goes_packed(kind: str, *, insist: bool = False, dtype: Any = torch.float32) -> bool:
        model = AutoModel.from_config(config(kind)).eval().to(dtype)
        model = trainfit.unpadded(trainfit.unpadded(model), insist=insist)
        with torch.no_grad(), counting_packed() as packed:
            model(**{name: v for name, v in batch(kind).items() if name != "labels"})
            model(**{name: v for name, v in batch(kind).items() if name != "labels"})
        return bool(packed)

    assert not goes_packed("deberta-v3")
    assert caplog.text.count("a DeBERTa in float32 has no kernel on a GPU") == 1
    assert goes_packed("deberta-v3", insist=True)
    assert goes_packed("deberta-v3", dtype=torch.bfloat16)
    assert goes_packed("bert")
