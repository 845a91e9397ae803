"""Meter of any training loop: tokens, time, operations, memory; and advice on its errors."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.core.records import Receipt
from trainfit.doctor import diagnose_text
from trainfit.doctor.finding import numbered, tables
from trainfit.doctor.signs import Numbers, kind_of, read_numbers
from trainfit.hardware.catalogue import known_spec
from trainfit.hardware.model_shapes import ModelFlops
from trainfit.measuring.flops import count_flops
from trainfit.measuring.observe import Observation, observe
from trainfit.measuring.timing import GIB, MemoryTracker

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class LoopMeter:
    """Measures windows of steps; numbers are read from the device only at the end of a window."""

    def __init__(
        self, *, peak_tflops: float | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`peak_tflops` is the dense peak of a device that the catalogue does not know."""
        self._peak, self._clock = peak_tflops, clock
        self._flops: ModelFlops | None = None
        self._handles: list[Any] = []
        self._batches: list[Tensor] = []
        self._rows = 0
        self._seconds = 0.0
        self._mark: float | None = None
        self._memory: MemoryTracker | None = None
        self.product_dtype: torch.dtype | None = None
        """Dtype of the first linear layer's output in the last forward pass."""

    def attach(self, model: nn.Module, *, probe: bool = True) -> None:
        """Follow `model`; `probe` adds a hook to a linear layer, which a compiler would trace."""
        self._flops = count_flops(model)
        self._memory = MemoryTracker()
        first = next((m for m in model.modules() if isinstance(m, nn.Linear)), None)
        if probe and first is not None:
            self._handles.append(first.register_forward_hook(self._product))

    def follow_forward(self, model: nn.Module) -> None:
        """Count the tokens of every training pass through `model`, by a hook."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def count(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            if module.training and torch.is_grad_enabled():
                first = {"input_ids": positional[0]} if positional else {}
                self.count({**first, **named})

        self._handles.append(model.register_forward_pre_hook(count, with_kwargs=True))

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def count(self, batch: Any) -> None:
        """Count the rows of a batch, and the tokens of each without padding."""
        if not isinstance(batch, Mapping):
            return
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return
        self._rows += ids.shape[0]
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            self._batches.append(mask.detach().sum(dim=1))
        else:
            self._batches.append(torch.full((ids.shape[0],), ids.shape[1]))

    def _product(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if module.training and isinstance(output, Tensor):
            self.product_dtype = output.dtype

    def start(self) -> None:
        """Start the clock, unless it runs."""
        if self._mark is None:
            self._mark = self._clock()

    def step_ended(self) -> None:
        """Count the time since the last mark as training."""
        if self._mark is not None:
            self._seconds += self._clock() - self._mark
        self._mark = self._clock()

    def leave_out(self) -> None:
        """Leave the time since the last step out: an evaluation or a checkpoint."""
        self._mark = self._clock()

    def window(self) -> dict[str, float]:
        """Figures since the last call; unknown ones are left out."""
        lengths = [n for batch in self._batches for n in batch.tolist()]  # waits for the device
        if self._mark is not None:
            self.step_ended()
        seconds, tokens, rows = self._seconds, sum(lengths), self._rows
        self._seconds, self._rows = 0.0, 0
        self._batches.clear()
        figures = {}
        if self._memory is not None:
            figures["memory_gib"] = self._memory.update().peak / GIB
        if seconds > 0 and tokens:
            figures["tokens_per_second"] = tokens / seconds
            figures["samples_per_second"] = rows / seconds
            mfu = self._mfu(lengths, seconds)
            figures |= {} if mfu is None else {"mfu": mfu}
        return figures

    def _mfu(self, lengths: list[int], seconds: float) -> float | None:
        """MFU; None for an unknown device, or for a value above 1."""
        peak = self._peak if self._peak is not None else known_peak(self.precision)
        if not peak or self._flops is None:
            return None
        share = self._flops.of_step(lengths) / (seconds * peak * 1e12)
        return share if 0 < share <= 1 else None

    @property
    def precision(self) -> str:
        """Precision of matrix products: bf16, fp16, tf32 or fp32."""
        seen = _SHORT.get(self.product_dtype or torch.float32, "fp32")
        exact = torch.get_float32_matmul_precision() == "highest"
        return "tf32" if seen == "fp32" and not exact else seen


def known_peak(precision: str) -> float | None:
    """Dense peak of this process's GPU in TFLOP/s, by the catalogue."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    spec = known_spec(properties.name, properties.total_memory / GIB)
    return None if spec is None else spec.peak_tflops(precision)


RECEIPT = "trainfit_receipt.json"


class Observing:
    """Observes trainings one after another, and keeps the last receipt."""

    def __init__(self, warm_up: int) -> None:
        """Observe the step after the first `warm_up` ones."""
        self._warm_up = warm_up
        self._under_way = ExitStack()
        self._seen: Observation | None = None
        weakref.finalize(self, self._under_way.close)

    def let_go(self) -> None:
        """Stop observing after an error."""
        self._under_way.close()
        self._seen = None

    def begin(self) -> None:
        self.let_go()
        self._seen = self._under_way.enter_context(observe(warm_up=self._warm_up))

    def end(self, folder: Path, *, write: bool) -> Receipt | None:
        """Stop, and return the receipt; None for a training that was too short."""
        self._under_way.close()
        if self._seen is None or self._seen.receipt is None:
            return None
        receipt = replace(self._seen.receipt, run=str(folder))
        if write:
            receipt.save(folder / RECEIPT)
        return receipt


_HEAD = "trainfit:"
_UNKNOWN = "python_error"
"""The finding that only says that there was an error."""
_MODULES = {
    "transformers.": "transformers",
    "lightning.": "lightning",
    "pytorch_lightning.": "lightning",
}
"""Modules of a traceback that tell the framework; a loop without any is torch's."""
_EXPANDABLE = (
    "`export PYTORCH_ALLOC_CONF=expandable_segments:True` before Python starts "
    "(PYTORCH_CUDA_ALLOC_CONF before torch 2.9)"
)


@contextmanager
def oom_advice() -> Iterator[None]:
    """Let errors through with advice as a note, which Python prints below them.

    It is in the words of the framework whose loop it is.
    """
    try:
        yield
    except Exception as error:
        add_advice(error)
        raise


def add_advice(error: BaseException) -> None:
    """Add a note with the cause of a known error, once; running out of memory gets steps too."""
    if any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ())):
        return
    numbers = read_numbers(str(error))
    for finding in diagnose_text(f"{type(error).__name__}: {error}"):
        if finding.id == _UNKNOWN:
            continue
        out_of_memory = finding.id == kind_of(numbers)
        steps = numbered(_steps(finding.id, numbers, framework_of(error)))
        advice = steps if out_of_memory else finding.why
        error.add_note(f"{_HEAD} {finding.title} ({finding.evidence})\n{advice}")


def framework_of(error: BaseException) -> str:
    """Framework whose code the error passed through: transformers, lightning, or else torch."""
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        for prefix, name in _MODULES.items():
            if module.startswith(prefix):
                return name
        trace = trace.tb_next
    return "torch"


def _steps(kind: str, numbers: Numbers, framework: str) -> tuple[str, ...]:
    """Steps for running out of memory, in the order to try them."""
    steps = tables()["elsewhere"][framework]
    grow = f"If much is reserved but unallocated: {_EXPANDABLE}."
    if kind == "cuda_oom_fragmented":
        amount = f"{numbers.unallocated or 0:.1f} GiB are reserved but unallocated"
        return (f"Fragmentation: {amount}. Let segments grow: {_EXPANDABLE}.", *steps)
    if kind == "cuda_oom_shared":
        pids = ",".join(str(pid) for pid, _ in numbers.others)
        return (
            f"Other processes hold {numbers.held:.1f} GiB: `ps -o pid,user,etime,cmd -p {pids}` "
            "lists them; end those that are yours and left over.",
            "Choose another GPU: `export CUDA_VISIBLE_DEVICES=1`.",
            *steps,
        )
    if numbers.allowed is not None:
        cap = f"The process may use {numbers.allowed:.1f} GiB only: "
        return (f"{cap}raise what set_per_process_memory_fraction was given.", *steps, grow)
    return (*steps, grow)
