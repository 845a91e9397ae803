"""A callback for transformers' Trainer: MFU, tokens and memory in its logs, then a receipt."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any, Self

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from trainfit.core.records import Receipt
from trainfit.integrations.memory_advice import oom_advice
from trainfit.integrations.meter import LoopMeter, Observing
from trainfit.measuring.observe import WARM_UP


class TrainfitCallback(TrainerCallback):
    """Adds figures to every training log, and writes what was really active when it ends.

    A callback is not told of errors: `watch` also notes the doctor's advice on one that ends
    `trainer.train()`.
    """

    def __init__(self, *, peak_tflops: float | None = None, warm_up: int = WARM_UP) -> None:
        """`peak_tflops` is the GPU's dense peak, for one that the catalogue does not know.

        The optimizer step after `warm_up` ones is looked at for the receipt.
        """
        self.meter = LoopMeter(peak_tflops=peak_tflops)
        self._observing = Observing(warm_up)
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
            try:
                with oom_advice():
                    return train(*arguments, **options)
            except BaseException:
                made._observing.let_go()
                raise

        trainer.train = advised  # type: ignore[method-assign]
        return made

    def on_train_begin(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Follow the model."""
        model = kwargs["model"]
        self.meter.attach(model, probe=not args.torch_compile)
        self.meter.follow_forward(model)
        self._observing.begin()

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
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Let the model go, and write the receipt."""
        self.meter.detach()
        write = state.is_world_process_zero and bool(args.output_dir)
        self.receipt = self._observing.end(Path(args.output_dir or "."), write=write)
