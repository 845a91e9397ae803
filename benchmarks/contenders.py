"""The peers that trainfit is measured beside: transformers' Trainer and Lightning, a round each.

A round builds the peer anew on the same model and data, takes some steps to warm up, and times the
rest from end to end: the device is waited for before the first and after the last of them alone.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainfit.data.tokens import Tokens
from trainfit.records import RuntimeSettings
from trainfit.runtime import applied

GIB = 2**30
WARM_UP = 4
CUDA = torch.cuda.is_available()
BuildModel = Callable[[], nn.Module]
"""A model that takes input_ids, attention_mask and labels, and returns a loss."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a peer is set up."""

    name: str
    batch: int
    precision: str = "bf16"
    grouped: bool = False
    """Sequences of like length go together, by Trainer's own sampler."""
    workers: int = 4
    defaults: bool = False
    """Whatever Trainer does if nobody says anything."""


class Sequences(Dataset[dict[str, Any]]):
    """Token ids and a label each."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self._tokens.sequence(index).tolist()
        return {"input_ids": ids, "labels": int(self._tokens.labels[index])}


def pad_to_longest(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(item["input_ids"]) for item in items)
    ids = torch.zeros(len(items), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(items):
        length = len(item["input_ids"])
        ids[row, :length] = torch.tensor(item["input_ids"])
        mask[row, :length] = 1
    labels = torch.tensor([item["labels"] for item in items])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Clock:
    """Times the steps after the warm-up, and the memory that they took on top of what was there."""

    def __init__(self, steps: int) -> None:
        self.last = WARM_UP + steps
        self.steps = steps
        self.losses: list[Any] = []
        self.before = _start_over()
        self.seconds = 0.0

    def after(self, step: int) -> None:
        if step in (WARM_UP, self.last):
            _wait()
            self.seconds = time.perf_counter() - self.seconds

    def result(self, batch: int) -> dict[str, Any]:
        peak = (torch.cuda.max_memory_allocated() - self.before) / GIB if CUDA else None
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "samples_per_second": self.steps * batch / self.seconds,
            "peak_gib": peak,
        }


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def _start_over() -> int:
    gc.collect()
    if not CUDA:
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def guarded(round_: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result, or what went wrong: a peer that runs out of memory is a result too."""
    try:
        return round_()
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # noqa: BLE001 - the other contenders go on
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        _start_over()


def trainer_round(
    build: BuildModel,
    tokens: Tokens,
    setting: Setting,
    steps: int,
    *,
    seed: int = 0,
    losses: list[float] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """transformers' Trainer; with `losses`, each step's is added to them."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock(steps)

    class Timing(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_rest: Any) -> None:
            clock.after(state.global_step)

        def on_log(
            self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_rest: Any
        ) -> None:
            if losses is not None and "loss" in (logs or {}):
                losses.append(logs["loss"])

    chosen: dict[str, Any] = (
        {}
        if setting.defaults
        else {
            "bf16": CUDA and setting.precision == "bf16",
            "tf32": CUDA or None,
            "dataloader_num_workers": setting.workers,
            "train_sampling_strategy": "group_by_length" if setting.grouped else "random",
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=build(),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=clock.last,
                per_device_train_batch_size=setting.batch,
                logging_steps=1 if losses is not None else 10**6,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
                seed=seed,
                **{**chosen, **arguments},
            ),
            train_dataset=Sequences(tokens),
            data_collator=pad_to_longest,
            callbacks=[Timing()],
        )
        try:
            # Defaults mean float32 as it is, whatever the contender before has switched on.
            with applied(RuntimeSettings(tf32=False)) if setting.defaults else nullcontext():
                trainer.train()
        finally:
            trainer.model = trainer.model_wrapped = trainer.optimizer = None
    return clock.result(setting.batch)


def lightning_round(
    build: BuildModel, tokens: Tokens, setting: Setting, steps: int
) -> dict[str, Any]:
    """Lightning's Trainer with the fused AdamW, which cannot clip there: it is spared that work."""
    import lightning

    clock = Clock(steps)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=5e-5, fused=True)

        def on_train_batch_end(self, *_rest: Any) -> None:
            clock.after(self.global_step)

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=clock.last,
            precision="bf16-mixed" if CUDA and setting.precision == "bf16" else "32-true",
            accelerator="gpu" if CUDA else "cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(
            Module(),
            DataLoader(
                Sequences(tokens),
                setting.batch,
                shuffle=True,
                collate_fn=pad_to_longest,
                num_workers=setting.workers,
                pin_memory=CUDA,
            ),
        )
    return clock.result(setting.batch)
