"""Pretraining as the engine's TrainTask: blocks of tokens, and their loss.

A sequence is a block: `block_size` tokens, and the one after each to predict. The order of the
blocks depends on the seed and the epoch alone, so that a run resumes in the middle of an epoch, and
any number of ranks trains on the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainfit.core.errors import BadInput
from trainfit.data.token_files import Ids
from trainfit.engine.evaluation import collect, own_batches
from trainfit.jobs.models.gpt_model import Gpt
from trainfit.kernels.fused_ops import IGNORED
from trainfit.packing.steps import divide_up
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
        """Sum the loss over the tokens."""
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
                loss = self.loss(model, {k: v.to(device) for k, v in batch.items()})
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
