"""Loading: steps of an epoch become collated micro-batches on the device.

A step is the unit: its micro-batches are cut here, collated ahead of time in worker processes (or
in this one), and handed over together, so that a step can be repeated without loading it again. A
worker is sent the cut itself and keeps no state, so another cut, another epoch or a start in the
middle is just another list of work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainfit.core.errors import BadInput, RunFailed
from trainfit.core.records import TrainTask
from trainfit.data.tokens import IGNORED, Indices, IntArray, Tokens
from trainfit.packing import Cut, MicroBatch, PackedCut, PaddedCut, cut_step
from trainfit.planning.question import at_home

Batch = Mapping[str, Any]
StepWork = tuple[tuple[MicroBatch, ...], int | None]
"""Micro-batches of a step on this rank, and the slots of a packed one."""
_MULTIPLE = 8
"""Widths of rows on a CPU are multiples of it."""


class LoaderOptions(Protocol):
    """Settings of the worker processes, or of data on the GPU."""

    @property
    def on_gpu(self) -> bool: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def pin_memory(self) -> bool: ...
    @property
    def persistent_workers(self) -> bool: ...
    @property
    def prefetch_factor(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """Collated micro-batches of a step for this rank, on the CPU or where the data is."""

    sequences: tuple[int, ...]
    """Indices of the step's sequences on all ranks."""
    batches: list[Batch]
    waited: float
    """Seconds that the loop waited for this step."""


class StepLoader:
    """Loads the steps of a task, cut and collated."""

    def __init__(
        self,
        task: TrainTask,
        options: LoaderOptions,
        device: torch.device,
        *,
        rank: int = 0,
        ranks: int = 1,
        in_step: bool = False,
    ) -> None:
        """With `in_step` all ranks get the same number of micro-batches, some without sequences."""
        self.lengths = np.asarray(task.lengths(), dtype=np.int64)
        collate_there = getattr(task, "collate_there", None)
        there: Collate | None = None
        if options.on_gpu and device.type == "cuda" and collate_there is not None:
            there = collate_there(device)
        self.on_device = there is not None
        self._dataset = _Collated(there or task.collate)
        self._rank, self._ranks, self._in_step = rank, ranks, in_step
        # A GPU repeats a shape, which it has captured, faster than it takes a smaller one.
        self._trims = device.type != "cuda"
        self._jobs = _WorkOrder()
        self._loader: DataLoader[list[Batch]] | None = _build_loader(
            self._dataset, self._jobs, options, device, self.on_device
        )

    def steps(self, steps: Sequence[Sequence[int]], cut: Cut) -> Generator[LoadedStep, None, None]:
        """Yield these steps in order, cut by `cut`; a new call ends the previous one."""
        self._jobs.make = lambda: (self._job(step, cut) for step in steps)
        arriving = iter(self.workers())
        for step in steps:
            started = time.perf_counter()
            batches = _next(arriving)
            yield LoadedStep(tuple(map(int, step)), batches, time.perf_counter() - started)

    def load(self, step: Sequence[int], cut: Cut) -> list[Batch]:
        """Collate one step in this process."""
        return self._dataset[self._job(step, cut)]

    def workers(self) -> DataLoader[list[Batch]]:
        """Return the DataLoader that is used."""
        if self._loader is None:
            raise ValueError("the loader is closed")
        return self._loader

    def close(self) -> None:
        """End the worker processes now, not at garbage collection."""
        self._loader = None

    def _job(self, step: Sequence[int], cut: Cut) -> StepWork:
        own = cut_step(self.lengths, np.asarray(step), cut, self._ranks)[self._rank]
        if not self._in_step:  # ranks that synchronise once per step need no empty batches
            own = tuple(batch for batch in own if batch.sequences)
        if self._trims and isinstance(cut, PaddedCut):
            own = tuple(self._trimmed(batch) for batch in own)
        return own, cut.slots if isinstance(cut, PackedCut) else None

    def _trimmed(self, batch: MicroBatch) -> MicroBatch:
        """Cut a padded micro-batch to its own rows and its longest sequence."""
        longest = int(self.lengths[list(batch.sequences)].max(initial=1))
        width = min(batch.width, -(-longest // _MULTIPLE) * _MULTIPLE)
        return replace(batch, rows=max(len(batch.sequences), 1), width=width)


def to_device(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """Copy each micro-batch to the device when needed, without waiting where it is pinned."""
    for batch in batches:
        yield {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; a GPU may still compute what came before, which plain copies wait for."""
    on_gpu = device.type == "cuda" and tensor.is_cpu
    return (tensor.pin_memory() if on_gpu else tensor).to(device, non_blocking=on_gpu)


class _WorkOrder:
    """Sampler that sends whole steps to the workers."""

    def __init__(self) -> None:
        self.make: Callable[[], Iterator[StepWork]] = lambda: iter(())

    def __iter__(self) -> Iterator[StepWork]:
        return self.make()


Collate = Callable[[Sequence[int], int, int, int | None], Batch]
"""TrainTask.collate: sequences, rows, width and slots of a micro-batch."""


class _Collated(Dataset[list[Batch]]):
    """Dataset that collates the micro-batches of a step, in the workers."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __getitem__(self, job: StepWork) -> list[Batch]:
        batches, slots = job
        return [self._collate(b.sequences, b.rows, b.width, slots) for b in batches]


def _build_loader(
    dataset: _Collated,
    jobs: _WorkOrder,
    options: LoaderOptions,
    device: torch.device,
    on_device: bool,
) -> DataLoader[list[Batch]]:
    workers: dict[str, Any] = {}
    count = 0 if on_device else options.num_workers
    if count:  # torch refuses these options without workers
        workers["persistent_workers"] = options.persistent_workers
        if options.prefetch_factor is not None:
            workers["prefetch_factor"] = options.prefetch_factor
    return DataLoader(
        dataset,
        sampler=jobs,
        batch_size=None,
        num_workers=count,
        pin_memory=options.pin_memory and device.type == "cuda" and not on_device,
        # Otherwise every new iterator would change the random state that dropout uses.
        generator=torch.Generator(),
        **workers,
    )


def _next(arriving: Iterator[list[Batch]]) -> list[Batch]:
    try:
        return next(arriving)
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        fix = "give it more memory or shared memory, or fewer training.num_workers; then resume"
        raise RunFailed(f"a loader process died ({str(error).splitlines()[0]})", fix) from error


def collate_packed(
    tokens: Tokens, sequences: Indices, width: int, slots: int, pad_id: int = 0
) -> dict[str, Tensor]:
    """Collate sequences end to end into one row of `width` tokens, filled up at its end.

    `cu_seqlens` has the start of each sequence and of the filler; unused slots are sequences
    without tokens.
    """
    chosen = np.asarray(sequences, dtype=np.int64)
    lengths = tokens.lengths[chosen]
    used = check_packed(tokens, chosen, width, slots)
    ends = np.full(slots + 1, used, dtype=np.int32)
    ends[0] = 0
    ends[1 : chosen.size + 1] = np.cumsum(lengths)
    target = np.arange(used)
    labels = {"labels": labels_of(tokens, chosen, slots)}
    batch = labels | _gather(tokens, chosen, target, (1, width), pad_id)
    return batch | {"cu_seqlens": torch.from_numpy(ends)}


def collate_padded(
    tokens: Tokens, sequences: Indices, rows: int, width: int, pad_id: int = 0
) -> dict[str, Tensor]:
    """Collate one row per sequence, padded on the right.

    Unused rows are padding that sees its first token, since a softmax of nothing is NaN.
    """
    chosen = np.asarray(sequences, dtype=np.int64)
    lengths = tokens.lengths[chosen]
    check_padded(tokens, chosen, rows, width)
    target = np.repeat(np.arange(chosen.size) * width, lengths) + _within(lengths)
    mask = np.zeros((rows, width), dtype=np.int64)
    mask.reshape(-1)[target] = 1
    mask[chosen.size :, 0] = 1
    labels = {"labels": labels_of(tokens, chosen, rows)}
    batch = labels | _gather(tokens, chosen, target, (rows, width), pad_id)
    return batch | {"attention_mask": torch.from_numpy(mask)}


def check_packed(tokens: Tokens, chosen: IntArray, width: int, slots: int) -> int:
    """Count the tokens of sequences; raise BadInput where a packed row does not hold them."""
    used = int(tokens.lengths[chosen].sum())
    if used > width or chosen.size > slots:
        what = f"{chosen.size} sequences of {used} tokens for a row of {width} and {slots} slots"
        raise BadInput(what, "cut the step again")
    return used


def check_padded(tokens: Tokens, chosen: IntArray, rows: int, width: int) -> None:
    """Raise BadInput where padded rows do not hold these sequences."""
    longest = int(tokens.lengths[chosen].max(initial=0))
    if longest > width or chosen.size > rows:
        what = f"{chosen.size} sequences of up to {longest} tokens for {rows} rows of {width}"
        raise BadInput(what, "cut the step again")


def _gather(
    tokens: Tokens, chosen: IntArray, target: IntArray, shape: tuple[int, int], pad_id: int
) -> dict[str, Tensor]:
    """Place the tokens of the chosen sequences, and their tags, into a batch of that shape."""
    lengths = tokens.lengths[chosen]
    source = np.repeat(tokens.starts[chosen], lengths) + _within(lengths)
    batch = {"input_ids": _placed(tokens.ids, source, target, shape, pad_id)}
    if tokens.types is not None:
        batch["token_type_ids"] = _placed(tokens.types, source, target, shape, 0)
    if tokens.tags is not None:
        batch["labels"] = _placed(tokens.tags, source, target, shape, IGNORED)
    return batch


def _placed(
    values: NDArray[np.int32] | NDArray[np.uint8],
    source: IntArray,
    target: IntArray,
    shape: tuple[int, int],
    filler: int,
) -> Tensor:
    batch = np.full(shape, filler, dtype=np.int64)
    batch.reshape(-1)[target] = values[source]
    return torch.from_numpy(batch)


def _within(lengths: IntArray) -> IntArray:
    """Position of every token within its sequence."""
    ends = np.cumsum(lengths)
    within: IntArray = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
    return within


def labels_of(tokens: Tokens, chosen: IntArray, places: int) -> Tensor:
    """Collate the labels of the chosen sequences, with fillers up to `places`.

    The filler of a slot or row without a sequence is a class that cross-entropy ignores, or NaN.
    """
    found = tokens.labels[chosen]
    classes = found.ndim == 1 and found.dtype.kind != "f"
    kind, filler = (np.int64, IGNORED) if classes else (np.float32, np.nan)
    labels = np.full((places, *found.shape[1:]), filler, dtype=kind)
    labels[: chosen.size] = found
    return torch.from_numpy(labels)


# ── collating on the GPU ─────────────────────────────────────────────────────────────────────────

# The batches are those of `collate_packed` and `collate_padded`, tensor for tensor. Only a few
# numbers for each sequence are copied to the device.


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Tokens and labels as tensors of one device; the last label is that of an empty place."""

    tokens: Tokens
    ids: Tensor
    types: Tensor | None
    tags: Tensor | None
    labels: Tensor
    pad_id: int

    def packed(self, sequences: Indices, width: int, slots: int) -> dict[str, Tensor]:
        """Gather sequences end to end into one row of `width` tokens."""
        chosen = np.asarray(sequences, dtype=np.int64)
        used = check_packed(self.tokens, chosen, width, slots)
        lengths = self.tokens.lengths[chosen]
        ends = np.cumsum(lengths)
        offsets = self.tokens.starts[chosen] - ends + lengths
        which, offset, end = self._copied(
            slots, (chosen, len(self.tokens)), (offsets, 0), (ends, used)
        )
        places = torch.arange(width, device=self.ids.device)
        owner = torch.searchsorted(end, places, right=True).clamp_(max=slots - 1)
        batch = self._gathered((offset[owner] + places)[None], (places < end[-1])[None])
        starts = torch.nn.functional.pad(end, (1, 0)).int()
        return {"labels": self.labels[which]} | batch | {"cu_seqlens": starts}

    def padded(self, sequences: Indices, rows: int, width: int) -> dict[str, Tensor]:
        """Gather one row per sequence; unused rows see their first token, which is padding."""
        chosen = np.asarray(sequences, dtype=np.int64)
        check_padded(self.tokens, chosen, rows, width)
        starts, lengths = self.tokens.starts[chosen], self.tokens.lengths[chosen]
        which, start, length = self._copied(
            rows, (chosen, len(self.tokens)), (starts, 0), (lengths, 0)
        )
        places = torch.arange(width, device=self.ids.device)
        inside = places < length[:, None]
        batch = self._gathered(start[:, None] + places, inside)
        seen = inside | ((places == 0) & (length == 0)[:, None])
        return {"labels": self.labels[which]} | batch | {"attention_mask": seen.long()}

    def _copied(self, places: int, *rows: tuple[IntArray, int]) -> tuple[Tensor, ...]:
        """Copy numbers of each sequence to the device at once, each filled up to `places`."""
        table = np.stack([np.full(places, filler) for _, filler in rows])
        for row, (values, _) in zip(table, rows, strict=True):
            row[: values.size] = values
        return torch.from_numpy(table).to(self.ids.device, non_blocking=True).unbind()

    def _gathered(self, source: Tensor, inside: Tensor) -> dict[str, Tensor]:
        source = source.clamp(0, len(self.ids) - 1)

        def placed(values: Tensor, filler: int) -> Tensor:
            return values[source].long().masked_fill_(~inside, filler)

        batch = {"input_ids": placed(self.ids, self.pad_id)}
        if self.types is not None:
            batch["token_type_ids"] = placed(self.types, 0)
        if self.tags is not None:
            batch["labels"] = placed(self.tags, IGNORED)
        return batch


def device_tokens(tokens: Tokens, device: torch.device, pad_id: int) -> DeviceTokens | None:
    """Copy tokens to the device; None where they are too many for its memory."""
    if device.type == "cuda":
        _free, total = torch.cuda.mem_get_info(device)
        if not at_home(int(tokens.lengths.sum()), total / 2**30):
            return None

    def there(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(values)).to(device)

    every = np.arange(len(tokens))
    return DeviceTokens(
        tokens=tokens,
        ids=there(tokens.ids),
        types=None if tokens.types is None else there(tokens.types),
        tags=None if tokens.tags is None else there(tokens.tags),
        labels=labels_of(tokens, every, len(tokens) + 1).to(device),
        pad_id=pad_id,
    )
