"""A micro-batch as plain data, and how well its shape is filled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trainfit.records import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch(Record):
    """Sequences that go through the model together, and the shape they go in.

    A packed one has a single row that holds the sequences end to end; a padded one has a row for
    each. One without sequences is all filler: it keeps the ranks in step.
    """

    sequences: tuple[int, ...]
    tokens: int
    """Tokens of the sequences, without filler or padding."""
    rows: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens in a row, as the model sees them."""
        return self.rows, self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill(Record):
    """How much of what the model computes is real."""

    micro_batches: int
    shapes: int
    """Distinct ones: each is compiled once."""
    tokens: int
    capacity: int
    """Tokens with filler and padding."""

    @property
    def fill(self) -> float:
        """The share of real tokens."""
        return self.tokens / self.capacity if self.capacity else 1.0

    @property
    def padding(self) -> float:
        """The share of filler or padding."""
        return 1.0 - self.fill


def measure_fill(micro_batches: Iterable[MicroBatch]) -> Fill:
    """How well these micro-batches fill their shapes."""
    count = tokens = capacity = 0
    shapes = set()
    for batch in micro_batches:
        count += 1
        tokens += batch.tokens
        capacity += batch.rows * batch.width
        shapes.add(batch.shape)
    return Fill(micro_batches=count, shapes=len(shapes), tokens=tokens, capacity=capacity)
