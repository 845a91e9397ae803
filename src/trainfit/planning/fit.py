"""Candidates of a step: how it is cut and checkpointed, its memory and its time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from trainfit.core.plan_records import Precision
from trainfit.core.records import Measurements
from trainfit.hardware.catalogue import GpuSpec
from trainfit.packing import Cut, MicroBatch, PackedCut, PaddedCut, cut_step, deal_steps
from trainfit.packing.steps import IntArray
from trainfit.planning.estimator.depths import Taken, exactly, take
from trainfit.planning.estimator.estimate import Target
from trainfit.planning.estimator.step_time import Rates, Seconds, rates, seconds, total_flops

Checkpointing = Literal["none", "selective", "full"]
MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "workspace")
"""Uses of a step's memory."""
_LOOKED_AT = 64
"""Steps of an epoch that are cut to find the shapes of micro-batches."""
WORTH_IT = 0.95
"""A cut with fewer micro-batches, which pads more, must take at most 95% of the time."""
HOPELESS = 1.1
"""Estimate over the capacity beyond which a full run is not worth trying."""
_PROBED = 2
"""Micro-batches in a probe: the second has gradients beside its activations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutting:
    """A cut of a job's steps, and the tokens that a step then computes."""

    cut: Cut
    rows: int
    width: int
    """Width of the micro-batch that takes the most memory."""
    lengths: tuple[int, ...]
    """Lengths of the sequences of a median packed micro-batch."""
    computed: float
    """Tokens per step on a rank, filler and padding included."""
    tokens: float
    """Tokens per step on a rank, of the data."""
    parts: tuple[int, ...] = ()
    """Sequences of each micro-batch of the first step."""

    @property
    def probed(self) -> int:
        """Micro-batches that a probe runs."""
        return min(self.cut.micro_batches, _PROBED)

    @property
    def shape(self) -> dict[str, Any]:
        """Arguments that give the shape of a probe's step."""
        slots = self.cut.slots if isinstance(self.cut, PackedCut) else None
        return {
            "rows": self.rows,
            "width": self.width,
            "slots": slots,
            "lengths": list(self.lengths) if slots is not None else None,
            "micro_batches": self.probed,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Facts that times are computed from."""

    gpu: GpuSpec | None
    precision: Precision
    tf32: bool
    measured: Measurements | None = None
    """Results of `check --measure` on this machine."""

    @property
    def peak(self) -> float | None:
        """Peak of the GPU in TFLOP/s, in the dtype of the products; None where it is not known."""
        dtype = "tf32" if self.precision == "fp32" and self.tf32 else self.precision
        return None if self.gpu is None else self.gpu.peak_tflops(dtype)

    @property
    def rates(self) -> Rates | None:
        """Rates of the GPU; None without a known peak."""
        if self.gpu is None:
            return None
        return rates(self.gpu, self.precision, self.tf32, self.measured)

    def step_seconds(
        self,
        taken: Taken,
        cutting: Cutting,
        probed: Cutting | None = None,
        *,
        captured: bool = False,
    ) -> float | None:
        """Estimate the time of a step; None for a GPU without a known peak.

        The operations in `taken` may come from a step with another cut, `probed`.
        """
        found = self.rates
        if found is None:
            return None
        total = Seconds()
        for weight, done in taken.done:
            total = total.plus(seconds(done, found), weight)
        probed = probed or cutting
        tokens = probed.probed * probed.rows * probed.width
        started = cutting.cut.micro_batches / probed.probed
        return total.step(cutting.computed / tokens, started, captured=captured)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCandidate:
    """A cut and a way of checkpointing, with their memory and time."""

    checkpointing: Checkpointing
    cutting: Cutting
    taken: Taken
    seconds: float | None
    """Time of a step; None for a GPU without a known peak."""
    flops: float
    """Necessary operations of a step on a rank, for tokens of the data."""


def profile_cuts(
    folds: Sequence[IntArray], cuts: Sequence[Cut], effective: int, ranks: int
) -> tuple[Cutting, ...]:
    """Profile cuts on the first steps of each fold, cut as in training."""
    steps: list[tuple[IntArray, IntArray]] = []
    for lengths in folds:
        dealt = deal_steps(lengths, effective, 0, 0)[: math.ceil(_LOOKED_AT / len(folds))]
        whole = [step for step in dealt if len(step) == min(effective, len(lengths))]
        steps += [(step, lengths) for step in whole or dealt[:1]]
    return tuple(_profile(steps, cut, ranks) for cut in cuts)


def _profile(steps: Sequence[tuple[IntArray, IntArray]], cut: Cut, ranks: int) -> Cutting:
    batches: list[tuple[MicroBatch, IntArray]] = [
        (batch, lengths)
        for step, lengths in steps
        for batch in cut_step(lengths, step, cut, ranks)[0]
        if batch.sequences
    ]
    # Attention may grow with the square of the width, so a wide micro-batch counts for more.
    worst = max((b for b, _ in batches), key=lambda b: b.rows * b.width * (b.width + 1024))
    first = steps[0]
    usual, lengths = sorted(batches, key=lambda b: b[0].tokens)[len(batches) // 2]
    return Cutting(
        cut=cut,
        rows=worst.rows,
        width=worst.width,
        lengths=tuple(lengths[np.array(usual.sequences)].tolist()),
        computed=sum(b.rows * b.width for b, _ in batches) / len(steps),
        tokens=sum(b.tokens for b, _ in batches) / len(steps),
        parts=tuple(len(b.sequences) for b in cut_step(first[1], first[0], cut, ranks)[0]),
    )


def whole_cutting(size: int, length: int, micro_batches: int, packed: bool) -> Cutting:
    """Build a cut of micro-batches with `size` sequences of the full length."""
    tokens, many = size * length, micro_batches
    cut: Cut = PaddedCut(tokens=tokens, shapes=((size, length),), rows=(size,) * many)
    if packed:
        cut = PackedCut(part_size=size * many, micro_batches=many, budgets=(tokens,), slots=size)
    total = float(tokens * many)
    rows, width = (1, tokens) if packed else (size, length)
    lengths = (length,) * size
    return Cutting(cut=cut, rows=rows, width=width, lengths=lengths, computed=total, tokens=total)


class Fitter:
    """Estimates the candidates of one job for GPUs of one kind.

    Probes take seconds, so results are cached and only the ends of a ladder are probed: memory and
    work in between, and between no and full checkpointing, are interpolated.
    """

    def __init__(
        self,
        factory: str,
        arguments: dict[str, Any],
        layers: int,
        cuttings: Sequence[Cutting],
        targets: tuple[Target, ...],
        plain: int = 0,
    ) -> None:
        """Estimate these cuts of a job's steps on all `targets`; that at `plain` pads the least."""
        self.cuttings, self._plain = cuttings, plain
        self._factory, self._arguments, self._layers = factory, arguments, layers
        self._targets = targets
        self._known: dict[tuple[Checkpointing, int], list[Taken]] = {}
        # Interpolate separately from the second micro-batch on, which has gradients too.
        second = 1 if cuttings[0].probed == 1 and len(cuttings) > 1 else 0
        self._ends = sorted({0, second, len(cuttings) - 1})

    def candidates(
        self, at: int, modes: Sequence[Checkpointing], speed: Speed
    ) -> list[StepCandidate]:
        """List every cut with each way of checkpointing, on the target at `at`, fastest first.

        Without times, candidates that recompute less come first, then larger micro-batches.
        """
        made = [
            self._candidate(mode, rung, at, speed)
            for mode in modes
            for rung in range(len(self.cuttings))
        ]
        if made[0].seconds is None:  # coarser cuts pay only where times are known
            plain = self.cuttings[self._plain :]
            made = [candidate for candidate in made if candidate.cutting in plain]
        return sorted(
            made,
            key=lambda c: (c.seconds or 0.0, MODES.index(c.checkpointing), -c.cutting.cut.tokens),
        )

    def quickest(
        self, target: Target, speed: Speed, compile: bool
    ) -> tuple[StepCandidate, StepCandidate | None]:
        """Estimate the fastest candidate without checkpointing.

        It is returned twice: estimated by small depths, and run with all layers, compiled or not,
        or None. A compiled step is run only where it decides between cuts.
        """
        if compile and not self._plain:
            shape = self._shape("none", self.cuttings[0])
            (self._known["none", 0],) = take(self._factory, [shape], (target,), self._layers)
            return self._candidate("none", 0, 0, speed), None
        by_depths, ran = self._both(self._plain, target, speed, compile)
        at = None if ran is None else self._fewer(ran, speed)
        return (by_depths, ran) if at is None else self._both(at, target, speed, compile)

    def _fewer(self, ran: StepCandidate, speed: Speed) -> int | None:
        """Find a cut with fewer micro-batches that is faster than the one that was run."""
        times = [
            speed.step_seconds(ran.taken, cutting, ran.cutting) or math.inf
            for cutting in self.cuttings[: self._plain]
        ]
        if not times or ran.seconds is None or min(times) > WORTH_IT * ran.seconds:
            return None
        return times.index(min(times))

    def _both(
        self, rung: int, target: Target, speed: Speed, compile: bool
    ) -> tuple[StepCandidate, StepCandidate | None]:
        """Estimate a cut by small depths, and run it in full where it may fit."""
        cutting = self.cuttings[rung]
        (self._known["none", rung],) = take(
            self._factory, [self._shape("none", cutting)], (target,), self._layers
        )
        by_depths = self._candidate("none", rung, 0, speed)
        if by_depths.taken.peak_allocated > HOPELESS * target.capacity:
            return by_depths, None
        return by_depths, self.exact(by_depths, target, speed, compile)

    def exact(
        self,
        candidate: StepCandidate,
        target: Target,
        speed: Speed,
        compile: bool = False,
        budget: float = 1.0,
    ) -> StepCandidate:
        """Run the candidate with all its layers, compiled or not.

        `budget` is the share of their activations that compiled blocks keep.
        """
        shape = self._shape(candidate.checkpointing, candidate.cutting, compile)
        shape |= {"activation_budget": budget} if budget < 1 else {}
        (taken,) = exactly(self._factory, shape, (target,))
        return _run(candidate, taken, speed)

    def _candidate(self, mode: Checkpointing, rung: int, at: int, speed: Speed) -> StepCandidate:
        cutting, plain = self.cuttings[rung], self.cuttings[self._plain]
        taken = self._taken(mode, rung, at)
        # Necessary operations are those without checkpointing.
        done = _flops(self._taken("none", self._plain, at))
        must = done / (plain.probed * plain.rows * plain.width)
        return StepCandidate(
            checkpointing=mode,
            cutting=cutting,
            taken=taken,
            seconds=speed.step_seconds(taken, cutting),
            flops=must * cutting.tokens,
        )

    def _taken(self, mode: Checkpointing, rung: int, at: int) -> Taken:
        if mode == "selective":  # every second block
            return _between(self._taken("none", rung, at), self._taken("full", rung, at), 0.5)
        if (mode, rung) not in self._known and rung in self._ends:
            self._ask([(kind, end) for kind in ("none", mode) for end in self._ends])
        if (mode, rung) in self._known:
            return self._known[mode, rung][at]
        low, high = self._ends[-2:]
        sizes = [self.cuttings[end].rows * self.cuttings[end].width for end in (low, rung, high)]
        share = (sizes[1] - sizes[0]) / ((sizes[2] - sizes[0]) or 1)
        return _between(self._taken(mode, low, at), self._taken(mode, high, at), share)

    def _ask(self, wanted: Sequence[tuple[Checkpointing, int]]) -> None:
        asked = [each for each in dict.fromkeys(wanted) if each not in self._known]
        shapes = [self._shape(mode, self.cuttings[rung]) for mode, rung in asked]
        found = take(self._factory, shapes, self._targets, self._layers)
        self._known |= dict(zip(asked, found, strict=True))

    def _shape(
        self, mode: Checkpointing, cutting: Cutting, compile: bool = False
    ) -> dict[str, Any]:
        shape = self._arguments | cutting.shape | {"checkpointing": mode}
        return shape | {"compile": True} if compile else shape


def _run(candidate: StepCandidate, taken: Taken, speed: Speed) -> StepCandidate:
    """Replace the estimates of a candidate by those of a full run."""
    spent = speed.step_seconds(taken, candidate.cutting)
    return replace(candidate, taken=taken, seconds=spent)


def _between(low: Taken, high: Taken, share: float) -> Taken:
    between: dict[str, Any] = {
        name: getattr(low, name) + share * (getattr(high, name) - getattr(low, name))
        for name in (*PARTS, "peak_allocated", "peak_reserved")
    }
    return replace(
        low,
        **between,
        fits=None,
        done=(
            *((weight * (1 - share), done) for weight, done in low.done),
            *((weight * share, done) for weight, done in high.done),
        ),
    )


def _flops(taken: Taken) -> float:
    return sum(weight * total_flops(done) for weight, done in taken.done)
