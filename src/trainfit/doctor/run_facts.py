"""A run folder read for the doctor: what was planned, what was measured, what happened."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trainfit.core import codec
from trainfit.core.errors import BadInput, TrainfitError, reason
from trainfit.core.files import LARGEST_LOG, read_text
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

_EVENT = re.compile(r"[\d-]{10} [\d:]{8} ([a-z][a-z ]*) at step (\d+): (.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One training: a run without folds, or one of its folds."""

    name: str = ""
    plan: Plan | None = None
    rows: tuple[Mapping[str, Any], ...] = ()
    """The lines of metrics.jsonl about training."""
    evaluations: tuple[Mapping[str, Any], ...] = ()
    gpus: tuple[Mapping[str, Any], ...] = ()
    """What the driver said of each GPU, again and again."""
    events: tuple[Event, ...] = ()

    def figures(self, name: str, rows: Iterable[Mapping[str, Any]] | None = None) -> list[float]:
        """The finite values of a figure, in the order of their rows."""
        values = (_number(row.get(name)) for row in (self.rows if rows is None else rows))
        return [value for value in values if math.isfinite(value)]

    def usual(self, name: str) -> float | None:
        """The median of a figure, without the first row, in which things are still warming up."""
        values = self.figures(name, self.rows[1:] or self.rows)
        return median(values) if values else None

    @property
    def where(self) -> str:
        """Which fold this is, before what is said of it."""
        return f"{self.name}: " if self.name else ""

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
        """Whether it was planned for a GPU, or one was watched."""
        return bool(self.gpus) or (self.plan is not None and self.plan.gpu is not None)

    def said(self, kind: str) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if event.kind == kind]


def read_run(part: Path, folder: Path) -> RunFacts:
    """The facts of one training in `part`, of the run in `folder`."""
    rows = [row for row in _rows(part / "metrics.jsonl") if "step" in row]
    result = _object(part / "result.json")
    return RunFacts(
        name="" if part == folder else part.name,
        plan=_plan(folder / "plan.json"),
        rows=tuple(row for row in rows if row.get("kind") == "train"),
        evaluations=tuple(row for row in rows if row.get("kind") == "evaluation"),
        gpus=tuple(gpu for row in _rows(part / "gpus.jsonl") for gpu in _gpus(row)),
        events=_events(part / "train.log", result),
    )


def _gpus(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = row.get("gpus")
    return [gpu for gpu in found if isinstance(gpu, dict)] if isinstance(found, list) else []


def parts(folder: Path) -> list[Path]:
    """The folders that hold a training: the run's own, or those of its folds."""
    folds = sorted(folder.glob("fold-*/"), key=lambda fold: (len(fold.name), fold.name))
    parts = [part for part in (folds or [folder]) if (part / "train.log").is_file()]
    if not parts:
        raise BadInput(f"{folder} holds no training", "give the folder of a run that has begun")
    return parts


def _events(log: Path, result: Mapping[str, Any]) -> tuple[Event, ...]:
    """Of the result; of the log, where the run has not ended or was killed."""
    try:
        if events := result.get("events"):
            return codec.decode(tuple[Event, ...], events)
    except TrainfitError:  # an older run's form
        pass
    found = []
    try:
        text = read_text(log, LARGEST_LOG, errors="replace")
    except OSError as error:
        what = f"cannot read {log} ({reason(error)})"
        raise BadInput(what, "give the folder of a run that has begun") from None
    for line in text.splitlines():
        match = _EVENT.fullmatch(line)
        if match and match[1] != "evaluation":
            found.append(Event(kind=match[1], step=int(match[2]), seconds=0.0, text=match[3]))
    return tuple(found)


def _plan(path: Path) -> Plan | None:
    try:
        return Plan.load(path)
    except TrainfitError:  # none, or that of another version
        return None


def _object(path: Path) -> dict[str, Any]:
    try:
        return codec.read_object(path)
    except (OSError, ValueError):
        return {}


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file, without what a killed process left half written."""
    try:
        return codec.read_rows(path)
    except OSError:
        return []


def _number(value: Any) -> float:
    try:
        return codec.decode(float, value)
    except TrainfitError:
        return math.nan


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
    shares = run.figures("utilisation_percent", run.gpus)
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
    spent = sum(run.figures("seconds", run.evaluations))
    trained = run.steps * (run.usual("step_seconds") or 0.0)
    if spent > max(WORTH_SECONDS, EVALUATES * (spent + trained)):
        share = spent / (spent + trained)
        yield Seen(
            evidence=f"{run.where}{len(run.evaluations)} evaluations took {spent:.0f} s, "
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
    rates = run.figures("tokens_per_second", run.rows[1:])
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
