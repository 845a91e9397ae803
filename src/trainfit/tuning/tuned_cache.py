"""Records of tune, and the cache of its results.

A cache file holds the result and everything it depends on. A result of another driver, model or
version of trainfit is ignored with a warning; a damaged file is removed with one.
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
from trainfit.core.files import cache_folder, text_facts
from trainfit.core.plan_records import Plan, TaskSpec
from trainfit.core.records import HardwareProfile, Record, Scalar
from trainfit.measuring.machine_rates import device_name
from trainfit.measuring.timing import Interval as Interval
from trainfit.planning.estimator.depths import folder_content
from trainfit.planning.question import Question

Status = Literal["ok", "oom", "crashed", "hung", "failed", "skipped"]

NOTHING_MEASURED = "nothing could be measured"
"""Note of a result without any rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialCandidate(Record):
    """A complete plan to time, and the factory that builds its training run."""

    settings: dict[str, Scalar]
    """Settings that differ from the planner's own plan; empty for that plan itself."""
    plan: Plan
    task: TaskSpec
    """`factory(plan, **arguments)` returns a trial.Setup, or a tuple like one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial(Record):
    """Outcome of timing a candidate; a failure is an outcome too."""

    settings: dict[str, Scalar]
    status: Status
    samples_per_second: Interval | None = None
    """Median over the timed steps, with a 95% interval."""
    tokens_per_second: Interval | None = None
    """Tokens of the data, without filler and padding."""
    peak_memory_gib: float | None = None
    """Peak allocated on the GPU in the timed steps, or resident memory without a GPU.

    CUDA graphs allocate while they are recorded, so with them the untimed steps count too.
    """
    peak_reserved_gib: float | None = None
    step_seconds: tuple[float, ...] = ()
    """Seconds of every timed step, in order."""
    step_samples: tuple[int, ...] = ()
    """Sequences of every timed step."""
    first_steps_seconds: float | None = None
    """Seconds of the first two steps, in which the compiler works."""
    seconds: float = 0.0
    """Seconds of the whole trial, including the building of the model."""
    note: str = ""
    """Reason of a skip or failure, or a warning."""
    rung: int = 0
    """Rung of the search; later rungs time the better candidates longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneResult(Record):
    """Best plan that was measured, and all trials, failed ones included."""

    best: Plan
    """Plan with its measurements, and a reason for each setting that changed."""
    trials: tuple[Trial, ...]
    seconds: float
    changes: dict[str, Scalar] = field(default_factory=dict)
    """Settings in which the best differs from the planner's own plan."""
    samples_per_second: Interval | None = None
    """Rate of the best over all its trials; None where nothing could be measured."""
    planned_samples_per_second: Interval | None = None
    """Rate of the planner's own plan."""
    ended: Literal["finished", "time is up", "interrupted"] = "finished"
    notes: tuple[str, ...] = ()
    """Notes on what disturbed the measurement, such as a throttled GPU."""

    @property
    def gain(self) -> float | None:
        """Speed relative to the planner's own plan; 1.2 is 20% faster."""
        if self.samples_per_second is None or self.planned_samples_per_second is None:
            return None
        return self.samples_per_second.value / self.planned_samples_per_second.value

    def __repr__(self) -> str:
        """Gain and changed settings for a terminal."""
        speed = "no speed" if self.gain is None else f"{self.gain:.2f} times the planned speed"
        count = len(self.trials)
        title = f"{count} {'trial' if count == 1 else 'trials'} in {self.seconds:.0f} s: {speed}"
        return text_facts(title, self.changes)


def folder_prefix(process: int) -> str:
    """Prefix of a trial's temporary folders, by which the parent removes a killed child's."""
    return f"trainfit-trial-{process}-"


_BINS = 32
_ALIKE = 0.15
"""Largest distance of two histograms of similar data, such as two folds."""
_NO_MATTER = ("seed", "eval_batch_size")
"""Pins that do not change the speed of a training step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept(Record):
    """A result and everything it depends on."""

    identity: dict[str, Any]
    """Description of the job; its hash names the file."""
    lengths: tuple[float, ...]
    """Histogram of the sequence lengths, which differs little between folds."""
    circumstances: dict[str, Any]
    """Versions and hardware that must be unchanged for the result to be valid."""
    result: TuneResult


def identity(question: Question, profile: HardwareProfile, ranks: int) -> dict[str, Any]:
    """Description of the job, its pinned settings and the device."""
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
    """Driver, libraries, trainfit's source and model folder that a result depends on."""
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
    """Share of sequences per length bin: enough to know how the data packs, and no more."""
    counts, _ = np.histogram(np.asarray(lengths), bins=_BINS, range=(0, longest + 1))
    return tuple(round(float(count) / max(len(lengths), 1), 4) for count in counts)


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Share of sequences that fall into other bins, from 0 (alike) to 1."""
    if len(one) != len(other):
        return 1.0
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2


def read(question: Question, profile: HardwareProfile, ranks: int = 1) -> TuneResult | None:
    """Result stored for this job, or None; a stale one is ignored with a warning."""
    named = _plain(identity(question, profile, ranks))
    lengths = _histogram(question)
    for path in sorted(_folder().glob(f"{_digest(named)}-*.json")):
        kept = caches.read(Kept, path)
        if kept is None or distance(kept.lengths, lengths) > _ALIKE:
            continue  # damaged, or a result for other data
        now = _plain(circumstances(question, profile))
        changed = [key for key, value in now.items() if kept.circumstances.get(key) != value]
        if not changed and kept.identity == named:
            return kept.result
        what = ", ".join(changed) or "the job"
        text = f"what was tuned before is stale and was ignored (changed since: {what})"
        warnings.warn(text, TrainfitWarning, stacklevel=2)
    return None


def write(
    question: Question, profile: HardwareProfile, result: TuneResult, ranks: int = 1
) -> Path | None:
    """Store a result for `train`; None, with a warning, where the cache cannot be written."""
    kept = Kept(
        identity=identity(question, profile, ranks),
        lengths=_histogram(question),
        circumstances=circumstances(question, profile),
        result=result,
    )
    path = place(kept.identity, kept.lengths)
    return path if caches.write(path, kept) else None


def place(named: dict[str, Any], lengths: Sequence[float]) -> Path:
    """Path of a job's file for data with this histogram."""
    return _folder() / f"{_digest(_plain(named))}-{_digest(list(lengths))[:8]}.json"


def _folder() -> Path:
    return cache_folder() / "tuned"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _histogram(question: Question) -> tuple[float, ...]:
    return histogram(question.workload.lengths, question.workload.max_length)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Convert values to the form in which JSON returns them."""
    plain: dict[str, Any] = json.loads(codec.dumps(values, indent=None))
    return plain
