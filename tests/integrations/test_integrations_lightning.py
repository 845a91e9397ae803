"""A real Lightning run with a tiny model."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from trainfit.core.errors import BadInput
from trainfit.core.records import Receipt

pytest.importorskip("lightning", reason="Lightning is optional and not installed")

import lightning.pytorch as pl

from trainfit.integrations import TrainfitLightningCallback


class Tiny(pl.LightningModule):
    """A bag of embeddings and two products."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 8)
        self.inner = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 2)
        self.fail_at = fail_at

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        if index == self.fail_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        vectors = self.inner(self.words(batch["input_ids"])).mean(dim=1)
        return torch.nn.functional.cross_entropy(self.head(vectors), batch["label"])

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("val", self.head(self.words(batch["input_ids"]).mean(dim=1)).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader() -> torch.utils.data.DataLoader[Any]:
    rows = []
    for n in range(24):
        mask = (torch.arange(6) < 1 + n % 6).long()
        rows.append({"input_ids": torch.full((6,), n % 20), "attention_mask": mask, "label": n % 2})
    return torch.utils.data.DataLoader(rows, batch_size=4)


def trainer(folder: Path, callback: TrainfitLightningCallback) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=2,
        log_every_n_steps=3,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def test_a_real_run_gets_its_figures(tmp_path: Path):
    callback = TrainfitLightningCallback(peak_tflops=0.01, warm_up=2)
    made = trainer(tmp_path, callback)
    made.fit(Tiny(), loader(), loader())
    figures = {name: float(value) for name, value in made.callback_metrics.items()}
    assert figures["tokens_per_second"] > 0
    assert 0 < figures["mfu"] <= 1
    assert figures["memory_gib"] > 0
    # A window is three batches of four rows, with 1 to 6 tokens each.
    assert 1 <= figures["tokens_per_second"] / figures["samples_per_second"] <= 6
    written = Receipt.load(tmp_path / "trainfit_receipt.json")
    assert written == callback.receipt
    assert {item.name for item in written.items} >= {"mixed_precision", "fused_optimizer"}


def test_running_out_of_memory_comes_with_advice(tmp_path: Path):
    callback = TrainfitLightningCallback()
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer(tmp_path, callback).fit(Tiny(fail_at=2), loader())
    [note] = raised.value.__notes__
    assert "accumulate_grad_batches" in note
    assert "per_device_train_batch_size" not in note


def test_without_lightning_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "trainfit.integrations.lightning_callback")
    with pytest.raises(BadInput, match="pip install lightning"):
        import_module("trainfit.integrations.lightning_callback")
