"""The facts of one training for the doctor, and the checks of its speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from trainfit.core.errors import TrainfitError
from trainfit.core.plan_records import Plan
from trainfit.core.records import Event
from trainfit.doctor.advice import (
    BUSY,
    COMPILE,
    FASTER,
    FEWER_PAUSES,
    GUIDE_MFU,
    IDLE,
    LOADER,
    PRECISION,
    RAISE_BATCH,
    REST,
)
from trainfit.doctor.finding import Check, Fault, Seen, check
from trainfit.hardware.catalogue import GpuSpec, find
from trainfit.runs.reader import Columns, RunPart, finite, settled


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One training, a run without folds or one of its folds, with the plan of the run."""

    part: RunPart
    plan: Plan | None = None

    def figures(self, name: str, table: Columns | None = None) -> list[float]:
        """Finite values of a figure in order; of the training rows unless a table is given."""
        values: list[float] = finite(self.part.train if table is None else table, name).tolist()
        return values

    def usual(self, name: str) -> float | None:
        """Median of a figure, without the first row, which has the warm-up in it."""
        values = settled(self.part.train, name)
        return float(np.median(values)) if values.size else None

    @property
    def where(self) -> str:
        """The fold, as a prefix of evidence."""
        return f"{self.part.folder.name}: " if self.part.name else ""

    @property
    def steps(self) -> int:
        """Optimizer steps that were logged."""
        return int(max(self.figures("step"), default=0))

    @property
    def spec(self) -> GpuSpec | None:
        """The catalogue's row of the GPU that the run was planned for."""
        if self.plan is None or self.plan.gpu is None:
            return None
        try:
            return find(self.plan.gpu)
        except TrainfitError:  # a plan of another version's catalogue
            return None

    @property
    def on_gpu(self) -> bool:
        """True where the run was planned for a GPU, or one was watched."""
        return bool(self.part.gpus) or (self.plan is not None and self.plan.gpu is not None)

    def said(self, kind: str) -> list[Event]:
        """Events of one kind."""
        return [event for event in self.part.events if event.kind == kind]

    def rows_of(self, kind: str) -> list[Mapping[str, Any]]:
        """Events of one kind with their figures."""
        return [row for row in self.part.event_rows if row.get("kind") == kind]


WAITS = 0.10
"""The share of the time from which on waiting for data is the bottleneck."""
EVALUATES = 0.30
WORTH_SECONDS = 20.0
"""What is lost of a shorter run is not worth a word."""
SLOWER = 0.7
FEWER_EVALUATIONS = (
    "Evaluate less often: training.eval_steps=2000 (never at step 0, which is so anyway).",
    "On less data: training.eval_iters=50.",
)


@check(
    Fault(
        id="run_low_mfu",
        severity="warning",
        title="The GPU does little of what it could (MFU)",
        why="The tuning guide has a target for each GPU; under it something else than the GPU is "
        "the limit.",
        mend=FASTER,
    )
)
def run_low_mfu(run: RunFacts) -> Iterator[Seen]:
    """Against the catalogue's target for the GPU, or the guide's for most."""
    mfu, spec = run.usual("mfu"), run.spec
    if mfu is None:
        return
    target = spec.mfu_good[0] if spec and spec.mfu_good else GUIDE_MFU
    if 100 * mfu < target:
        yield Seen(
            evidence=f"{run.where}MFU {mfu:.1%}, and {target:g}% is where good begins on "
            f"{spec.slug if spec else 'most GPUs'}",
            mend=_faster(run),
        )


def _faster(run: RunFacts) -> tuple[str, ...]:
    """The steps that this run has not taken yet."""
    plan, waits = run.plan, run.usual("wait_share") or 0.0
    steps = [LOADER] if waits > WAITS else []
    steps.append(RAISE_BATCH)
    steps += [PRECISION] if plan is None or plan.precision == "fp32" else []
    steps += [COMPILE] if plan is None or not plan.compile else []
    return (*steps, *([] if waits > WAITS else [LOADER]), FEWER_PAUSES, REST)


@check(
    Fault(
        id="run_waits",
        severity="warning",
        title="Training waits for data",
        why="While it waits the GPU stands still.",
        mend=(
            LOADER,
            "training.persistent_workers=true and training.prefetch_factor=4.",
            "Data on an SSD; `trainfit check --measure` shows what the disk does.",
        ),
    )
)
def run_waits(run: RunFacts) -> Iterator[Seen]:
    """The loop's own measure of it."""
    share = run.usual("wait_share")
    lost = (share or 0.0) * run.steps * (run.usual("step_seconds") or 0.0)
    if share is not None and share > WAITS and lost > WORTH_SECONDS:
        workers = f", with {run.plan.num_workers} workers" if run.plan else ""
        yield Seen(evidence=f"{run.where}{share:.0%} of the time waiting for data{workers}")


@check(
    Fault(
        id="run_underused",
        severity="warning",
        title="The GPU was idle much of the time",
        why="Training keeps a GPU 80 to 95% busy; less means small steps or waiting for data.",
        mend=(RAISE_BATCH, LOADER, COMPILE, FEWER_PAUSES),
    )
)
def run_underused(run: RunFacts) -> Iterator[Seen]:
    """As the driver saw it while the run went on."""
    shares = [
        share for gpu in run.part.gpus.values() for share in run.figures("utilisation_percent", gpu)
    ]
    if shares and (share := median(shares)) < BUSY:
        yield Seen(
            evidence=f"{run.where}busy {share:.0f}% of the time (median of {len(shares)} looks)",
            severity="warning" if share < IDLE else "info",
        )


@check(
    Fault(
        id="run_evaluation_time",
        severity="warning",
        title="Evaluations take much of the time",
        why="The GPU could have trained in it.",
        mend=(*FEWER_EVALUATIONS, "Larger evaluation batches: training.eval_batch_size=64."),
    )
)
def run_evaluation_time(run: RunFacts) -> Iterator[Seen]:
    """Over three tenths of training and evaluating together."""
    times = run.figures("seconds", run.part.evaluations)
    spent = sum(times)
    trained = run.steps * (run.usual("step_seconds") or 0.0)
    if spent > max(WORTH_SECONDS, EVALUATES * (spent + trained)):
        share = spent / (spent + trained)
        yield Seen(
            evidence=f"{run.where}{len(times)} evaluations took {spent:.0f} s, "
            f"{share:.0%} of the time"
        )


@check(
    Fault(
        id="run_slowing",
        severity="warning",
        title="Training slowed down",
        why="A GPU that gets hot lowers its clocks; a neighbour on the machine does it too.",
        mend=(
            "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE` while it runs.",
            "`trainfit doctor` on the machine while it runs.",
        ),
    )
)
def run_slowing(run: RunFacts) -> Iterator[Seen]:
    """The last quarter's throughput against the first's, where steps are cut alike."""
    cuts = run.figures("micro_batches")
    rates = settled(run.part.train, "tokens_per_second").tolist()
    quarter = len(rates) // 4
    if quarter < 2 or len(set(cuts)) > 1 or not run.on_gpu:
        return
    early, late = median(rates[:quarter]), median(rates[-quarter:])
    if late < SLOWER * early:
        yield Seen(evidence=f"{run.where}from {early:,.0f} to {late:,.0f} tokens/s")


CHECKS: tuple[Check[RunFacts], ...] = (
    run_low_mfu,
    run_waits,
    run_underused,
    run_evaluation_time,
    run_slowing,
)
