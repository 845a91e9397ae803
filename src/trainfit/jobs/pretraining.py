"""Pretraining as the engine's TrainTask (blocks of tokens, and their loss), and its result.

A sequence is a block: `block_size` tokens, and the one after each to predict. The order of the
blocks depends on the seed and the epoch alone, so that a run resumes in the middle of an epoch, and
any number of ranks trains on the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainfit.conf import GptConfig
from trainfit.core.errors import BadInput
from trainfit.core.files import text_facts
from trainfit.core.plan_records import Plan
from trainfit.core.records import Event, HardwareProfile, Record
from trainfit.data.batches import send
from trainfit.data.token_files import Ids
from trainfit.engine.distributed import World, gather
from trainfit.engine.evaluation import collect, own_batches
from trainfit.engine.observers import TrainRow
from trainfit.hardware.catalogue import GpuSpec
from trainfit.jobs.models.gpt_model import Gpt
from trainfit.kernels.fused_ops import IGNORED
from trainfit.measuring import flops
from trainfit.packing.steps import divide_up
from trainfit.runs.reader import Columns, read_part
from trainfit.runtime import eagerly

METRIC = "val_loss"
"""Metric that selects the best checkpoint: nats per token on the validation part."""
Rows = NDArray[np.int64]


class GptTask:
    """Blocks of a stream of tokens, in shuffled steps."""

    capturable = True

    def __init__(
        self,
        build: Callable[[], Gpt],
        train: Ids,
        validation: Ids,
        *,
        block_size: int,
        effective_batch: int,
        evaluated: int | None = None,
        unigram_entropy: float | None = None,
        seed: int = 0,
    ) -> None:
        """Evaluate `evaluated` blocks of the validation part, the same ones each time.

        The `unigram_entropy` is reported beside their loss.
        """
        self._beside = {} if unigram_entropy is None else {"unigram_entropy": unigram_entropy}
        self._build = build
        self._train, self._validation = train, validation
        self._block, self._seed = block_size, seed
        self._blocks = count_blocks(train, block_size, "training")
        self._effective = min(effective_batch, self._blocks)
        held_out = count_blocks(validation, block_size, "validation")
        order = _shuffled(held_out, seed, 0)
        self._evaluated = np.sort(order[:evaluated])

    def build_model(self) -> nn.Module:
        """Build a model with random weights."""
        return self._build()

    def lengths(self) -> Sequence[int]:
        """Return the same length for every block, as one number in memory."""
        same: Sequence[int] = np.broadcast_to(np.int64(self._block), self._blocks)  # type: ignore[assignment]
        return same

    def steps(self, epoch: int) -> Sequence[Sequence[int]]:
        """Deal the blocks into steps; an incomplete last step is left out."""
        count = self._blocks // self._effective
        order = _shuffled(self._blocks, self._seed, epoch)[: count * self._effective]
        steps: Sequence[Sequence[int]] = order.reshape(count, self._effective)  # type: ignore[assignment]
        return steps

    def weight(self, sequences: Sequence[int]) -> float:
        """Number of predicted tokens."""
        return float(len(sequences) * self._block)

    def collate(
        self, sequences: Sequence[int], rows: int, width: int, slots: int | None
    ) -> Mapping[str, Tensor]:
        """Make inputs and targets; rows without a block are filler that does not count."""
        assert slots is None
        assert width == self._block
        return collate_blocks(self._train, sequences, rows, width)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = model(batch["input_ids"], batch["targets"])
        return loss

    def evaluate(self, model: nn.Module, batch_size: int) -> dict[str, float]:
        """Mean loss on the evaluated blocks."""
        device = next(model.parameters()).device
        count = len(self._evaluated)
        rows = divide_up(count, divide_up(count, batch_size))  # of all batches: one shape
        batches = divide_up(count, rows)
        losses, numbers = [], []
        with eagerly(model):  # the evaluation's batch size would be compiled anew
            for number, counts in own_batches(batches):
                chosen = self._evaluated[number * rows : (number + 1) * rows].tolist()
                batch = collate_blocks(self._validation, chosen, rows, self._block)
                loss = self.loss(model, {k: send(v, device) for k, v in batch.items()})
                if counts:
                    losses.append(loss.double())
                    numbers.append(number)
        found, order = collect(batches, torch.stack(losses), torch.tensor(numbers))
        total = sum(found[order.argsort()].tolist())  # in the order of one rank: the same bits
        return {METRIC: total / self.weight(self._evaluated.tolist()), **self._beside}


def count_blocks(tokens: Ids, block_size: int, name: str) -> int:
    """Count the complete blocks of a stream, each with the token after it."""
    count = (len(tokens) - 1) // block_size
    if count < 1:
        raise BadInput(
            f"the {name} part has {len(tokens):,} tokens, fewer than a block of {block_size:,}",
            "prepare a larger corpus, or shorten data.max_length",
        )
    return count


def collate_blocks(tokens: Ids, blocks: Sequence[int], rows: int, width: int) -> dict[str, Tensor]:
    """Copy inputs and targets `[rows, width]` of these blocks from the mapped file."""
    inputs = np.zeros((rows, width), dtype=np.int64)
    targets = np.full((rows, width), IGNORED, dtype=np.int64)
    for row, block in enumerate(blocks):
        start = block * width
        inputs[row] = tokens[start : start + width]
        targets[row] = tokens[start + 1 : start + width + 1]
    return {"input_ids": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}


def _shuffled(count: int, seed: int, epoch: int) -> Rows:
    """Shuffle by random keys: the same on every machine and release of numpy."""
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(count)
    order: Rows = np.argsort(keys, kind="stable")
    return order


Standing = Literal["poor", "good", "excellent"]
_GENERAL_GOOD, _GENERAL_EXCELLENT = (15, 25), (30, 100)
"""Good and excellent MFU in percent, for GPUs that the tuning guide's table has no row for."""
_FULL = 0.80
"""Share of the memory in use above which the guide does not enlarge the batch."""
_AIM = 0.85
_LONG = 1024
_WAITING = 0.05
_NEEDED = ("compute_seconds", "compile_seconds", "wait_share", "step_seconds", "tokens_per_second")
"""Figures of a training row that are summed up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Seconds of a run by activity."""

    computing: float
    waiting: float
    """Waiting for data, with the device idle."""
    compiling: float
    evaluating: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """Figures of a run over all rows of its log."""

    train_loss: float | None
    """Loss of the last row."""
    tokens_per_second: float | None
    """Training rate with waits for data, without compiling, evaluating and saving."""
    mfu: float | None
    """Share of the peak while the GPUs computed."""
    wait_share: float
    spent: Spent


@dataclass(frozen=True, kw_only=True, slots=True)
class GptResult(Record):
    """Result of a pretraining job, read from its run folder; a resumed run counts as a whole."""

    task: str = "gpt"
    run: str
    status: Literal["finished", "stopped"]
    steps: int
    train_loss: float | None
    val_loss: float | None
    """Loss of the exported weights, in nats per token."""
    unigram_entropy: float | None
    """Loss of a model that knows only how common each token is."""
    tokens_per_second: float | None
    gpu: str | None
    """Name of the GPU in the catalogue."""
    mfu: float | None
    """Share of the datasheet's dense peak; None where the peak is not known."""
    mfu_of_measured: float | None
    """Share of the peak that `check --measure` found here."""
    standing: Standing | None
    """Rating by the tuning guide's table."""
    next_steps: tuple[str, ...]
    """Overrides to try where the MFU is poor, the most promising first."""
    peak_memory_gib: float | None
    seconds: float
    spent: Spent
    events: tuple[Event, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Validation loss by its name."""
        return {} if self.val_loss is None else {"val_loss": self.val_loss}

    def __repr__(self) -> str:
        """Figures for a terminal."""
        names = ("steps", "train_loss", "val_loss", "tokens_per_second", "mfu", "seconds")
        figures = {name: getattr(self, name) for name in names}
        return text_facts(f"{self.task} {self.status}: {self.run}", figures)


def iter_line(row: TrainRow) -> str:
    """Format the tuning guide's line; its time is a step's without waiting and compiling."""
    mfu = "" if row.mfu is None else f", mfu {row.mfu:.1%}"
    return f"iter {row.step}: loss {row.loss:.4f}, time {row.compute_seconds * 1e3:.2f}ms{mfu}"


def read_meter(run: Path) -> Meter:
    """Read rates and shares of a run from its metrics, without the first row, the warm-up."""
    part = read_part(run)
    train = _complete(part.train, _NEEDED)
    steps = np.diff(train["step"], prepend=0)
    settled = slice(1, None) if len(steps) > 1 else slice(None)
    mfu = train.get("mfu", np.full(len(steps), np.nan))
    computing = steps * train["compute_seconds"]
    waiting = steps * train["wait_share"] * train["step_seconds"]
    tokens = steps * train["tokens_per_second"] * train["step_seconds"]
    computed = float(computing[settled].sum())
    seconds = computed + float(waiting[settled].sum())
    known = computed > 0 and bool(np.isfinite(mfu[settled]).all())
    loss = train["loss"][-1] if len(steps) and "loss" in train else np.nan
    return Meter(
        train_loss=float(loss) if np.isfinite(loss) else None,
        tokens_per_second=float(tokens[settled].sum()) / seconds if seconds else None,
        mfu=float((mfu * computing)[settled].sum()) / computed if known else None,
        wait_share=1 - computed / seconds if seconds else 0.0,
        spent=Spent(
            computing=float(computing.sum()),
            waiting=float(waiting.sum()),
            compiling=float(train["compile_seconds"].sum()),
            evaluating=float(_complete(part.evaluations, ("seconds",))["seconds"].sum()),
        ),
    )


def _complete(table: Columns, needed: Sequence[str]) -> Columns:
    """Keep the rows that have all needed figures; a damaged run has lost some."""
    if not all(name in table for name in ("step", *needed)):
        return {name: np.empty(0) for name in ("step", *needed)}
    complete = np.all([np.isfinite(table[name]) for name in needed], axis=0)
    return {name: values[complete] for name, values in table.items()}


# ── the tuning guide ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """Peak TFLOP/s of the job's GPUs together, in the dtype in use; None where not known."""

    datasheet: float | None
    measured: float | None
    """Measured peak of one GPU times the number of GPUs."""

    @classmethod
    def of(cls, plan: Plan, profile: HardwareProfile, world: World, place: torch.device) -> Peaks:
        index = (place.index or 0) if place.type == "cuda" else len(profile.gpus)
        own = profile.gpus[index].slug if index < len(profile.gpus) else None
        slugs = [slug or None for slug in gather(world, own or "")]
        dtype = flops.dtype_in_use(plan.precision, plan.runtime.tf32)
        found = flops.measured_peak(plan.measurements, dtype)
        datasheet = flops.peak_of(slugs, dtype)
        return cls(
            datasheet=datasheet,
            measured=None if found is None or datasheet is None else found * world.size,
        )


def targets(spec: GpuSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the good and the excellent MFU on this GPU, in percent."""
    return spec.mfu_good or _GENERAL_GOOD, spec.mfu_excellent or _GENERAL_EXCELLENT


def standing(mfu: float, spec: GpuSpec) -> Standing:
    """Rate an MFU by the tuning guide's table."""
    good, excellent = targets(spec)
    if 100 * mfu >= excellent[0]:
        return "excellent"
    return "good" if 100 * mfu >= good[0] else "poor"


def next_steps(
    plan: Plan, config: GptConfig, spec: GpuSpec, *, memory_share: float, wait_share: float
) -> list[str]:
    """List the tuning guide's steps that are not taken yet, in its order, as overrides.

    `memory_share` is the GPU's memory in use at the peak, `wait_share` the time spent waiting for
    data.
    """
    room = memory_share < _FULL
    batch = plan.batch_size
    larger = max(batch + 1, int(batch * _AIM / max(memory_share, 0.01)))
    # Twice at most: not all of the memory in use grows with the batch.
    steps = {
        f"training.batch_size={min(larger, 2 * batch)}": room,
        f"data.max_length={_LONG if spec.memory_gb >= 16 else 512}": (
            room and config.data.max_length < _LONG
        ),
        "device.mixed_precision=auto": plan.precision == "fp32",
        "optimization.compile=true": not plan.compile,
        "device.tf32=true": spec.native_tf32 and not plan.runtime.tf32,
        f"training.num_workers={min(8, max(2, 2 * plan.num_workers))}": wait_share > _WAITING,
    }
    return [step for step, useful in steps.items() if useful]
