"""Code of a script that reads padded columns is noticed, also late and in checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForSequenceClassification, BertModel, RobertaModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.roberta import modeling_roberta
from unpadded_tiny import HEADS, batch, config

import trainfit
from trainfit.integrations import script_hooks
from trainfit.integrations.speeding import apply_speedups, facts_in


def first(model: Any) -> Tensor:
    """Read the first column of a batch."""
    found: Tensor = model(**batch("bert"))[0][:, 0]
    return found


def mean(model: Any) -> Tensor:
    """Read all columns, the padded ones too."""
    found: Tensor = model(**batch("bert"))[0].mean(1)
    return found


def bodies() -> tuple[Any, Any]:
    """Return a body twice, without dropout."""
    torch.manual_seed(0)
    plain = BertModel(config("bert"))
    return plain, copy.deepcopy(plain)


def apply_to(model: Any) -> Any:
    apply_speedups(model, ["unpadded"])
    return model


def check_steps(plain: Any, model: Any, read: Callable[[Any], Tensor], steps: int = 10) -> None:
    """Compare losses and gradients of both models."""
    for _ in range(steps):
        losses = []
        for one in (plain, model):
            one.zero_grad()
            losses.append(read(one).exp().mean())
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
        weights = (one.embeddings.word_embeddings.weight.grad for one in (plain, model))
        torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["run", "speed_up", "unpadded"])
def test_a_later_training_may_read_padding(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_reports", []), ("_earlier", []), ("_turns", None)):
        monkeypatch.setattr(script_hooks, name, value)
    monkeypatch.setattr(script_hooks, "_begin_turns", lambda *_: None)
    monkeypatch.setattr(script_hooks.atexit, "register", lambda *_: None)
    monkeypatch.setenv("TRAINFIT_SPEED_UP_NAMES", "unpadded")
    begin: dict[str, Callable[[Any], Any]] = {
        "run": lambda model: script_hooks._take(model, tmp_path, model),
        "speed_up": lambda model: trainfit.speed_up(model, quiet=True),
        "unpadded": trainfit.unpadded,
    }
    plain, model = bodies()
    begin[how](model)
    check_steps(plain, model, first)
    assert facts_in(model)[0].tally.packed
    begin[how](nn.Sequential(model))
    check_steps(plain, model, mean)


@pytest.mark.parametrize("head", ["classes", "tokens"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("read", [first, mean])
def test_a_script_may_go_past_the_head(
    read: Callable[[Any], Tensor], known: bool, head: str
) -> None:
    torch.manual_seed(0)
    plain = HEADS[head].from_config(config("bert"))
    model = copy.deepcopy(plain)
    if known:
        trainfit.unpadded(model)
    else:
        apply_speedups(model, ["unpadded"])
    check_steps(plain.bert, model.bert, read)
    [facts] = facts_in(model)
    assert bool(facts.tally.packed) == (read is first)
    assert model(**batch("bert")).logits.shape[0] == 4


def test_a_head_that_reads_padding_late_is_noticed() -> None:
    model = trainfit.unpadded(bodies()[1])
    [facts] = facts_in(model)
    for _ in range(30):
        first(model).sum().backward()
    steps = 0
    while facts.reads != "padding":
        mean(model).exp().sum().backward()
        steps += 1
    assert steps <= 50
    assert "some had zeros there" in str(facts.tally.said)


@pytest.mark.parametrize("head", ["body", "tokens"])
@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_an_evaluation_may_read_what_no_training_step_did(
    head: str, copied: bool, graded: bool
) -> None:
    """As of embeddings that are saved, or of a teacher, a copy whose logits are all compared."""
    torch.manual_seed(0)
    plain = HEADS[head].from_config(config("bert")).train()
    model = apply_to(copy.deepcopy(plain))
    for _ in range(12):
        model(**batch("bert"))[0][:, 0].sum().backward()
    [facts] = facts_in(model)
    assert facts.tally.packed
    model = (copy.deepcopy(model) if copied else model).eval()
    with torch.set_grad_enabled(graded):
        found, expected = (one(**batch("bert"))[0] for one in (model, plain.eval()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    said = any("an evaluation" in why for why in facts_in(model)[0].tally.said)
    assert said is not graded


def test_a_model_that_is_trained_in_evaluation_mode_goes_without_padding() -> None:
    """As one of from_pretrained is, in a loop that does not call train()."""
    plain, model = (one.eval() for one in bodies())
    apply_to(model)
    check_steps(plain, model, first, 12)
    [facts] = facts_in(model)
    assert facts.tally.packed == 4


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("read", [first, mean])
def test_a_checkpoint_goes_the_same_way_again(
    read: Callable[[Any], Tensor], reentrant: bool, known: bool
) -> None:
    plain, model = bodies()
    if known:
        trainfit.unpadded(model)
    else:
        apply_speedups(model, ["unpadded"])
    gate = torch.ones(1, requires_grad=True)  # a reentrant one looks for an input that learns

    def checkpointed(one: Any) -> Tensor:
        found: Tensor = checkpoint(lambda _: read(one), gate, use_reentrant=reentrant)
        return found

    check_steps(plain, model, checkpointed, 12)
    [facts] = facts_in(model)
    assert bool(facts.tally.packed) == (read is first)


def stretched(*given: Any, **named: Any) -> Any:
    """Attend by a rule of the script's own."""
    found, weights = sdpa_attention_forward(*given, **named)
    return found * 1.5, weights


@pytest.mark.parametrize("where", ["registry", "module", "torch"])
def test_an_attention_of_the_script_is_used(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = functional.scaled_dot_product_attention
    own = "eager" if where == "module" else "sdpa"
    plain: Any = RobertaModel._from_config(config("roberta"), attn_implementation=own)
    model = copy.deepcopy(plain.eval())
    trainfit.unpadded(model)
    before = model(**batch("roberta"))[0]
    if where == "registry":
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", stretched)
    elif where == "module":
        monkeypatch.setattr(modeling_roberta, "eager_attention_forward", stretched)
    else:
        monkeypatch.setattr(
            functional, "scaled_dot_product_attention", lambda *a, **n: attend(*a, **n) * 1.5
        )
    found, expected = (one(**batch("roberta"))[0] for one in (model, plain))
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, before, atol=1e-2)


def test_a_hook_on_all_modules_sees_rows() -> None:
    model, given, seen = trainfit.unpadded(bodies()[1].eval()), batch("bert"), []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _, found: seen.append((type(module).__name__, found))
    )
    try:
        model(**given)
    finally:
        handle.remove()
    shapes = {found.shape[:2] for name, found in seen if name == "BertIntermediate"}
    assert shapes == {given["input_ids"].shape}


# ── derivatives that kernels of attention do not have ─────────────────────────────────────────


@pytest.mark.parametrize("name", ["roberta", "mpnet", "deberta-v3"])
@pytest.mark.parametrize("side", ["right", "none"])
def test_gradients_of_gradients(name: str, side: str) -> None:
    made = config(name)
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    plain: Any = AutoModelForSequenceClassification.from_config(made)
    model = copy.deepcopy(plain)
    apply_speedups(model, ["unpadded"])
    for _ in range(10):
        losses = []
        for one in (plain, model):
            one.zero_grad()
            weight = one.get_input_embeddings().weight
            loss = one(**batch(name, side), labels=torch.arange(4) % 3).loss
            [slope] = torch.autograd.grad(loss, weight, create_graph=True)
            losses.append(loss + slope.square().sum())
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
    assert facts_in(model)[0].twice == (name == "roberta")


def test_forward_derivatives() -> None:
    plain: Any = RobertaModel._from_config(config("roberta"), attn_implementation="eager").eval()
    model = trainfit.unpadded(copy.deepcopy(plain))
    found = []
    for one in (plain, model):
        weights = {name: value.detach() for name, value in one.named_parameters()}

        def first_of(given: Any, one: Any = one) -> Tensor:
            read: Tensor = functional_call(one, given, (), batch("roberta"))[0][:, 0]
            return read

        found.append(jvp(first_of, (weights,), (weights,))[1])
    torch.testing.assert_close(*found)
