"""Checks of a run folder: its events, speed and memory against the plan, and its log.

Each function looks for the fault of signs.yaml that has its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from trainfit.core.errors import BadInput, TrainfitError
from trainfit.core.files import is_file
from trainfit.core.plan_records import Plan
from trainfit.core.records import Event
from trainfit.doctor.finding import (
    BUSY,
    GUIDE_MFU,
    IDLE,
    Check,
    Finding,
    Seen,
    checks,
    steps,
    worst_first,
)
from trainfit.doctor.signs import read_log
from trainfit.hardware.catalogue import GpuSpec, find
from trainfit.runs.reader import Columns, RunPart, finite, read_run, settled
from trainfit.runs.run_folder import LOG

WAITS = 0.10
"""Share of the time from which on waiting for data is the bottleneck."""
EVALUATES = 0.30
WORTH_SECONDS = 20.0
"""Seconds lost below which there is no finding."""
SLOWER = 0.7
OVERFLOWS = 0.05
"""Share of overflowing steps that the search for the loss scale does not explain."""
OVER_PLAN = 0.05
"""Error of the memory estimate where none was recorded."""
SPIKE = 0.10


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
        """Return the run's events of one kind."""
        return [event for event in self.part.events if event.kind == kind]


def run_failed(run: RunFacts) -> Iterator[Seen]:
    """The last event, which has the reason."""
    for event in run.said("failed")[-1:]:
        yield Seen(evidence=f"{run.where}step {event.step}: {event.text}")


def run_out_of_memory(run: RunFacts) -> Iterator[Seen]:
    """Events of running out of memory, and the finest cut that was used."""
    events = [row for row in run.part.event_rows if row.get("kind") == "oom"]
    if not events:
        return
    cuts = [event["micro_batches"] for event in events if "micro_batches" in event]
    evaluations = sum("eval_batch_size" in event for event in events)
    lower, expandable, in_evaluations = steps("finer_cut")
    fix = [lower] if cuts else []
    fix += [expandable] if len(events) > len(cuts) + evaluations else []
    fix += [in_evaluations] if evaluations else []
    told = f"memory ran out {len(events)} times"
    if cuts:
        told += f"; steps are cut into {cuts[-1]} from there on"
    yield Seen(evidence=f"{run.where}{told}", fix=tuple(fix))


def run_not_finite(run: RunFacts) -> Iterator[Seen]:
    """Steps that were skipped, apart from fp16's search for its scale."""
    skipped = run.said("skipped")
    if skipped:
        fp16 = run.plan is not None and run.plan.precision == "fp16"
        told = f"{len(skipped)} steps skipped, the first at step {skipped[0].step}"
        yield Seen(evidence=run.where + told, fix=steps("nan_fp16" if fp16 else "nan_other"))


def run_overflows(run: RunFacts) -> Iterator[Seen]:
    """Overflows in more than one step in twenty."""
    lost, steps = len(run.said("overflow")), run.steps
    if lost > max(10, OVERFLOWS * steps):
        yield Seen(evidence=f"{run.where}{lost} of {steps} steps overflowed")


def run_bf16_emulated(run: RunFacts) -> Iterator[Seen]:
    """bf16 on a GPU before compute capability 8.0."""
    spec = run.spec
    if spec and run.plan and run.plan.precision == "bf16" and not spec.native_bf16:
        yield Seen(evidence=f"bf16 on {spec.slug}, compute capability {spec.compute_capability}")


def run_full_precision(run: RunFacts) -> Iterator[Seen]:
    """fp32, with TF32 or without, on a GPU with fast half precision."""
    spec = run.spec
    if spec and run.plan and run.plan.precision == "fp32" and spec.native_fp16:
        tf32 = "" if run.plan.runtime.tf32 or not spec.native_tf32 else ", and TF32 is off"
        yield Seen(evidence=f"fp32 on {spec.slug}{tf32}")


def run_low_mfu(run: RunFacts) -> Iterator[Seen]:
    """MFU against the catalogue's target for the GPU, or the tuning guide's for most."""
    mfu, spec = run.usual("mfu"), run.spec
    if mfu is None:
        return
    target = spec.mfu_good[0] if spec and spec.mfu_good else GUIDE_MFU
    if 100 * mfu < target:
        good = f"{target:g}% is where good begins on {spec.slug if spec else 'most GPUs'}"
        yield Seen(evidence=f"{run.where}MFU {mfu:.1%}, and {good}", fix=_faster(run))


def _faster(run: RunFacts) -> tuple[str, ...]:
    """The steps that this run has not taken yet, the loader first where it waits."""
    plan, waits = run.plan, (run.usual("wait_share") or 0.0) > WAITS
    wanted = {
        "loader": waits,
        "raise_batch": True,
        "precision": plan is None or plan.precision == "fp32",
        "compile": plan is None or not plan.compile,
    }
    names = [name for name, use in wanted.items() if use]
    names += ([] if waits else ["loader"]) + ["fewer_pauses", "rest"]
    return tuple(step for name in names for step in steps(name))


def run_waits(run: RunFacts) -> Iterator[Seen]:
    """Share of the time that the loop waited for data."""
    share = run.usual("wait_share")
    lost = (share or 0.0) * run.steps * (run.usual("step_seconds") or 0.0)
    if share is not None and share > WAITS and lost > WORTH_SECONDS:
        workers = f", with {run.plan.num_workers} workers" if run.plan else ""
        yield Seen(evidence=f"{run.where}{share:.0%} of the time waiting for data{workers}")


def run_underused(run: RunFacts) -> Iterator[Seen]:
    """Utilisation that the driver reported during the run."""
    shares = [
        share for gpu in run.part.gpus.values() for share in run.figures("utilisation_percent", gpu)
    ]
    if shares and (share := median(shares)) < BUSY:
        yield Seen(
            evidence=f"{run.where}busy {share:.0f}% of the time (median of {len(shares)} looks)",
            severity="warning" if share < IDLE else "info",
        )


def run_evaluation_time(run: RunFacts) -> Iterator[Seen]:
    """Evaluations that take over 30% of training and evaluating together."""
    times = run.figures("seconds", run.part.evaluations)
    spent = sum(times)
    trained = run.steps * (run.usual("step_seconds") or 0.0)
    if spent > max(WORTH_SECONDS, EVALUATES * (spent + trained)):
        share = f"{spent / (spent + trained):.0%} of the time"
        yield Seen(evidence=f"{run.where}{len(times)} evaluations took {spent:.0f} s, {share}")


def run_slowing(run: RunFacts) -> Iterator[Seen]:
    """Throughput of the last quarter of the run against the first, where steps are cut alike."""
    cuts = run.figures("micro_batches")
    rates = settled(run.part.train, "tokens_per_second").tolist()
    quarter = len(rates) // 4
    if quarter < 2 or len(set(cuts)) > 1 or not run.on_gpu:
        return
    early, late = median(rates[:quarter]), median(rates[-quarter:])
    if late < SLOWER * early:
        yield Seen(evidence=f"{run.where}from {early:,.0f} to {late:,.0f} tokens/s")


def run_memory_unused(run: RunFacts) -> Iterator[Seen]:
    """Peak memory under 80%; a warning where the GPU was not busy either."""
    plan, peak = run.plan, max(run.figures("memory_gib"), default=None)
    if plan is None or plan.gpu is None or plan.memory is None or peak is None:
        return
    share = 100 * peak / plan.memory.capacity_gib
    if share < BUSY:
        slow = any(True for look in (run_low_mfu, run_underused) for _ in look(run))
        yield Seen(
            evidence=f"{run.where}at most {peak:.1f} of {plan.memory.capacity_gib:.1f} GiB "
            f"({share:.0f}%)",
            severity="warning" if slow else None,
        )


def run_over_plan(run: RunFacts) -> Iterator[Seen]:
    """The measured peak against the predicted one, with its error bar."""
    plan, peak = run.plan, max(run.figures("memory_gib"), default=None)
    if plan is None or plan.gpu is None or plan.memory is None or peak is None:
        return
    planned = plan.memory.peak_allocated_gib
    known = plan.memory.error_percent
    if peak > planned * (1 + (OVER_PLAN if known is None else max(known / 100, 0.02))):
        yield Seen(evidence=f"{run.where}peak {peak:.2f} GiB, planned {planned:.2f} GiB")


def run_evaluation_memory(run: RunFacts) -> Iterator[Seen]:
    """A jump of the peak from the last row before an evaluation to the first after it.

    It does no harm where most of the memory is free.
    """
    train, memory = run.part.train, None if run.plan is None else run.plan.memory
    if "memory_gib" not in train:
        return
    limit = 0.0 if memory is None else memory.capacity_gib / 2
    for step in run.figures("step", run.part.evaluations):
        before, after = (
            run.figures("memory_gib", {"memory_gib": train["memory_gib"][chosen]})
            for chosen in (train["step"] <= step, train["step"] > step)
        )
        least = max(limit, before[-1] * (1 + SPIKE)) if before else limit
        if before and after and before[-1] > 0 and after[0] > least:
            rise = f"from {before[-1]:.2f} to {after[0]:.2f} GiB"
            yield Seen(evidence=f"{run.where}the evaluation at step {step:.0f} raised it {rise}")
            return


CHECKS: tuple[Check[RunFacts], ...] = checks("run", globals())
_IN_NUMBERS = frozenset({"trainfit_oom", "nan_loss", "low_mfu"})
"""Faults of a log that the run's own numbers and events tell better."""


def examine_run(folder: Path) -> tuple[Finding, ...]:
    """Find faults and poor settings of a run; a fault that folds share is listed once."""
    findings: dict[tuple[str, str], Finding] = {}
    run = read_run(folder)
    begun = [part for part in run.parts if is_file(part.folder / LOG)]
    if not begun:
        raise BadInput(f"{folder} holds no training", "give the folder of a run that has begun")
    for part in begun:
        facts = RunFacts(part=part, plan=run.plan)
        found = [finding for check in CHECKS for finding in check(facts)]
        found += [f for f in read_log(part.folder / LOG) if f.id not in _IN_NUMBERS]
        for finding in found:
            findings.setdefault((finding.id, finding.title), finding)
    return worst_first(findings.values())
