"""tune: plan, try, choose and keep, for the trials of any task."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from trainfit.errors import BadInput
from trainfit.measuring import remembered
from trainfit.measuring.sampling import sampled
from trainfit.planning import planner
from trainfit.planning.question import Pin, Question
from trainfit.records import HardwareProfile, Plan, Scalar, TaskSpec
from trainfit.tuning import cache
from trainfit.tuning.candidates import Variant, neighbours, promising
from trainfit.tuning.children import Children
from trainfit.tuning.conclusion import conclude
from trainfit.tuning.records import Candidate, Trial, TuneResult
from trainfit.tuning.search import search
from trainfit.tuning.space import Ask, Space, differences

MINUTES = 3.0


def tune(
    question: Question,
    profile: HardwareProfile,
    task: TaskSpec,
    *,
    ask: Ask | None = None,
    ranks: int = 1,
    minutes: float = MINUTES,
    tell: Callable[[Trial], None] = lambda _trial: None,
    keep: bool = True,
) -> TuneResult:
    """Measure for so many minutes, planning included.

    `task` is the factory of trials: `factory(plan, **arguments)` makes a trial.Setup. The planner
    is asked about `question` by its probe, or by `ask`. With `keep` the result is found again by
    the same question on the same machine.
    """
    if not minutes > 0:
        raise BadInput(f"minutes is {minutes:g}", "give a number above 0")
    ask = ask or partial(_ask, question, profile, ranks)
    began = time.monotonic()
    with _children(profile, task) as children, sampled() as samples:
        base = ask({})
        if not base.fits:
            advice = base.advice[0] if base.advice else "take a smaller model"
            raise BadInput("the job does not fit this machine", advice)
        space = Space(question=question, profile=profile, base=base, ask=ask)
        make = partial(_candidate, base, task)
        found = search(
            [make(Variant(plan=base)), *map(make, promising(space))],
            lambda winner: map(make, neighbours(space, winner.plan)),
            children.run,
            seconds=minutes * 60 - (time.monotonic() - began),
            tell=tell,
        )
    held_back = [text for text in samples.notices() if "held back" in text]
    result = conclude(base, found, time.monotonic() - began, held_back)
    if keep and result.samples_per_second is not None:
        cache.write(question, profile, result, ranks)
    return result


def _ask(
    question: Question, profile: HardwareProfile, ranks: int, pins: Mapping[str, Scalar]
) -> Plan:
    decided = pinned(question, pins)
    return planner.plan(decided, profile, ranks=ranks, measured=remembered(profile))


def pinned(question: Question, pins: Mapping[str, Scalar]) -> Question:
    """The question with these settings decided."""
    decided = {name: Pin(value=value, origin="tune") for name, value in pins.items()}
    return replace(question, pins=question.pins | decided)


def _candidate(base: Plan, task: TaskSpec, variant: Variant) -> Candidate | Trial:
    """A variant as something to run, or as the record of why it is not run."""
    settings = differences(base, variant.plan)
    if variant.skipped:
        return Trial(settings=settings, status="skipped", note=variant.skipped)
    return Candidate(settings=settings, plan=variant.plan, task=task)


def _children(profile: HardwareProfile, task: TaskSpec) -> Children:
    """Processes on their way: they import while the planner plans."""
    children = Children([task.check().factory.partition(":")[0]])
    compiles = bool(profile.gpus) and not profile.compile.missing(gpu=True)
    children.start(["eager", *(["default"] if compiles else [])])
    return children
