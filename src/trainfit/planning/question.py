"""What a plan is asked for: a job, its data, and the settings that are not free any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainfit.records import Record, Scalar, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin(Record):
    """A setting that was decided before the plan, and by whom."""

    value: Scalar
    origin: str
    """default, preset NAME, experiment NAME or override."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(Record):
    """A job to plan. The step is built by `factory` in another process."""

    task: str
    factory: str
    """module:function of the probe, which takes `arguments` and what is planned."""
    arguments: dict[str, Any]
    layers: int
    """Like ones, one after the other."""
    workload: Workload
    quick: dict[str, Any] = field(default_factory=dict)
    """Arguments that make the model quicker to build, and its layers no faster or slower."""
    pins: dict[str, Pin] = field(default_factory=dict)
    default_batch: int = 16
    """Sequences per optimizer step where nobody says."""
    unpackable: str | None = None
    """Why the model cannot attend within packed rows on any GPU; None: it can."""
    packed_attention: str = "varlen"
    """The kernel that packed rows take: varlen, or disentangled for a DeBERTa."""
    no_liger: str | None = "Liger is for transformers' models"
    """Why Liger has no kernels for the model; None: it has."""
    causal: bool = False
    """Blocks of one length, each token predicting the next: nothing to pack, nothing to pad."""
    watts: float | None = None
    price_per_hour: float | None = None

    def pinned(self, name: str) -> Any:
        """The value of a setting that is pinned, or None."""
        return self.pins[name].value if name in self.pins else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A decision, why, and what lost."""

    value: Any
    why: str
    alternatives: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        """For unpacking into value, why and alternatives."""
        return iter((self.value, self.why, self.alternatives))
