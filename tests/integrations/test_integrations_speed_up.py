"""`speed_up` leaves the losses of a Trainer as they are, and says what it did."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from unpadded_tiny import batch, config, counting_packed

import trainfit
from trainfit.core.errors import BadInput
from trainfit.integrations.host_batches import AROUND
from trainfit.integrations.script_hooks import chosen
from trainfit.integrations.speeding import _check_there, apply_speedups


def classifier(name: str = "bert") -> Any:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config(name))


def rows() -> list[dict[str, Tensor]]:
    made = batch("bert", lengths=(3, 9, 5, 12, 1, 7, 8, 2, 12, 4, 6, 11), seed=3)
    labels = torch.arange(12) % 3
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(*made.values(), labels, strict=True)
    ]


def trainer_of(folder: Path, model: Any = None, **more: Any) -> Trainer:
    arguments = {"max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 4}
    fixed = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), seed=1, **arguments | fixed),
        train_dataset=rows(),
        eval_dataset=rows()[:5],
        **more,
    )


def losses(trainer: Trainer) -> list[float]:
    trainer.train()
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return [*found, trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize("name", ["bert", "deberta-v3"])
def test_the_losses_of_a_trainer_stay(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = classifier(name)
    wanted = losses(trainer_of(tmp_path, copy.deepcopy(model)))
    capsys.readouterr()
    trainer = trainer_of(tmp_path, model)
    assert trainfit.speed_up(trainer) is trainer
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert f"{type(model).__name__} without padding" in said
    with counting_packed() as packed:
        found = losses(trainer)
    assert found == pytest.approx(wanted, abs=1e-4)
    assert len(packed) == 5
    assert max(packed) < 4 * 12


def test_a_model_that_train_builds_again_is_taken_too(tmp_path: Path) -> None:
    trainer = trainfit.speed_up(trainer_of(tmp_path, model_init=lambda: classifier()))
    with counting_packed() as packed:
        trainer.train()
    assert len(packed) == 4


class Inside(nn.Module):
    """A model as sentence-transformers has it: the model of transformers stands deeper inside."""

    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def test_a_model_inside_of_a_module(tmp_path: Path) -> None:
    trainer = trainfit.speed_up(trainer_of(tmp_path, Inside()))
    with counting_packed() as packed:
        trainer.train()
    assert len(packed) == 4


def test_what_cannot_be_done_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    trainfit.speed_up(nn.Linear(2, 2))  # type: ignore[type-var]
    assert "not without padding (Linear has no model" in capsys.readouterr().out
    with pytest.raises(BadInput, match="int has no model"):
        trainfit.speed_up(3)
    with pytest.raises(BadInput, match="unknown speed-up 'pad'"):
        trainfit.speed_up(nn.Linear(2, 2), only=["pad"])


@pytest.mark.parametrize("off", [False, True])
def test_losses_that_are_not_finite_count_as_trainer_counts_them(off: bool) -> None:
    losses = [2.0, 4.0, math.nan, 3.0, math.inf, 5.0]

    class Loop:
        """The lines of transformers' Trainer that sum up the losses."""

        def __init__(self) -> None:
            self.args = SimpleNamespace(logging_nan_inf_filter=True, device=torch.device("cuda"))
            self.state = SimpleNamespace(global_step=0)
            self._globalstep_last_logged, self._tr_loss = 0, torch.tensor(0.0)
            self.callbacks: list[Any] = []
            self.add_callback = self.callbacks.append
            self.checked = 0

        def training_step(self) -> torch.Tensor:
            return torch.tensor(losses[self.state.global_step])

        def train(self) -> float:
            for _ in losses:
                loss = self.training_step()
                self.checked += self.args.logging_nan_inf_filter
                if self.args.logging_nan_inf_filter and (torch.isnan(loss) or torch.isinf(loss)):
                    steps = 1 + self.state.global_step - self._globalstep_last_logged
                    self._tr_loss += self._tr_loss / steps
                else:
                    self._tr_loss += loss
                self.state.global_step += 1
                for one in self.callbacks:
                    one.on_step_end()
                assert self.args.logging_nan_inf_filter
            return float(self._tr_loss)

    loop, done = Loop(), list[str]()
    _check_there(loop, done)
    assert done == ["no wait for each loss"]
    AROUND.off = off
    try:
        assert loop.train() == Loop().train()
    finally:
        AROUND.off = False
    assert loop.checked == (len(losses) if off else 0)


def test_changes_can_be_chosen() -> None:
    assert chosen(None) == ["unpadded", "graphs", "compile", "ahead", "nowait", "fused"]
    assert chosen(None, ["unpadded"]) == ["graphs", "compile", "ahead", "nowait", "fused"]
    assert chosen(["tf32"]) == ["tf32"]
    with trainfit.applied(trainfit_settings()):
        before = torch.backends.cuda.matmul.allow_tf32
        assert apply_speedups(classifier(), ["tf32"]).done == ("TF32",)
        assert torch.backends.cuda.matmul.allow_tf32
    assert before is False


def trainfit_settings() -> Any:
    from trainfit.core.plan_records import RuntimeSettings

    return RuntimeSettings(tf32=False)


def test_the_optimizer_is_fused_on_a_gpu_alone(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, classifier())
    trainer.args.optim = type(trainer.args.optim)("adamw_torch")
    assert apply_speedups(trainer, ["fused"]).left == ("fused AdamW (no GPU)",)

    class OnGpu:
        device = torch.device("cuda")
        optim = trainer.args.optim

    trainer.args = OnGpu()  # type: ignore[assignment]
    assert apply_speedups(trainer, ["fused"]).done == ("fused AdamW",)
    assert trainer.args.optim == "adamw_torch_fused"
    trainer.args.optim = type(trainer.args.optim)("adafactor")
    assert "of its own" in apply_speedups(trainer, ["fused"]).left[0]
