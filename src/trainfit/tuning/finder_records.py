"""What the batch-size finder is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainfit.errors import BadInput
from trainfit.records import Record, RuntimeSettings
from trainfit.tuning.finding import Range

MARGIN = 0.9
"""What is recommended of the largest budget: data is longer at times, and others use the GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Whose micro-batch is to be found, and within what."""

    factory: str | None = None
    """module:function of a probe, as planning's; None where `make` is given."""
    arguments: Callable[[int], dict[str, Any]] = lambda rows: {"rows": rows}
    """The factory's, for so many rows."""
    make: Callable[[int], Callable[[], object]] | None = None
    """Makes the step of so many rows. It cannot be predicted."""
    micro_batches: Callable[[int], int] = lambda _rows: 1
    """In a step of so many rows each."""
    width: int | None = None
    """Tokens of a row."""
    packed: bool = False
    effective_batch_size: int | None = None
    """None: whatever is recommended, in one micro-batch."""
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    margin: float = MARGIN
    at_least: int = 1
    at_most: int | None = None
    memory_gib: float | None = None
    """A bound on the memory, for a device that is larger."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not 0 < self.margin <= 1:
            raise BadInput(f"the margin is {self.margin}", "give a share above 0, at most 1")
        for name in ("at_least", "at_most", "effective_batch_size", "width"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise BadInput(f"{name} is {value}", "give a whole number, 1 or more")
        if self.at_most is not None and self.at_least > self.at_most:
            raise BadInput(
                f"at_least {self.at_least} is over at_most {self.at_most}", "give a range"
            )
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise BadInput(f"the memory is {self.memory_gib} GiB", "give what may be used, above 0")

    @property
    def asked(self) -> Range:
        """The range, as the search wants it."""
        most = {} if self.at_most is None else {"at_most": self.at_most}
        return Range(at_least=self.at_least, share=self.margin, **most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe(Record):
    """A real step that was run to find the budget."""

    rows: int
    tokens: int | None
    peak_allocated_gib: float
    peak_reserved_gib: float
    seconds: float
    """Of a micro-batch, with its share of the update."""
    predicted_gib: float | None
    """What was predicted to be allocated, before any probe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLaw(Record):
    """Peak memory over rows: a line."""

    fixed_gib: float
    gib_per_row: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizeFound(Record):
    """How large a micro-batch can be. Tokens are None where rows have no length."""

    largest_rows: int
    largest_tokens: int | None
    recommended_rows: int
    recommended_tokens: int | None
    knee_rows: int | None
    """The fewest rows within 2% of the recommended ones' throughput; None: nothing was timed."""
    knee_tokens: int | None
    margin: float
    effective_batch_size: int
    cuts: tuple[int, ...]
    """Sequences in each micro-batch of a step; their sum is the effective batch."""
    probes: tuple[Probe, ...]
    ran_out_at_rows: int | None
    """Where a probe ran out of memory after all, its rows."""
    capacity_gib: float
    """What the steps may take: free memory and what this process could give back."""
    used_by_others_gib: float | None
    """None where the driver does not say whose memory is whose."""
    law: MemoryLaw
    seconds: float
    seconds_after_build: float | None
    """From the moment that the model was there; None: no model was built."""
    reasons: tuple[str, ...]
