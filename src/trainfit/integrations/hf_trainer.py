"""A callback for transformers' Trainer: MFU, tokens and memory in its logs, then a receipt."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any, Self

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from trainfit.core.records import Receipt
from trainfit.integrations.meter import LoopMeter, Observing, oom_advice
from trainfit.measuring.observe import WARM_UP


class TrainfitCallback(TrainerCallback):
    """Adds figures to every training log, and writes a receipt of the active settings at the end.

    Trainer does not tell callbacks of errors; `watch` adds advice to those of `trainer.train()`.
    """

    def __init__(self, *, peak_tflops: float | None = None, warm_up: int = WARM_UP) -> None:
        """`peak_tflops` is the dense peak of a GPU that the catalogue does not know.

        The receipt is made from the optimizer step after the first `warm_up` ones.
        """
        self.meter = LoopMeter(peak_tflops=peak_tflops)
        self._observing = Observing(warm_up)
        self.receipt: Receipt | None = None
        """Receipt of the last training."""

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
        """Start to count the model's tokens and operations, and to gather evidence."""
        model = kwargs["model"]
        self.meter.attach(model, probe=not args.torch_compile)
        self.meter.follow_forward(model)
        self._observing.begin()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock with the first step."""
        self.meter.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count the time of a step, with the wait for its data."""
        self.meter.step_ended()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Leave the time of an evaluation out."""
        self.meter.leave_out()

    def on_save(self, *_: Any, **__: Any) -> None:
        """Leave the time of a checkpoint out."""
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
        """Detach from the model, and write the receipt."""
        self.meter.detach()
        write = state.is_world_process_zero and bool(args.output_dir)
        self.receipt = self._observing.end(Path(args.output_dir or "."), write=write)
