"""Rungs of the ladder, the naive baseline, and the rows that are measured.

A rung is data: values that it sets in the plan, and naive habits that it ends. Any set of rungs on
top of the baseline is a setting that can be timed. Every row of the source documents' tables is a
rung, or has the reason why it is not applicable here; optimizations.yaml has their words.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from trainfit.core import codec
from trainfit.core.files import read_own_yaml
from trainfit.core.plan_records import Plan, TaskSpec
from trainfit.core.records import HardwareProfile, Record, Scalar
from trainfit.kernels import supported
from trainfit.measuring.timing import ratio_interval, rounds_interval
from trainfit.tuning.tuned_cache import Interval, Status, Trial, TrialCandidate

BASELINE = "baseline"
NAIVE_BATCH = 8
"""Batch size of the baseline: the default of transformers' Trainer."""
FUSIBLE = ("sdpa", "varlen", "varlen_efficient")
"""Attention paths whose padded form is scaled_dot_product_attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Naive(Record):
    """Habits of a naive loop, and other switches that no plan has."""

    eager: bool = True
    """Attention by matrix products and a softmax."""
    shuffled: bool = True
    """Sequences in random order, padded to the longest of a batch."""
    zeroed: bool = True
    """Gradients are kept and zeroed, not freed."""
    epoch_steps: int | None = None
    """Steps per epoch, to measure what the start of an epoch costs; None: all."""
    liger: bool = False
    """Layers of transformers' models are replaced by Liger's."""


THOUGHTFUL = Naive(eager=False, shuffled=False, zeroed=False)
"""No naive habit: how trainfit always trains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One optimization of the ladder, as a change of the plan before it."""

    name: str
    what: str
    plan: dict[str, Any] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)
    naive: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Rungs that must be below it."""
    replaces: tuple[str, ...] = ()
    """Rungs that have no effect together with this one."""
    trades: bool = False
    """True for a trade-off, such as time for memory; later rungs do not include it."""
    between_epochs: bool = False
    """True where it changes only the start of an epoch."""

    def is_in(self, plan: Plan) -> bool:
        """Tell if the plan has all its values."""
        wanted = ((plan, self.plan), (plan.runtime, self.runtime))
        return all(getattr(has, name) == value for has, it in wanted for name, value in it.items())


def naive_plan(best: Plan) -> Plan:
    """Plan of the baseline: the same job as `best` with naive settings."""
    return replace(
        best,
        precision="fp32",
        runtime=replace(best.runtime, tf32=False, cudnn_benchmark=False),
        packed=False,
        attention="sdpa" if best.attention in FUSIBLE else "own",
        batch_size=min(NAIVE_BATCH, best.effective_batch_size),
        micro_batch_tokens=NAIVE_BATCH * best.workload.max_length,
        gradient_accumulation_steps=math.ceil(best.effective_batch_size / NAIVE_BATCH),
        gradient_checkpointing="none",
        compile=False,
        compile_mode="default",
        cuda_graph=False,
        optimizer="adamw",
        offload_optimizer=False,
        data_on_gpu=False,
        num_workers=0,
        pin_memory=False,
        persistent_workers=False,
        prefetch_factor=None,
    )


def setting(best: Plan, rungs: Iterable[Rung]) -> tuple[Plan, Naive]:
    """Plan and habits of the baseline with these rungs."""
    plan = naive_plan(best)
    # Those habits that make a difference to the job.
    naive = Naive(eager=best.attention in FUSIBLE, shuffled=len(set(best.workload.lengths)) > 1)
    for rung in rungs:
        runtime = replace(plan.runtime, **rung.runtime)
        plan = replace(plan, runtime=runtime, **rung.plan)
        naive = replace(naive, **rung.naive)
    return plan, naive


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderStep(Record):
    """One optimization on top of those before it, or the best without one of them."""

    name: str
    what: str
    """Description of the change."""
    status: Status
    samples_per_second: Interval | None = None
    speedup: Interval | None = None
    """Speed relative to the baseline."""
    gain: Interval | None = None
    """Speed relative to the step before, or to the best for a removal."""
    peak_memory_gib: float | None = None
    """Peak allocated on the GPU, or resident memory without a GPU."""
    kept: bool = True
    """True where the steps after it include it."""
    note: str = ""
    settings: dict[str, Scalar] = field(default_factory=dict)
    """Settings that differ from the plan at the top of the ladder."""
    step_seconds: tuple[tuple[float, ...], ...] = ()
    """Seconds of every timed step, round by round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotApplicable(Record):
    """An optimization of the documents that cannot be applied here, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder(Record):
    """Measured steps from the naive baseline to the plan, one optimization after another."""

    title: str = ""
    device: str
    torch: str
    taken: str
    """Date of the measurement."""
    samples_per_step: int
    """Sequences of an optimizer step, the same in every row."""
    steps: tuple[LadderStep, ...]
    """Optimizations in order; the baseline comes first."""
    without: tuple[LadderStep, ...] = ()
    """The best, with one optimization removed at a time."""
    not_applicable: tuple[NotApplicable, ...] = ()
    drift: Interval | None = None
    """Last rate of the baseline relative to its first."""
    rounds: int = 1
    seconds: float = 0.0
    ended: Literal["finished", "time is up", "interrupted"] = "finished"

    @property
    def best(self) -> LadderStep:
        """Last step that was kept."""
        return [step for step in self.steps if step.kept][-1]


Timed = list[tuple[int, float]]
"""Sequences and seconds of each timed step of a trial."""
NAIVE_FACTORY = "trainfit.tuning.naive:trial"


@dataclass(slots=True, eq=False, kw_only=True)
class LadderRow:
    """A setting, its trials, and the row to compare it with."""

    name: str
    what: str
    plan: Plan
    naive: Naive
    before: LadderRow | None = None
    trials: list[Trial] = field(default_factory=list)
    kept: bool = True
    note: str = ""
    twin: LadderRow | None = None
    """Row before this one in epochs of one step, where only the start of an epoch differs."""
    epoch_steps: int = 1
    """Steps per epoch of the job, which share the cost of its start."""

    @property
    def good(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.status == "ok"]

    @property
    def status(self) -> Status:
        """Status of the last trial, or ok where any was successful."""
        return "ok" if self.good else self.trials[-1].status if self.trials else "skipped"

    def candidate(self, task: TaskSpec, best: Plan) -> TrialCandidate:
        if self.naive != THOUGHTFUL:
            arguments = {"inner": codec.encode(task), "naive": codec.encode(self.naive)}
            task = TaskSpec(factory=NAIVE_FACTORY, arguments=arguments)
        return TrialCandidate(settings=self.settings(best), plan=self.plan, task=task)

    def settings(self, best: Plan) -> dict[str, Scalar]:
        """Settings that differ from `best`, by name."""
        pairs = ((best, self.plan), (best.runtime, self.plan.runtime), (THOUGHTFUL, self.naive))
        return {
            one.name: getattr(ours, one.name)
            for theirs, ours in pairs
            for one in fields(ours)
            if isinstance(getattr(ours, one.name), Scalar)
            and getattr(ours, one.name) != getattr(theirs, one.name)
        }

    def rates(self) -> list[list[float]]:
        """Samples per second of each timed step, round by round."""
        if self.twin is None or self.before is None:
            return [[samples / seconds for samples, seconds in each] for each in self._timed()]
        return _spread(self._timed(), self.before.rates(), self.epoch_steps)

    def gain(self) -> Interval | None:
        """Speed relative to the row before."""
        if self.before is None:
            return None
        before = self.before.rates()
        if self.twin is not None:
            before = _spread(self.twin._timed(), before, self.epoch_steps)
        own = self.rates()
        return ratio_interval(own, before) if own and before else None

    def step(self, baseline: list[list[float]], best: Plan) -> LadderStep:
        """Record of the row; `baseline` holds the rates of the baseline."""
        rates = self.rates()
        peaks = [t.peak_memory_gib for t in self.good if t.peak_memory_gib is not None]
        return LadderStep(
            name=self.name,
            what=self.what,
            status=self.status,
            samples_per_second=rounds_interval(rates) if rates else None,
            speedup=_speedup(rates, baseline),
            gain=self.gain(),
            peak_memory_gib=max(peaks, default=None),
            kept=self.kept,
            note="; ".join(self._notes()),
            settings=self.settings(best),
            step_seconds=tuple(trial.step_seconds for trial in self.good),
        )

    def _timed(self) -> list[Timed]:
        return [list(zip(t.step_samples, t.step_seconds, strict=True)) for t in self.good]

    def _notes(self) -> Iterator[str]:
        if self.note:
            yield self.note
        if self.twin is not None and self.good and self.twin.good:
            own, other = (
                statistics.median(seconds for trial in row.good for seconds in trial.step_seconds)
                for row in (self, self.twin)
            )
            yield (
                f"an epoch's first step takes {own:.3g} s, before {other:.3g} s; "
                f"spread over the job's {self.epoch_steps:,} steps an epoch"
            )
        failed = [trial for trial in self.trials if trial.status != "ok"]
        if failed and self.good:
            yield f"{len(failed)} of {len(self.trials)} rounds failed: {failed[-1].note}"
        elif failed and failed[-1].note:
            yield failed[-1].note


def _speedup(rates: list[list[float]], baseline: list[list[float]]) -> Interval | None:
    if not rates or not baseline:
        return None
    if rates == baseline:  # exactly 1, without an interval
        return Interval(value=1.0, low=1.0, high=1.0)
    return ratio_interval(rates, baseline)


def _spread(rounds: list[Timed], usual: list[list[float]], epoch_steps: int) -> list[list[float]]:
    """Rates of epochs that start with these steps and go on at the `usual` rate."""
    if not usual:
        return []
    rate = statistics.median(each for found in usual for each in found)
    return [
        [
            samples / (samples / rate + (seconds - samples / rate) / epoch_steps)
            for samples, seconds in firsts
        ]
        for firsts in rounds
    ]


Made = Rung | NotApplicable


def rungs_for(
    best: Plan, profile: HardwareProfile, no_liger: str | None = None
) -> tuple[tuple[Rung, ...], tuple[NotApplicable, ...]]:
    """Rungs from the naive baseline up to `best`, and the optimizations that are not applicable.

    `no_liger` is why Liger has no kernels for the model, if it has none.
    """
    gpu, fused = bool(profile.gpus), best.attention in FUSIBLE
    missing = profile.compile.missing(gpu=gpu)
    if no_liger is None and not supported.is_installed():
        no_liger = "liger-kernel is not installed"
    no_liger = no_liger if gpu else "they are for GPUs"
    facts = {"batch": NAIVE_BATCH, "missing": " and ".join(missing), "no_liger": no_liger}
    rung = partial(_made, best, facts)

    def planned(*names: str) -> dict[str, Any]:
        return {name: getattr(best, name) for name in names}

    sizes = planned("batch_size", "micro_batch_tokens", "gradient_accumulation_steps")
    mode = best.compile_mode if best.compile else "default"
    made = [
        rung("TF32", best.runtime.tf32, runtime={"tf32": True}),
        rung("mixed precision", best.precision != "fp32", plan=planned("precision")),
        rung(
            "fused AdamW",
            best.optimizer == "adamw_fused",
            plan=planned("optimizer", "offload_optimizer"),
        ),
        rung("set_to_none", True, naive={"zeroed": False}),
        rung("loader workers", best.num_workers, plan=planned("num_workers", "prefetch_factor")),
        rung("pinned memory", best.pin_memory, plan={"pin_memory": True}),
        rung("persistent workers", best.persistent_workers, plan={"persistent_workers": True}),
        rung("data on the GPU", best.data_on_gpu, plan={"data_on_gpu": True}),
        rung("cuDNN benchmark", gpu, runtime={"cudnn_benchmark": True}),
        rung(
            "attention with packing" if best.packed and not fused else "attention kernel",
            fused,
            naive={"eager": False},
        ),
        *(
            # Without it, larger batches do not fit.
            [rung("planned checkpointing", True, plan=planned("gradient_checkpointing"))]
            if best.gradient_checkpointing != "none"
            else []
        ),
        rung("batch size", best.batch_size > NAIVE_BATCH, plan=sizes),
        rung("grouping by length", len(set(best.workload.lengths)) > 1, naive={"shuffled": False}),
        rung(
            "packing",
            best.packed,
            plan=planned("packed", "attention"),
            naive={"shuffled": False, "eager": False},
        ),
        rung("torch.compile", not missing, plan={"compile": True, "compile_mode": mode}),
        rung("captured steps", best.cuda_graph, plan={"cuda_graph": True}),
        *_trades(rung, best, profile),
        rung("Liger kernels", no_liger is None, naive={"liger": True}),
        rung("channels-last", False),
        rung("evaluation batch size", False),
    ]
    rungs = tuple(one for one in made if isinstance(one, Rung))
    return rungs, tuple(one for one in made if isinstance(one, NotApplicable))


def _trades(rung: Callable[..., Made], best: Plan, profile: HardwareProfile) -> Iterator[Made]:
    """Rungs that give one thing up for another, which nothing is built on."""
    frozen, gpus = best.workload.method == "frozen", profile.gpus
    if frozen or best.gradient_checkpointing == "none":
        yield rung("gradient checkpointing", not frozen, plan={"gradient_checkpointing": "full"})
    if best.precision == "bf16" and gpus and gpus[0].fp16:
        yield rung("fp16 instead of bf16", True, plan={"precision": "fp16"})
    compiles = not profile.compile.missing(gpu=True)
    graphs = {"compile": True, "compile_mode": "reduce-overhead"}
    name = "CUDA graphs" if compiles or not gpus else "CUDA graphs without a compiler"
    yield rung(name, gpus and compiles, plan=graphs)


def _made(
    best: Plan, facts: Mapping[str, object], name: str, applies: object, **change: Any
) -> Made:
    """Rung of a row of optimizations.yaml, or the reason why it is not applicable."""
    row = _table()[name]
    if applies:
        fields: dict[str, Any] = {k: row[k] for k in ("trades", "between_epochs") if k in row}
        fields |= {key: tuple(row[key]) for key in ("needs", "replaces") if key in row}
        what = row["what"].format(best=best, **facts)
        return Rung(name=row.get("name", name), what=what, **fields, **change)
    said = [r.why for r in best.reasons if r.setting == row.get("setting") and r.why]
    why = said[0] if said else row["otherwise"].format(best=best, **facts)
    return NotApplicable(
        name=row.get("name", name), reason=row.get("reason", "{why}").format(why=why)
    )


@cache
def _table() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read_own_yaml(Path(__file__).with_name("optimizations.yaml"))
    return found
