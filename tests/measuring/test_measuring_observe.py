"""Receipts of programs that are not trainfit's: a loop, transformers, Lightning, a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from receipt_steps import Model, train

import trainfit
from trainfit.cli.main import run
from trainfit.measuring.observe import run_observed

SCRIPT = """
import sys, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
for batch in loader:
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
assert not any("injected" in entry for entry in sys.path)
print("trained", model(torch.ones(8)).shape[0])
sys.exit(int(sys.argv[1]))
"""


def by_name(receipt):
    return {item.name: item for item in receipt.items}


def test_a_plain_loop_is_observed_and_left_as_it_was():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with trainfit.observe(warm_up=2) as seen:
        for _ in range(5):
            train(model, optimizer, micro_batches=3, clip=True)
    found = by_name(seen.receipt)
    assert found["fused_optimizer"].status == "active"
    assert found["gradient_accumulation"].observed == 3
    assert found["gradient_clipping"].status == "active"
    assert seen.result().steps == 5
    from torch.optim import optimizer as module

    assert not module._global_optimizer_post_hooks
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize(("gradients", "most"), [(True, 9), (False, 9), (False, 1)])
def test_batches_of_an_evaluation_are_not_of_the_step(gradients: bool, most: int):
    """One that ends by itself is known by that, another one by gradients that are off."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    held_out = torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=8)
    with trainfit.observe(warm_up=2) as seen:
        for batch in torch.utils.data.DataLoader(torch.randn(96, 8), batch_size=16):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.set_grad_enabled(gradients):
                for at, held in enumerate(held_out, 1):
                    model(held)
                    if at == most:
                        break
    assert by_name(seen.receipt)["effective_batch"].observed == 16


def gan_step(one, other, first, second):
    """A discriminator's step on real and made images, then the generator's through it."""
    first.zero_grad()
    one(torch.randn(4, 16)).square().mean().backward()
    made = other(torch.randn(4, 16))
    one(made.detach()).mean().backward()
    first.step()
    second.zero_grad()
    (-one(made).mean()).backward()
    second.step()


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_two_optimizers_are_no_gradient_accumulation(kind: str):
    one, other = Model(), Model()
    first = getattr(torch.optim, kind)(one.parameters(), lr=1e-3)
    second = getattr(torch.optim, kind)(other.parameters(), lr=1e-3)
    with trainfit.observe(warm_up=2) as seen:
        for _ in range(5):
            gan_step(one, other, first, second)
    assert by_name(seen.receipt)["gradient_accumulation"].observed == 1


def test_two_optimizers_of_one_model_accumulate_together():
    model = Model()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    muon, adam = torch.optim.Muon(matrices), torch.optim.AdamW(others, fused=True)
    with trainfit.observe(warm_up=2) as seen:
        for _ in range(4):
            for _ in range(3):
                model(torch.randn(4, 16)).square().mean().backward()
            for optimizer in (muon, adam):
                optimizer.step()
                optimizer.zero_grad()
    found = by_name(seen.receipt)
    assert found["gradient_accumulation"].observed == 3
    assert seen.evidence.optimizers == {"Muon": "single", "AdamW": "fused"}
    assert found["fused_optimizer"].observed is True  # Muon has no fused kernel
    assert found["gradient_clipping"].observed is False  # Muon divides by a norm of its own
    assert set(seen.evidence.products.shares) == {"fp32"}  # Muon multiplies in bf16


def test_a_short_warm_up_does_not_hide_the_optimizer_of_the_training():
    model = Model()
    warming = torch.optim.SGD(model.parameters(), lr=1e-3)
    with trainfit.observe(warm_up=2) as seen:
        for _ in range(4):
            train(model, warming)
        assert set(seen.evidence.optimizers) == {"SGD"}
        del warming
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(8):
            train(model, optimizer)
    assert seen.evidence.optimizers == {"AdamW": "fused"}
    assert seen.result().steps == 8
    assert seen.result().steps_per_second is not None


def test_too_few_steps_give_no_receipt_and_say_so():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    with trainfit.observe(warm_up=2) as seen:
        train(model, optimizer)
        train(model, optimizer)
    assert seen.receipt is None
    assert "2 optimizer steps" in seen.result().obstacle
    assert not torch.autograd._profiler_enabled()


def test_an_error_in_the_observed_step_goes_through():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())

    def broken() -> None:
        with trainfit.observe(warm_up=1) as seen:
            train(model, optimizer)
            started.append(seen)
            raise ZeroDivisionError

    started = []
    with pytest.raises(ZeroDivisionError):
        broken()
    assert started[0].receipt is None
    assert not torch.autograd._profiler_enabled()


def test_transformers_says_what_it_asked_for(tmp_path: Path):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    rows = [
        {"input_ids": [3] * 12, "attention_mask": [1] * 9 + [0] * 3, "labels": 0} for _ in range(32)
    ]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        max_steps=6,
        optim="adamw_torch_fused",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config), args=arguments, train_dataset=rows
    )
    with trainfit.observe(warm_up=3) as seen:
        trainer.train()
    found = by_name(seen.receipt)
    assert found["gradient_checkpointing"].requested is True
    assert found["gradient_checkpointing"].status == "active"
    assert found["fused_optimizer"].requested is True
    assert found["fused_optimizer"].status == "active"
    assert (found["gradient_accumulation"].requested, found["gradient_accumulation"].observed) == (
        2,
        2,
    )
    assert found["mixed_precision"].requested == "off"
    assert "25.0%" in found["packing"].evidence
    # Flipped behind its back: the arguments still say fused, the optimizer is another.
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), foreach=False)
    trainer.lr_scheduler = None
    with trainfit.observe(warm_up=3) as seen:
        trainer.train()
    flipped = by_name(seen.receipt)["fused_optimizer"]
    assert (flipped.requested, flipped.observed, flipped.status) == (True, False, "not_active")


def test_lightning_says_what_it_asked_for(tmp_path: Path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 2)

        def training_step(self, batch, _):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), fused=True)

    trainer = lightning.Trainer(
        max_steps=6,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with trainfit.observe(warm_up=3) as seen:
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=2))
    found = by_name(seen.receipt)
    assert found["mixed_precision"].requested == "off"
    assert found["mixed_precision"].observed == "off"  # seen in the closure that the step calls
    assert seen.evidence.optimizers == {"AdamW": "fused"}
    assert found["gradient_accumulation"].requested == 2
    assert found["gradient_accumulation"].observed == 2
    assert found["gradient_clipping"].requested is True
    assert found["gradient_clipping"].status == "active"  # inside of the optimizer's step


def test_a_command_is_observed_and_keeps_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script)]
    assert run(["verify", "--json", "--", *words, "7"]) == 7
    out, err = capfd.readouterr()
    assert "trained 8" in err
    told = json.loads(out)
    found = {item["name"]: item for item in told["items"]}
    assert found["fused_optimizer"]["status"] == "active"
    assert found["set_to_none"]["status"] == "off"
    assert set(found["workers"]) == {
        "name",
        "requested",
        "observed",
        "status",
        "evidence",
        "mend",
    }
    assert told["figures"]["steps_per_second"] > 0


def test_a_command_without_training_has_nothing_to_verify(capfd: pytest.CaptureFixture[str]):
    assert run(["verify", "--", sys.executable, "-c", "print('hello')"]) == 1
    out, err = capfd.readouterr()
    assert out == "hello\n"
    assert "nothing to verify" in err
    assert run_observed([sys.executable, "-c", "raise SystemExit(5)"])[0] == 5


def test_a_command_that_is_not_there_is_bad_input(capfd: pytest.CaptureFixture[str]):
    assert run(["verify", "--", "no-such-program"]) == 2
    assert run(["verify"]) == 2
    assert run(["verify", "--"]) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_a_hidden_sitecustomize_still_runs(tmp_path: Path):
    from trainfit.measuring import observe

    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.theirs = True\n")
    paths = f"{observe._INJECTED}:{tmp_path}"
    code = "import sys; assert sys.theirs; assert 'torch' not in sys.modules"
    given = {"PYTHONPATH": paths, "TRAINFIT_OBSERVE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=given, check=True)
