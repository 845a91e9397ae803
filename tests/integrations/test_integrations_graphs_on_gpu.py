"""CUDA graphs of an unpadded model give the losses and gradients of eager passes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from unpadded_tiny import batch, config, gradients

import trainfit
from trainfit.integrations.body_graphs import BodyGraphs
from trainfit.integrations.speeding import facts_in

SIZES = {"hidden_size": 64, "initializer_range": 0.1}
LENGTHS = ((5, 61, 1, 128, 33, 90), (100, 20, 64, 17, 90, 3), (120, 128, 100, 90, 128, 101))
NAMES = ["bert", "modernbert-cls", "deberta-v3", "llama"]


def twins(name: str, dropout: float = 0.0) -> tuple[Any, Any, BodyGraphs]:
    torch.manual_seed(0)
    sizes = SIZES | ({"head_dim": 16} if name == "llama" else {})
    made = AutoModelForSequenceClassification.from_config(config(name, dropout, **sizes))
    eager = trainfit.unpadded(made.cuda().train(), insist=True)
    model = copy.deepcopy(eager)
    [facts] = facts_in(model)
    facts.graphs = BodyGraphs()
    return eager, model, facts.graphs


def inputs(name: str, at: int) -> dict[str, Tensor]:
    rows = batch(name, lengths=LENGTHS[at % 3], seed=at)
    rows["labels"] = torch.tensor([0, 2, 1, 1, 0, 2])
    return {part: value.cuda() for part, value in rows.items()}


def step(model: Any, given: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        loss: Tensor = model(**given).loss
    loss.backward()
    return loss.detach()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_eager_passes(name: str, dtype: torch.dtype) -> None:
    eager, model, graphs = twins(name)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (eager, model)]
    for at in range(12):
        losses = [step(one, inputs(name, at), dtype) for one in (eager, model)]
        torch.testing.assert_close(*losses, rtol=limit, atol=limit)
        if at % 2:  # two micro-batches to a step
            wanted = gradients(eager)
            size = torch.cat([one.flatten() for one in wanted.values()]).norm()
            for part, gradient in gradients(model).items():
                assert (gradient - wanted[part]).norm() <= limit * size, part
            model.load_state_dict(eager.state_dict())  # errors are of one step
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            model.load_state_dict(eager.state_dict())
    assert graphs.obstacle is None
    assert graphs.replayed >= 6


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert", "deberta-v3"])
def test_every_replay_draws_its_own_dropout(name: str) -> None:
    _, model, graphs = twins(name, dropout=0.3)
    drawn = [step(model, inputs(name, 0), torch.bfloat16).item() for _ in range(6)]
    assert graphs.replayed == 5
    assert len(set(drawn)) == 6


@pytest.mark.gpu
def test_the_graph_of_an_earlier_loss_may_be_alive() -> None:
    eager, model, graphs = twins("bert")
    kept = []
    for at in range(8):
        for one in (eager, model):
            loss = one(**inputs("bert", at)).loss
            loss.backward()
            kept.append(loss)
    assert graphs.obstacle is None
    assert graphs.replayed >= 4
    assert graphs._taken > 0  # bytes, by which a larger batch is judged
    wanted = gradients(eager)
    size = torch.cat([one.flatten() for one in wanted.values()]).norm()
    for part, gradient in gradients(model).items():
        assert (gradient - wanted[part]).norm() <= 1e-5 * size, part


@pytest.mark.gpu
def test_without_room_steps_stay_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, model, graphs = twins("bert")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 1))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)  # by earlier tests
    for at in range(8):
        losses = [step(one, inputs("bert", at), torch.float32) for one in (eager, model)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    assert "GiB are free" in (graphs.obstacle or "")


@pytest.mark.gpu
def test_a_trainer_from_end_to_end(tmp_path: Path) -> None:
    made = batch("bert", lengths=LENGTHS[0] * 8)
    rows = [
        {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(at % 3)}
        for at, (ids, mask) in enumerate(zip(*made.values(), strict=True))
    ]
    found = []
    torch.manual_seed(0)
    plain = AutoModelForSequenceClassification.from_config(config("bert", **SIZES))
    for names in ([], ["unpadded", "graphs"]):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=20, logging_steps=1, per_device_train_batch_size=8, seed=1,
            save_strategy="no", report_to=[], disable_tqdm=True,
            eval_strategy="steps", eval_steps=8,
        )  # fmt: skip
        trainer = Trainer(
            model=copy.deepcopy(plain), args=arguments, train_dataset=rows, eval_dataset=rows[:5]
        )
        if names:
            trainfit.speed_up(trainer, only=names, quiet=True)
        trainer.train()
        found.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    [facts] = facts_in(trainer.model)
    assert facts.graphs is not None
    assert facts.graphs.obstacle is None
    assert facts.graphs.replayed >= 4
