"""Hooks, layers and changes of a script's own: its model works on as it does alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertForSequenceClassification, BertForTokenClassification, BertModel
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.modeling_outputs import TokenClassifierOutput
from unpadded_tiny import HEADS, batch, config, pair

import trainfit
from trainfit.integrations import script_hooks
from trainfit.integrations.script_hooks import SpeedUp
from trainfit.integrations.speeding import apply_speedups, facts_in
from trainfit.integrations.turns import PADDED, Gain, Turns


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


def test_a_hook_on_the_body_of_a_head_of_one_column_sees_its_padding() -> None:
    """Nothing watches what such a hook reads, as the head is known to read the first column."""
    plain, seen = classifier().train(), []
    model = copy.deepcopy(plain)
    apply_speedups(model, ["unpadded"])
    for one in (plain, model):
        one.bert.register_forward_hook(lambda _m, _i, out: seen.append(out[0].square().mean()))
        one(**batch("bert"))
    torch.testing.assert_close(*seen)


def test_noise_on_embeddings_is_scaled_by_the_width_of_rows() -> None:
    model = classifier()
    trainfit.unpadded(model)
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    model.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    model(**batch("bert"))
    assert facts_in(model)[0].tally.packed == 0


@pytest.mark.parametrize(("head", "kind"), [("classes", "hidden"), ("tokens", "logits")])
@pytest.mark.parametrize("masked", [False, True])
def test_a_loss_beside_that_of_the_model_is_watched(head: str, masked: bool, kind: str) -> None:
    torch.manual_seed(0)
    plain = HEADS[head].from_config(config("bert"))
    model, given = copy.deepcopy(plain), batch("bert")
    apply_speedups(model, ["unpadded"])
    real = given["attention_mask"]
    labels = torch.where(real == 1, given["input_ids"] % 3, -100)
    given["labels"] = torch.arange(4) % 3 if head == "classes" else labels

    def loss_of(one: Any) -> Tensor:
        """Add a distance to a teacher's, with the padding or without."""
        output = one(**given, output_hidden_states=kind == "hidden")
        seen = output.hidden_states[-1] if kind == "hidden" else output.logits
        return output.loss + (seen.square() * (real[..., None] if masked else 1)).mean()

    with torch.no_grad():  # as an evaluation before the training
        torch.testing.assert_close(loss_of(model), loss_of(plain))
    for _ in range(10):
        losses = [loss_of(one) for one in (model, plain)]
        torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
        sum(losses).backward()  # type: ignore[union-attr]
    assert bool(facts_in(model)[0].tally.packed) == masked


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


def mean_of_rows(logits: Tensor, labels: Tensor, *_: Any, **_rest: Any) -> Tensor:
    """Weigh all rows alike, which a packed row does not show."""
    learnt = labels != -100
    losses = functional.cross_entropy(logits.mT, labels.where(learnt, 0), reduction="none")
    return ((losses * learnt).sum(1) / learnt.sum(1)).mean()


def own_forward(
    self: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
) -> TokenClassifierOutput:
    logits = self.classifier(self.bert(input_ids, attention_mask=attention_mask)[0])
    return TokenClassifierOutput(loss=mean_of_rows(logits, labels), logits=logits)


@pytest.mark.parametrize("where", ["loss_function", "class", "instance"])
def test_a_head_that_a_script_has_changed_computes_as_it_does_alone(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    head, name = ("causal", "llama") if where == "loss_function" else ("tokens", "bert")
    plain = HEADS[head].from_config(config(name))
    if where == "class":
        monkeypatch.setattr(BertForTokenClassification, "forward", own_forward)
    model = copy.deepcopy(plain)
    for one in (plain, model):
        if where == "loss_function":
            one.loss_function = mean_of_rows
        if where == "instance":  # so does Accelerate for an evaluation in half precision
            forward = one.forward
            one.forward = lambda forward=forward, **given: forward(**given)
    apply_speedups(model, ["unpadded"])
    given = batch("bert")
    given["labels"] = given["input_ids"] % 3  # of the padding too
    if where != "instance":
        given["labels"] = given["labels"].where(given["attention_mask"] == 1, -100)
    for _ in range(10):
        alone, loss = (one(**given).loss for one in (plain, model))
        torch.testing.assert_close(loss, alone, rtol=0, atol=1e-5)
        loss.backward()
    facts = facts_in(model)
    assert sum(one.tally.packed for one in facts) == (2 if where == "class" else 0)


@pytest.mark.parametrize("heads", [("classes", "tokens"), ("tokens", "tokens")])
@pytest.mark.parametrize("together", [True, False])
def test_heads_that_share_a_body_compute_as_they_do_alone(
    heads: tuple[str, str], together: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([HEADS[head].from_config(config("bert")) for head in heads])
    plain[1].bert = plain[0].bert
    model = copy.deepcopy(plain)
    for part in [model] if together else model:
        trainfit.unpadded(part)
    given = batch("bert", "left")
    labels = {"classes": torch.arange(4) % 3, "tokens": given["input_ids"] % 3}  # of padding too
    for _ in range(2):
        for head, one, other in zip(heads, model, plain, strict=True):
            loss, alone = (each(**given, labels=labels[head]).loss for each in (one, other))
            torch.testing.assert_close(loss, alone, rtol=0, atol=1e-5)
            loss.backward()
    [facts] = facts_in(model)
    assert facts.reads == "padding"


def test_an_error_beside_a_model_never_ends_the_script(
    scripts: Callable[..., Any], tmp_path: Path
) -> None:
    class Loop:
        def fit(self, model: Any) -> str:
            return type(model).__name__

    del scripts
    name = "lightning.pytorch.trainer.trainer"
    script_hooks.hook(SimpleNamespace(__name__=name, Trainer=Loop), tmp_path)
    lazy = nn.Sequential(classifier(), nn.LazyLinear(2))  # its weights have no number of elements
    assert Loop().fit(lazy) == "Sequential"


def test_a_body_with_another_forward_keeps_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = BertModel.forward
    monkeypatch.setattr(BertModel, "forward", lambda *given, **named: forward(*given, **named))
    assert (
        "the forward of BertModel was replaced" in apply_speedups(classifier(), ["unpadded"]).line()
    )


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


def test_a_second_head_that_reads_padding_is_noticed() -> None:
    plain = BertModel(config("bert"))
    model = copy.deepcopy(plain)
    apply_speedups(model, ["unpadded"])
    for _ in range(9):
        model(**batch("bert"))[0][:, 0].sum().backward()
    [facts] = facts_in(model)
    assert (facts.tally.own_way, facts.tally.packed) == (8, 1)  # heads may take turns
    model(**batch("bert"))[0].exp().mean().backward()
    assert facts.reads == "padding"
    found, expected = (one(**batch("bert"))[0].mean(1) for one in (model, plain))
    torch.testing.assert_close(found, expected)


# ── the closing line ──────────────────────────────────────────────────────────────────────────


def closing_line(folder: Path) -> str:
    """Return what a script that ends now is told."""
    script_hooks._report(folder)
    return SpeedUp.load(next(folder.glob("*.json"))).line()


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Take models as the loops of one script do."""
    for name, value in (("_reports", []), ("_earlier", []), ("_turns", None), ("_loops", [])):
        monkeypatch.setattr(script_hooks, name, value)
    monkeypatch.setattr(script_hooks.atexit, "register", lambda *_: None)
    monkeypatch.setenv("TRAINFIT_SPEED_UP_NAMES", "unpadded")
    yield partial(script_hooks._take, folder=tmp_path, loop=nn.Identity())
    if script_hooks._turns is not None:
        script_hooks._turns.pause()


def test_reasons_for_padding_are_told_at_the_end(
    scripts: Callable[..., Any], tmp_path: Path
) -> None:
    model = classifier()
    scripts(model)
    model.bert.encoder.layer[0].register_forward_hook(lambda *_: None)
    model(**batch("bert"))
    turns = script_hooks._turns
    turns.gain, turns.seconds[PADDED] = Gain(1.12, 0.09, 16), [1.0, 1.0]  # noise: all were the same
    line = closing_line(tmp_path)
    whole = "trainfit: nothing changed; all 1 batches went the model's own way (with padding: "
    assert line.startswith(whole + "a hook on BertLayer")
    assert "times" not in line


def test_a_frozen_body_says_why_it_keeps_its_padding() -> None:
    model = BertModel(config("bert")).requires_grad_(requires_grad=False)
    apply_speedups(model, ["unpadded"])
    model.train()(**batch("bert"))
    [said] = facts_in(model)[0].tally.said
    assert "no gradient reaches it" in said


def test_a_body_that_is_not_trained_says_why_it_keeps_its_padding(
    scripts: Callable[..., Any], tmp_path: Path
) -> None:
    model = BertModel(config("bert"))
    scripts(model)
    with torch.no_grad():
        model(**batch("bert"))
    assert "(with padding: no training step has shown yet" in closing_line(tmp_path)
    model.eval()
    with torch.no_grad():
        model(**batch("bert"))
    assert "(with padding: an evaluation, which may read padded columns" in closing_line(tmp_path)


def test_all_models_of_a_script_are_told(scripts: Callable[..., Any], tmp_path: Path) -> None:
    model = classifier()
    for one in (model, BertModel(config("bert")), torch.nn.Linear(2, 2)):
        scripts(one)
    model(**batch("bert"))
    line = closing_line(tmp_path)
    assert "BertForSequenceClassification without padding, BertModel without padding" in line
    assert "Linear" not in line


def test_a_model_is_counted_once_however_it_is_wrapped(scripts: Callable[..., Any]) -> None:
    model = classifier()
    scripts(model)
    scripts(nn.ModuleList([model]))
    assert len(script_hooks._reports) == 1


def test_a_model_of_another_kind_has_turns_of_its_own(scripts: Callable[..., Any]) -> None:
    scripts(classifier())
    first = script_hooks._turns
    first._switch(PADDED)
    first.stepped()
    first._leave()
    scripts(classifier())
    assert script_hooks._turns is first  # a second fold goes as the first was found to be best
    assert all(one.off for one in first.facts)
    other = BertModel(config("bert"))
    scripts(other)
    assert script_hooks._turns is not first
    assert not facts_in(other)[0].off
    script_hooks._turns.stepped()
    scripts(classifier())
    assert script_hooks._turns is first


def test_steps_that_are_left_are_those_of_the_outermost_loop(
    scripts: Callable[..., Any], tmp_path: Path
) -> None:
    class Accelerator:
        def prepare(self, model: nn.Module) -> nn.Module:
            return model

    class Trainer:
        state = SimpleNamespace(max_steps=30, global_step=12)

        def __init__(self) -> None:
            self.model = classifier()

        def train(self) -> Any:
            Accelerator().prepare(self.model)
            return script_hooks._turns.left()

    del scripts
    for name, kind in (("transformers.trainer", Trainer), ("accelerate.accelerator", Accelerator)):
        script_hooks.hook(SimpleNamespace(__name__=name, **{kind.__name__: kind}), tmp_path)
    assert Trainer().train() == 18


def test_a_turn_with_an_evaluation_in_it_is_not_timed() -> None:
    model = trainfit.unpadded(classifier())
    now = 0.0
    turns = Turns(clock=lambda: now)
    turns.facts.update(facts_in(model))
    for step in range(80):
        model(**batch("bert"))
        now += 1.0
        if step % 12 == 0:
            with torch.no_grad():
                model(**batch("bert"))
            now += 50.0
        turns.stepped()
    assert turns.gain is not None
    assert (turns.gain.times, turns.gain.error) == (1.0, 0.0)


def test_trainings_of_a_step_or_two_are_never_timed() -> None:
    model = trainfit.unpadded(classifier())
    turns = Turns(clock=lambda: 0.0)
    for _ in range(100):
        turns.begin(facts_in(model))
        turns.stepped()
    turns.pause()
    assert turns.ended
    assert turns.gain is None
    assert not facts_in(model)[0].off


def test_a_gain_within_its_error_is_said_to_be_none() -> None:
    found = SpeedUp(done=("Bert",), times=1.2, error=0.4).line()
    assert "no clear gain; 1.20 times as fast as your script alone (±0.40)" in found
    assert "clear" not in SpeedUp(done=("Bert",), times=1.2, error=0.1).line()


def test_a_trainer_that_trains_again_is_changed_once() -> None:
    trainer = SimpleNamespace(model=classifier(), model_init=classifier)
    apply_speedups(trainer, ["unpadded"])
    built = trainer.model_init
    trainer.model = built()
    apply_speedups(trainer, ["unpadded"])
    assert trainer.model_init is built


def test_a_graph_that_a_script_captures_is_not_waited_in(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given, waits = classifier(), batch("bert"), []
    trainfit.unpadded(model)
    [facts] = facts_in(model)
    monkeypatch.setattr("trainfit.integrations.unpadded_calls._on_gpu", lambda _body: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(True))
    model(**given)
    assert facts.tally.said == {"the script captures a graph of its own"}
    turns = Turns()
    turns._clock()
    assert not waits
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    turns._clock()
    assert waits
