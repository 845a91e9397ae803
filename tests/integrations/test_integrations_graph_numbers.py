"""Numbers besides weights and tokens that a pass depends on: random ones, rates and scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_stand_in import run_again
from peft import LoraConfig, get_peft_model
from torch import Tensor
from unpadded_tiny import HEADS, batch, config

import trainfit
from trainfit.integrations.body_graphs import BodyGraphs
from trainfit.integrations.speeding import facts_in


def graphed(dropout: float) -> tuple[Any, BodyGraphs]:
    torch.manual_seed(0)
    model = trainfit.unpadded(HEADS["classes"].from_config(config("bert", dropout))).train()
    [facts] = facts_in(model)
    facts.graphs = BodyGraphs(run_again)
    return model, facts.graphs


def cached_step(model: Any, parts: list[dict[str, Tensor]]) -> None:
    """One step of gradient caching: passes without gradients, the loss, the same with them."""
    states, found = [], []
    with torch.no_grad():
        for part in parts:
            states.append(torch.get_rng_state())
            found.append(model(**part).logits)
    for state, part, was in zip(states, parts, found, strict=True):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            again = model(**part).logits
        torch.testing.assert_close(again, was, rtol=1e-5, atol=1e-6)
        (again * was).sum().backward()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_pass_that_is_taken_again_draws_the_same(dropout: float, parts: int) -> None:
    model, graphs = graphed(dropout)
    given = [batch("bert", lengths=(9, 5, 7, 3), seed=at) for at in range(parts)]
    for _ in range(4):
        cached_step(model, given)
    assert (graphs.replayed > 0) is (dropout == 0)
    assert bool(graphs.tally.reasons) is (dropout > 0)


def test_passes_without_gradients_end_no_graphs() -> None:
    """As those of a reference, or of a score that is only told."""
    model, graphs = graphed(0.3)
    for at in range(4):
        given = batch("bert", lengths=(9, 5, 7, 3), seed=at)
        with torch.no_grad():
            model(**given)
        model(**given).logits.sum().backward()
    assert graphs.replayed == 3


def _scale(model: Any) -> None:
    for one in model.modules():
        if "scaling" in one.__dict__ and hasattr(one, "lora_A"):
            one.scaling["default"] *= 2


def _drop(model: Any) -> None:
    for one in model.modules():
        if "attention_dropout" in one.__dict__:
            one.attention_dropout = 0.2


@pytest.mark.parametrize(("name", "change"), [("bert", _scale), ("modernbert-cls", _drop)])
def test_numbers_that_a_pass_reads_from_its_layers_are_seen(
    name: str, change: Callable[[Any], None]
) -> None:
    """A graph has them as they were when it was captured."""
    torch.manual_seed(0)
    plain = trainfit.unpadded(HEADS["classes"].from_config(config(name))).train()
    [facts] = facts_in(plain)
    facts.graphs = graphs = BodyGraphs(run_again)
    model: Any = plain
    if change is _scale:
        model = get_peft_model(plain, LoraConfig(target_modules=["query", "value"]))
    captured = []
    for at in range(6):
        if at == 3:
            change(model)
        model(**batch(name)).logits.sum().backward()
        captured.append(graphs.captured)
    assert captured == [0, 1, 1, 1, 2, 2]
