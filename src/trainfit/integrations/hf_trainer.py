"""A callback for transformers' Trainer: MFU, tokens and memory in its logs, then a receipt."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any, Self

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from trainfit.integrations import observed
from trainfit.integrations.meter import Meter
from trainfit.integrations.oom import oom_advice
from trainfit.records import Receipt

RECEIPT = "trainfit_receipt.json"


class TrainfitCallback(TrainerCallback):
    """Adds figures to every training log, and writes what was really active when it ends.

    A callback is not told of errors: `watch` also notes the doctor's advice on one that ends
    `trainer.train()`.
    """

    def __init__(self, *, peak_tflops: float | None = None) -> None:
        """`peak_tflops` is the GPU's dense peak, for one that the catalogue does not know."""
        self.meter = Meter(peak_tflops=peak_tflops)
        self.receipt: Receipt | None = None
        """Of the last training."""

    @classmethod
    def watch(cls, trainer: Trainer, *, peak_tflops: float | None = None) -> Self:
        """Add a callback to `trainer`, and advice to errors of its train()."""
        made = cls(peak_tflops=peak_tflops)
        trainer.add_callback(made)
        train = trainer.train

        @wraps(train)
        def advised(*arguments: Any, **options: Any) -> Any:
            with oom_advice():
                return train(*arguments, **options)

        trainer.train = advised  # type: ignore[method-assign]
        return made

    def on_train_begin(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Follow the model."""
        model = kwargs["model"]
        self.meter.attach(model, probe=not args.torch_compile)
        self.meter.follow_forward(model)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The first one starts the clock: what came before was loading."""
        self.meter.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Until here it was training, with the wait for its data."""
        self.meter.step_ended()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """An evaluation is no training."""
        self.meter.leave_out()

    def on_save(self, *_: Any, **__: Any) -> None:
        """Nor is a checkpoint."""
        self.meter.leave_out()

    def on_log(self, *given: Any, **kwargs: Any) -> None:
        """Add the window's figures to a training log, for its history and later callbacks."""
        state: TrainerState = given[1]
        logs: dict[str, Any] = kwargs.get("logs") or {}
        if "loss" in logs:
            figures = {name: float(f"{value:.4g}") for name, value in self.meter.window().items()}
            logs.update(figures)
            state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any
    ) -> None:
        """Let the model go, and write the receipt."""
        self.meter.detach()
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "off"
        self.receipt = Receipt(
            run=str(args.output_dir),
            items=(
                observed.mixed_precision(precision, self.meter),
                observed.tf32(args.tf32),
                observed.fused_optimizer(
                    "fused" in str(args.optim).lower(), kwargs.get("optimizer")
                ),
                observed.checkpointing(args.gradient_checkpointing, kwargs["model"]),
                observed.compiled(bool(args.torch_compile), self.meter.graphs),
            ),
        )
        if state.is_world_process_zero and args.output_dir:
            self.receipt.save(Path(args.output_dir) / RECEIPT)
