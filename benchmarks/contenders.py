"""The peers that trainfit is measured beside: Trainer, Lightning and a plain loop, a round each.

A round builds the peer anew on the same model and data, takes some steps to warm up, and times the
rest from end to end: the device is waited for before the first and after the last of them alone.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainfit.core.plan_records import RuntimeSettings
from trainfit.data.tokens import Tokens
from trainfit.runtime import applied

GIB = 2**30
WARM_UP = 4
CUDA = torch.cuda.is_available()
BuildModel = Callable[[], nn.Module]
"""A model that takes what its data collates, and returns a loss."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a peer is set up."""

    name: str
    batch: int
    kind: Literal["trainer", "lightning", "plain"] = "trainer"
    precision: str = "bf16"
    grouped: bool = False
    """Sequences of like length go together, by Trainer's own sampler."""
    workers: int = 4
    compile: bool = False
    defaults: bool = False
    """Whatever Trainer does if nobody says anything."""
    once: bool = False
    """One round is enough."""


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


class Sequences(Dataset[dict[str, Any]]):
    """Token ids and a label each."""

    collate = staticmethod(pad_to_longest)

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self._tokens.sequence(index).tolist()
        return {"input_ids": ids, "labels": int(self._tokens.labels[index])}


class Blocks(Dataset[Tensor]):
    """Blocks of a stream of tokens; a model that predicts them shifts its labels itself."""

    def __init__(self, ids: Any, block: int) -> None:
        self._rows = torch.from_numpy(ids[: len(ids) // block * block].astype("int64"))
        self._rows = self._rows.view(-1, block)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]

    @staticmethod
    def collate(items: list[Tensor]) -> dict[str, Tensor]:
        """All are of one length."""
        rows = torch.stack(items)
        return {"input_ids": rows, "labels": rows.clone()}


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


def take_turn(
    build: BuildModel,
    data: Any,
    settings: Iterable[Setting],
    steps: int,
    found: dict[str, dict[str, Any]],
    tell: Callable[[str, dict[str, Any]], None],
) -> None:
    """A round of each peer that has not failed, added to what was found before."""
    kinds = {"trainer": trainer_round, "lightning": lightning_round, "plain": plain_round}
    for setting in settings:
        own = found.setdefault(setting.name, {"setting": vars(setting), "rounds": []})
        if own["rounds"] and (setting.once or "error" in own["rounds"][-1]):
            continue
        own["rounds"].append(guarded(partial(kinds[setting.kind], build, data, setting, steps)))
        tell(setting.name, own["rounds"][-1])


def trainer_round(
    build: BuildModel,
    data: Any,
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
            "torch_compile": setting.compile,
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
            train_dataset=data,
            data_collator=data.collate,
            callbacks=[Timing()],
        )
        try:
            # Defaults mean float32 as it is, whatever the contender before has switched on.
            with applied(RuntimeSettings(tf32=False)) if setting.defaults else nullcontext():
                trainer.train()
        finally:
            trainer.model = trainer.model_wrapped = trainer.optimizer = None
    return clock.result(setting.batch)


def lightning_round(build: BuildModel, data: Any, setting: Setting, steps: int) -> dict[str, Any]:
    """Lightning's Trainer with the fused AdamW, which cannot clip there: it is spared that work."""
    import lightning

    clock = Clock(steps)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()
            if setting.compile:
                self.model.compile()

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
            return self.model(**batch)["loss"]

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
        trainer.fit(Module(), _loader(data, setting))
    return clock.result(setting.batch)


def plain_round(build: BuildModel, data: Any, setting: Setting, steps: int) -> dict[str, Any]:
    """The loop of a tutorial: autocast, clip, the fused AdamW, and nothing arranged for speed."""
    clock = Clock(steps)
    device = "cuda" if CUDA else "cpu"
    model = build().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    if setting.compile:
        model.compile()
    half = CUDA and setting.precision == "bf16"
    batches = _loader(data, setting)
    arriving = iter(batches)
    for step in range(1, clock.last + 1):
        batch = next(arriving, None)
        if batch is None:
            arriving = iter(batches)
            batch = next(arriving)
        inputs = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(device, dtype=torch.bfloat16) if half else nullcontext():
            loss = model(**inputs)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.after(step)
    return clock.result(setting.batch)


def _loader(data: Any, setting: Setting) -> DataLoader[Any]:
    return DataLoader(
        data,
        setting.batch,
        shuffle=True,
        collate_fn=data.collate,
        num_workers=setting.workers,
        pin_memory=CUDA,
    )
