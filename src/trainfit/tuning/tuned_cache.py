"""What was found before, by everything that it depends on.

A file holds the key in full beside the result: a result of another driver, another model or another
trainfit is stale and left alone with a line; a file that is damaged is removed with one.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainfit.core import caches, codec
from trainfit.core.errors import TrainfitWarning
from trainfit.core.files import cache_folder
from trainfit.core.plan_records import Plan, TaskSpec
from trainfit.core.records import HardwareProfile, Record, Scalar
from trainfit.measuring.machine_rates import device_name
from trainfit.measuring.timing import Interval as Interval
from trainfit.planning.estimator.probes import folder_content
from trainfit.planning.question import Question

Status = Literal["ok", "oom", "crashed", "hung", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialCandidate(Record):
    """A complete plan to try, and how to build a training run by it."""

    settings: dict[str, Scalar]
    """What differs from the planner's own answer, by the plan's names; empty: nothing does."""
    plan: Plan
    task: TaskSpec
    """`factory(plan, **arguments)` returns a trial.Setup, or a tuple like one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial(Record):
    """What came of a candidate. Failures are records as well."""

    settings: dict[str, Scalar]
    status: Status
    samples_per_second: Interval | None = None
    """The median over the timed steps."""
    tokens_per_second: Interval | None = None
    """Of the data, without filler and padding."""
    peak_memory_gib: float | None = None
    """Allocated on the GPU in the timed steps, or held by the process where there is none. CUDA
    graphs take theirs while they are recorded, so with them it is that of all steps."""
    peak_reserved_gib: float | None = None
    step_seconds: tuple[float, ...] = ()
    """Of every timed step, in their order; none is left out."""
    step_samples: tuple[int, ...] = ()
    """Sequences of each of them."""
    first_steps_seconds: float | None = None
    """Of the first two steps, in which the compiler works."""
    seconds: float = 0.0
    """Of the whole trial, with building the model."""
    note: str = ""
    """Why it was skipped or failed, or what else to know."""
    rung: int = 0
    """Of the search: those that did well are tried again, longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneResult(Record):
    """The best that was found, and every trial behind it, those that failed included."""

    best: Plan
    """With what was measured, and a reason for each setting that the measuring changed."""
    trials: tuple[Trial, ...]
    seconds: float
    changes: dict[str, Scalar] = field(default_factory=dict)
    """What the best has other than the planner's own answer."""
    samples_per_second: Interval | None = None
    """Of the best, over all its trials; None where nothing could be measured."""
    planned_samples_per_second: Interval | None = None
    """Of the planner's own answer."""
    ended: Literal["finished", "time is up", "interrupted"] = "finished"
    notes: tuple[str, ...] = ()
    """What spoiled the measuring: the GPU was held back, or shared."""

    @property
    def gain(self) -> float | None:
        """How many times as fast as the planner's own answer."""
        if self.samples_per_second is None or self.planned_samples_per_second is None:
            return None
        return self.samples_per_second.value / self.planned_samples_per_second.value


def folder_prefix(process: int) -> str:
    """How the folder of a trial begins: what a process that is killed leaves, another can find."""
    return f"trainfit-trial-{process}-"


_BINS = 32
_ALIKE = 0.15
"""Histograms that differ by less are of like data: another seed, another fold."""
_NO_MATTER = ("seed", "eval_batch_size")
"""Pins that do not decide how fast a step is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept(Record):
    """A result and all that it depends on."""

    identity: dict[str, Any]
    """What the job is: its file is found by this."""
    lengths: tuple[float, ...]
    """Of the data, as a histogram; another fold of the same data has nearly the same."""
    circumstances: dict[str, Any]
    """What else must not have changed since."""
    result: TuneResult


def identity(question: Question, profile: HardwareProfile, ranks: int) -> dict[str, Any]:
    """The job, the settings that were pinned, and the device."""
    workload = question.workload
    pins = {
        name: pin.value
        for name, pin in sorted(question.pins.items())
        if pin.origin != "default" and name not in _NO_MATTER
    }
    return {
        "task": question.task,
        "model": question.arguments,
        "device": device_name(profile),
        "max_length": workload.max_length,
        "effective_batch_size": workload.effective_batch_size,
        "method": workload.method,
        "ranks": ranks,
        "pins": pins,
    }


def circumstances(question: Question, profile: HardwareProfile) -> dict[str, Any]:
    """What may change under the same job: drivers, libraries, our own code, a model's folder."""
    config = folder_content(question.arguments)
    return {
        "driver": profile.driver,
        "cores": profile.cpu.cores,
        "memory_gib": round(profile.gpus[0].memory_gib, 1) if profile.gpus else None,
        "libraries": caches.libraries(),
        "sources": caches.sources(),
        "config": hashlib.sha256(config.encode()).hexdigest() if config else None,
    }


def histogram(lengths: Sequence[int], longest: int) -> tuple[float, ...]:
    """The share of sequences by length: it says how the data is packed, and nothing else of it."""
    counts, _ = np.histogram(np.asarray(lengths), bins=_BINS, range=(0, longest + 1))
    return tuple(round(float(count) / max(len(lengths), 1), 4) for count in counts)


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The share of sequences that would have to be of another length; 1 where nothing is alike."""
    if len(one) != len(other):
        return 1.0
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2


def read(question: Question, profile: HardwareProfile, ranks: int = 1) -> TuneResult | None:
    """What was found for this job here, or None; one that cannot be used is told in a warning."""
    named = _plain(identity(question, profile, ranks))
    lengths = _histogram(question)
    for path in sorted(_folder().glob(f"{_digest(named)}-*.json")):
        kept = caches.read(Kept, path)
        if kept is None:
            continue
        if distance(kept.lengths, lengths) > _ALIKE:
            continue  # other data
        now = _plain(circumstances(question, profile))
        changed = [key for key, value in now.items() if kept.circumstances.get(key) != value]
        if not changed and kept.identity == named:
            return kept.result
        what = ", ".join(changed) or "the job"
        _warn(f"what was tuned before is stale and was ignored (changed since: {what})")
    return None


def write(
    question: Question, profile: HardwareProfile, result: TuneResult, ranks: int = 1
) -> Path | None:
    """Keep a result for `train`; None, with a warning, where the cache cannot be written."""
    kept = Kept(
        identity=identity(question, profile, ranks),
        lengths=_histogram(question),
        circumstances=circumstances(question, profile),
        result=result,
    )
    path = place(kept.identity, kept.lengths)
    return path if caches.write(path, kept) else None


def place(named: dict[str, Any], lengths: Sequence[float]) -> Path:
    """The file of a job on data of such lengths."""
    return _folder() / f"{_digest(_plain(named))}-{_digest(list(lengths))[:8]}.json"


def _folder() -> Path:
    return cache_folder() / "tuned"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _histogram(question: Question) -> tuple[float, ...]:
    return histogram(question.workload.lengths, question.workload.max_length)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    plain: dict[str, Any] = json.loads(codec.dumps(values, indent=None))
    return plain


def _warn(text: str) -> None:
    warnings.warn(text, TrainfitWarning, stacklevel=3)
