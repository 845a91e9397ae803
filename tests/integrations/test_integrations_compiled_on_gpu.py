"""Compiled blocks in CUDA graphs give the losses and gradients of eager passes, without a wait."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from unpadded_tiny import batch, config, gradients

import trainfit
from trainfit.integrations import host_batches
from trainfit.integrations.body_graphs import BodyGraphs
from trainfit.integrations.body_state import BodyBlocks
from trainfit.integrations.host_batches import AROUND
from trainfit.integrations.speeding import facts_in

SIZES = {"hidden_size": 64, "initializer_range": 0.1}
LENGTHS = ((5, 61, 1, 128, 33, 90), (100, 20, 64, 17, 90, 3), (120, 128, 100, 90, 128, 101))
LABELS = (0, 2, 1, 1, 0, 2)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def twins(name: str, dropout: float = 0.0) -> tuple[Any, Any, BodyGraphs]:
    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_config(config(name, dropout, **SIZES))
    eager = trainfit.unpadded(made.cuda().train(), insist=True)
    model = copy.deepcopy(eager)
    [facts] = facts_in(model)
    facts.graphs = BodyGraphs(blocks=BodyBlocks())
    return eager, model, facts.graphs


def inputs(name: str, at: int) -> dict[str, Tensor]:
    rows = batch(name, lengths=LENGTHS[at % 3], seed=at)
    rows["labels"] = torch.tensor(LABELS)
    return {part: value.cuda() for part, value in rows.items()}


def step(model: Any, given: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        loss: Tensor = model(**given).loss
    loss.backward()
    return loss.detach()


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bert", torch.float32),
        ("bert", torch.bfloat16),
        ("modernbert-cls", torch.bfloat16),
        ("deberta-v3", torch.bfloat16),
    ],
)
def test_losses_and_gradients_are_those_of_eager_passes(name: str, dtype: torch.dtype) -> None:
    eager, model, graphs = twins(name)
    limit = 1e-4 if dtype == torch.float32 else 5e-2
    for at in range(12):
        for one in (eager, model):
            one.zero_grad()
        losses = [step(one, inputs(name, at), dtype) for one in (eager, model)]
        torch.testing.assert_close(*losses, rtol=limit, atol=limit)
        wanted = gradients(eager)
        size = torch.cat([one.flatten() for one in wanted.values()]).norm()
        for part, gradient in gradients(model).items():
            assert (gradient - wanted[part]).norm() <= limit * size, part
    assert graphs.obstacle is None
    assert graphs.blocks is not None
    assert graphs.blocks.obstacle is None
    assert graphs.replayed >= 6


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_dropout_has_the_same_distribution() -> None:
    eager, model, graphs = twins("bert", dropout=0.3)
    given = inputs("bert", 0)
    drawn = []
    for one in (eager, model):
        drawn.append([step(one, given, torch.bfloat16).item() for _ in range(300)])
    assert graphs.replayed >= 290
    assert len(set(drawn[1])) > 200
    spread = (stdev(drawn[0]) ** 2 / 300 + stdev(drawn[1]) ** 2 / 300) ** 0.5
    assert abs(mean(drawn[0]) - mean(drawn[1])) < 5 * spread
    assert 0.7 < stdev(drawn[1]) / stdev(drawn[0]) < 1.4


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_trainer_from_end_to_end(tmp_path: Path) -> None:
    made = batch("bert", lengths=LENGTHS[0] * 8)
    rows = [
        {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(at % 3)}
        for at, (ids, mask) in enumerate(zip(*made.values(), strict=True))
    ]
    found = []
    torch.manual_seed(0)
    plain = AutoModelForSequenceClassification.from_config(config("bert", **SIZES))
    for names in ([], ["unpadded", "graphs", "compile", "ahead", "nowait"]):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=20, logging_steps=1, per_device_train_batch_size=8, seed=1,
            save_strategy="no", report_to=[], disable_tqdm=True, gradient_accumulation_steps=2,
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
    assert facts.graphs.blocks is not None
    assert facts.graphs.blocks.obstacle is None
    assert facts.graphs.replayed >= 8


@pytest.mark.gpu
def test_a_step_waits_for_the_gpu_nowhere() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config("bert", **SIZES)).cuda().train()
    trainfit.speed_up(model, only=["unpadded", "graphs"], quiet=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    made = batch("bert", lengths=LENGTHS[0])
    rows = {**made, "labels": torch.tensor(LABELS)}
    loader = DataLoader([rows] * 12, batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    try:
        for given in loader:
            loss = model(**given).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == 5:  # from here on all is captured
                torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert steps == 12
    [facts] = facts_in(model)
    assert facts.graphs is not None
    assert facts.graphs.replayed >= 10


@pytest.mark.gpu
def test_other_threads_may_use_the_gpu_during_a_capture() -> None:
    eager, model, graphs = twins("bert")
    graphs.blocks = None
    ended = threading.Event()

    def busy() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not ended.is_set():
                sent = torch.ones(1 << 16).pin_memory().to("cuda", non_blocking=True)
                del sent

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for at in range(9):
            losses = [step(one, inputs("bert", at), torch.float32) for one in (eager, model)]
            torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    finally:
        ended.set()
        thread.join()
    assert graphs.obstacle is None
    assert graphs.replayed >= 4


@pytest.mark.gpu
@pytest.mark.parametrize("off", [False, True])
def test_batches_are_sent_without_a_wait(off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import data_loader

    monkeypatch.setattr(data_loader, "send_to_device", data_loader.send_to_device)
    monkeypatch.setattr(AROUND, "off", off)
    host_batches.keep_host_batches()
    here = batch("bert")
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = data_loader.send_to_device(dict(here), torch.device("cuda"))
        assert not off
    except RuntimeError:
        assert off  # the script's own way waits
        return
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert here["input_ids"].is_cpu
    assert torch.equal(there["input_ids"].cpu(), here["input_ids"])
    assert host_batches.host_copies(there, ("attention_mask",)) is not None
