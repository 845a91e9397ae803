"""A real Trainer and a tiny BERT: what the callback adds is right, and changes nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from trainfit.conf import SCHEMAS, keys
from trainfit.core.records import Receipt
from trainfit.integrations import TrainfitCallback, oom_advice
from trainfit.integrations.meter import LoopMeter
from trainfit.measuring.flops import count_flops

HIDDEN, INNER, LAYERS, VOCABULARY = 32, 64, 2, 50
LENGTHS = [5, 12, 7, 9, 12, 3, 8, 10] * 4


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            intermediate_size=INNER,
            max_position_embeddings=32,
            num_labels=2,
        )
    )


def rows() -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    made = []
    for length in LENGTHS:
        mask = (torch.arange(12) < length).long()
        ids = torch.randint(1, VOCABULARY, (12,), generator=random) * mask
        made.append({"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(length % 2)})
    return made


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
        **more,
    )


def train(folder: Path, callbacks: list[Any], **more: Any) -> Trainer:
    trainer = Trainer(
        model=bert(),
        args=arguments(folder, **more),
        train_dataset=rows(),
        eval_dataset=rows()[:4],
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


WEIGHTS = LAYERS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER + 2 * HIDDEN) + HIDDEN
"""Matrices and norms that every token meets; the pooler and the head meet one per sequence."""


def by_hand(lengths: list[int]) -> float:
    """6 operations per weight and token, 12·layers·width per squared length."""
    squares = sum(length**2 for length in lengths)
    return 6 * WEIGHTS * sum(lengths) + 12 * LAYERS * HIDDEN * squares


def test_a_real_run_gets_its_figures(tmp_path: Path):
    callback = TrainfitCallback(peak_tflops=0.5)
    trainer = train(tmp_path, [callback])
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logged] == [2, 4]
    for row in logged:
        assert row["tokens_per_second"] > 0
        assert row["memory_gib"] > 0
        assert 0 < row["mfu"] <= 1
        # Tokens and operations of the same window: their ratio needs no clock.
        mean = row["tokens_per_second"] / row["samples_per_second"]
        assert 3 <= mean <= 12
    evaluated = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert evaluated
    assert not any("mfu" in row for row in evaluated)


def test_tokens_and_mfu_are_those_of_the_training_batches_alone():
    clock = iter([0.0, 2.0, 2.0, 2.0, 2.0, 2.0]).__next__
    meter, model = LoopMeter(peak_tflops=1e-6, clock=clock), bert()
    meter.attach(model)
    meter.follow_forward(model)
    batch = {
        name: torch.stack([row[name] for row in rows()[:4]])
        for name in ("input_ids", "attention_mask")
    }
    meter.start()
    model.train()(**batch)
    model.eval()(**batch)
    with torch.no_grad():
        model.train()(**batch)
    meter.step_ended()
    figures = meter.window()
    assert figures["tokens_per_second"] == sum(LENGTHS[:4]) / 2
    assert figures["samples_per_second"] == 4 / 2
    share = by_hand(LENGTHS[:4]) / (2 * 1e6)
    assert share > 1
    assert "mfu" not in figures  # a share over one is wrong, and not said
    meter.detach()
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("peak", [1.0, 10.0])
def test_the_mfu_is_the_closed_formula(peak: float):
    ticks = iter([0.0, 4.0, 4.0, 4.0, 4.0]).__next__
    meter, model = LoopMeter(peak_tflops=peak, clock=ticks), bert().train()
    meter.attach(model)
    meter.start()
    ids = torch.ones(3, 12, dtype=torch.long)
    meter.count({"input_ids": ids})  # without a mask every token counts
    assert meter.window()["mfu"] == pytest.approx(by_hand([12] * 3) / (4 * peak * 1e12))


def test_what_is_frozen_costs_less():
    model = bert()
    full = count_flops(model).of_step([10, 20])
    assert full == by_hand([10, 20])
    for parameter in model.bert.parameters():
        parameter.requires_grad = False
    frozen = count_flops(model).of_step([10, 20])
    # Forward alone: the head is trained, and nothing passes below it.
    assert frozen == 2 * WEIGHTS * 30 + 4 * LAYERS * HIDDEN * (10**2 + 20**2)


def test_adapters_pass_the_gradient_without_training_the_weights():
    from peft import LoraConfig, get_peft_model

    rank = 4
    model = get_peft_model(bert(), LoraConfig(r=rank, target_modules=["query"]))
    work = count_flops(model)
    adapters = LAYERS * 2 * rank * HIDDEN
    assert work.weights == WEIGHTS + adapters
    assert work.trained == adapters
    # All but the first query and the norm below, which no trained weight comes before.
    assert WEIGHTS - HIDDEN * (HIDDEN + 1) <= work.passed <= WEIGHTS + adapters


def test_the_callback_changes_no_number(tmp_path: Path):
    plain = train(tmp_path / "a", [])
    followed = train(tmp_path / "b", [TrainfitCallback()])
    for one, other in zip(plain.model.parameters(), followed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not any(module._forward_hooks for module in followed.model.modules())


def test_a_cpu_has_no_peak_and_so_no_mfu(tmp_path: Path):
    trainer = train(tmp_path, [TrainfitCallback()])
    assert all("mfu" not in row for row in trainer.state.log_history)


def test_the_receipt_tells_what_was_asked_from_what_was_seen(tmp_path: Path):
    callback = TrainfitCallback(warm_up=2)
    train(tmp_path, [callback], optim="adamw_torch_fused", gradient_checkpointing=True)
    written = Receipt.load(tmp_path / "trainfit_receipt.json")
    assert written == callback.receipt
    items = {item.name: item for item in written.items}
    assert items["fused_optimizer"].status == "active"
    assert items["gradient_checkpointing"].status == "active"
    assert items["mixed_precision"].status == "off"
    assert "100% fp32" in items["mixed_precision"].evidence
    assert items["compile"].status == "off"
    assert items["tf32"].observed is None or torch.cuda.is_available()


def test_autocast_is_seen_inside_the_model():
    meter, model = LoopMeter(), torch.nn.Sequential(torch.nn.Linear(8, 8)).train()
    meter.attach(model)
    with torch.autocast("cpu", dtype=torch.float16):
        model(torch.ones(2, 8))
    assert meter.product_dtype == torch.float16
    assert meter.precision == "fp16"


def test_running_out_of_memory_comes_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    message = (
        "CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 23.64 GiB "
        "of which 1.02 GiB is free. Of the allocated memory 18.90 GiB is allocated by PyTorch, and "
        "3.10 GiB is reserved by PyTorch but unallocated."
    )
    trainer = Trainer(
        model=bert(), args=arguments(tmp_path), train_dataset=rows(), eval_dataset=rows()
    )

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr(trainer, "training_step", full)
    TrainfitCallback.watch(trainer)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    [note] = raised.value.__notes__
    assert "3.1 GiB are reserved but unallocated" in note
    assert "expandable_segments" in note
    assert "per_device_train_batch_size" in note
    assert "gradient_accumulation_steps" in note


OOM = (
    "CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 23.64 GiB of "
    "which 1.02 GiB is free."
)
SHARED = f"{OOM} Process 5142 has 21.30 GiB memory in use."


@pytest.mark.parametrize("message", [OOM, SHARED, "CUDA error: device-side assert triggered"])
def test_advice_in_a_loop_of_ones_own_names_nothing_of_trainfits(message: str):
    with pytest.raises(RuntimeError) as raised, oom_advice():
        raise RuntimeError(message)
    [note] = raised.value.__notes__
    words = set(note.removeprefix("trainfit:").replace("=", " ").replace("`", " ").split())
    own = {key for task in SCHEMAS for key in keys(task)}
    assert not words & (own | {"make", "trainfit"})
    assert ("optimizer.step()" in note) == ("memory" in message)
    assert ("5142" in note) == (message == SHARED)


def test_other_errors_pass_as_they_are():
    with pytest.raises(ValueError, match="x") as raised, oom_advice():
        raise ValueError("x")
    assert not getattr(raised.value, "__notes__", [])


def test_importing_it_imports_no_torch():
    code = (
        "import sys, trainfit.integrations as i\n"
        "assert 'TrainfitCallback' in i.__all__\n"
        "sys.exit(bool({'torch', 'transformers', 'lightning'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_log_history_stays_json(tmp_path: Path):
    trainer = train(tmp_path, [TrainfitCallback(peak_tflops=0.5)])
    assert json.loads(json.dumps(trainer.state.log_history))
