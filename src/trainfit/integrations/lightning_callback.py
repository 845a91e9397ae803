"""A callback for Lightning: MFU, tokens, memory in its logs, a receipt, and advice on errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainfit.core.errors import BadInput
from trainfit.core.records import Receipt
from trainfit.integrations.meter import LoopMeter, Observing, add_advice
from trainfit.measuring.observe import WARM_UP

try:
    from lightning.pytorch import Callback
except ImportError:
    try:  # its older name
        from pytorch_lightning import Callback  # type: ignore[assignment]
    except ImportError:
        raise BadInput("Lightning is not installed", "pip install lightning") from None


class TrainfitLightningCallback(Callback):
    """Logs figures every `log_every_n_steps`, and writes a receipt of the active settings.

    Tokens and MFU are known for batches that are mappings with `input_ids`.
    """

    def __init__(self, *, peak_tflops: float | None = None, warm_up: int = WARM_UP) -> None:
        """`peak_tflops` is the dense peak of a GPU that the catalogue does not know.

        The receipt is made from the optimizer step after the first `warm_up` ones.
        """
        self.meter = LoopMeter(peak_tflops=peak_tflops)
        self._observing = Observing(warm_up)
        self._said = 0
        self.receipt: Receipt | None = None
        """Receipt of the last training."""

    def on_train_start(self, _trainer: Any, pl_module: Any) -> None:
        """Start to count the model's tokens and operations, and to gather evidence."""
        self.meter.attach(pl_module)
        self._observing.begin()

    def on_train_batch_start(self, _trainer: Any, _module: Any, batch: Any, *_: Any) -> None:
        self.meter.start()
        self.meter.count(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Count the time of a batch, and log the figures when they are due."""
        self.meter.step_ended()
        step = trainer.global_step  # the same for all batches of an accumulated step
        if step != self._said and step % trainer.log_every_n_steps == 0:
            self._said = step
            if figures := self.meter.window():
                pl_module.log_dict(figures, on_step=True, on_epoch=False)

    def on_validation_end(self, *_: Any) -> None:
        """Leave the time of an evaluation out."""
        self.meter.leave_out()

    def on_exception(self, _trainer: Any, _module: Any, exception: BaseException) -> None:
        """Add advice to an error that ends the training."""
        self.meter.detach()
        self._observing.let_go()
        add_advice(exception)

    def on_train_end(self, trainer: Any, _module: Any) -> None:
        """Detach from the model, and write the receipt."""
        self.meter.detach()
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        self.receipt = self._observing.end(folder, write=trainer.is_global_zero)
