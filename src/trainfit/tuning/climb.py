"""climb: measure each optimization between a naive loop and the plan.

Every row is a trial of the engine's own loop in a child process, on the same sequences in steps of
the same size. The rows are timed in rounds while time is left, so that a drift of the machine
affects all alike; the baseline ends each round and shows the drift. Each optimization is also
removed alone from the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal

from trainfit.core.errors import BadInput, did_you_mean
from trainfit.core.plan_records import Plan, TaskSpec
from trainfit.core.records import HardwareProfile
from trainfit.measuring.timing import ratio_interval
from trainfit.tuning.children import Children, RunTrial, mode_of
from trainfit.tuning.rungs import (
    BASELINE,
    NAIVE_FACTORY,
    Ladder,
    LadderRow,
    LadderStep,
    Naive,
    NotApplicable,
    Rung,
    rungs_for,
    setting,
)
from trainfit.tuning.tuned_cache import Interval, Trial

__all__ = ["BASELINE", "MINUTES", "Ladder", "LadderStep", "NotApplicable", "climb"]

MINUTES = 10.0
"""Default time budget; a round takes seven minutes on an H200 for a base model."""
_TRIAL_SECONDS = 2.0
"""Seconds of timed steps per trial; further rounds add more."""
_WARM_UP = {False: 2, True: 4}
"""Untimed steps by `compile`; CUDA graphs are recorded in the third."""
_MANY_PARTS = 8
"""Micro-batches from which one eager step is enough warm-up."""
_LIMIT = 180.0
"""Seconds after which a trial is killed."""


def climb(
    best: Plan,
    task: TaskSpec,
    profile: HardwareProfile,
    *,
    title: str = "",
    no_liger: str | None = None,
    removals_only: bool = False,
    only: Sequence[str] = (),
    minutes: float = MINUTES,
    rounds: int = 3,
    steps: int = 20,
    run: RunTrial | None = None,
    watch: Callable[[LadderStep], None] = lambda _step: None,
) -> Ladder:
    """Measure every optimization between a naive loop and `best` within `minutes`.

    `task` is the factory of trials; `no_liger` is why Liger has no kernels for the model, if so.
    With `removals_only` only the best and its removals are measured; with `only`, only the rows of
    these names. `watch` gets a row after each of its trials. Ctrl-C ends with the rows so far.
    """
    if not minutes > 0 or rounds < 1:
        raise BadInput(f"minutes is {minutes}, rounds {rounds}", "give more than 0, 1 or more")
    rungs, unfit = rungs_for(best, profile, no_liger)
    names = [rung.name for rung in rungs]
    for name in set(only) - set(names):
        known = f"use one of {', '.join(names)}"
        raise BadInput(f"the ladder has no row {name!r} here", did_you_mean(name, names, known))
    with ExitStack() as stack:
        if run is None:
            modules = [
                factory.partition(":")[0] for factory in (task.check().factory, NAIVE_FACTORY)
            ]
            children = stack.enter_context(Children(modules))
            children.start(_modes(best, rungs))
            run = children.run

        def one_trial(row: LadderRow, left: float) -> Trial:
            return run(
                row.candidate(task, best),
                steps=steps,
                warm_up=_warm_up(row.plan),
                limit=min(left, _LIMIT),
                most_seconds=_TRIAL_SECONDS,
            )

        ascent = _Ascent(best=best, run=one_trial, seconds=60 * minutes, watch=watch)
        facts = Ladder(
            title=title,
            device=profile.gpus[0].name if profile.gpus else profile.cpu.name,
            torch=profile.torch.version if profile.torch else "",
            taken=time.strftime("%Y-%m-%d"),
            samples_per_step=best.effective_batch_size,
            steps=(),
            not_applicable=unfit,
        )
        try:
            ascent.first_round(rungs, removals_only, only)
            for _ in range(rounds - 1):
                ascent.another_round()
        except KeyboardInterrupt:
            ascent.ended = "interrupted"
        return ascent.fill(facts)


@dataclass(kw_only=True, slots=True)
class _Ascent:
    """State of a climb: its rows so far."""

    best: Plan
    run: Callable[[LadderRow, float], Trial]
    seconds: float
    watch: Callable[[LadderStep], None]
    began: float = field(default_factory=lambda: time.monotonic())
    rows: list[LadderRow] = field(default_factory=list)
    without: list[LadderRow] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)
    """Seconds of the shortest trial, by compile mode."""
    rounds: int = 0
    ended: Literal["finished", "time is up", "interrupted"] = "finished"

    def first_round(self, rungs: Sequence[Rung], removals_only: bool, only: Sequence[str]) -> None:
        """Measure all rows once: the climb and the removals, or a part of them."""
        self.rounds += 1
        if only:
            self.pick(rungs, only)
            return
        if removals_only:
            kept = [rung for rung in rungs if not rung.trades]
            top = self.row("the best", "with all of them", kept)
            self.rows.append(top)
            self.measure(top)
        else:
            kept, top = self.climb(rungs)
        self.remove_each(kept, top)
        self.measure(self.rows[0])

    def pick(self, rungs: Sequence[Rung], only: Sequence[str]) -> None:
        """Measure the rows named by `only`, each compared with the row before if measured."""
        kept: list[Rung] = []
        top: LadderRow | None = None
        for rung in rungs:
            row = self.row(rung.name, rung.what, (*kept, rung), top, rung)
            if rung.name in only:
                self.rows.append(row)
                self.measure(row)
                row.kept, row.note = _verdict(rung, row, planned=True)
            if not rung.trades:
                kept.append(rung)
                top = row if rung.name in only else None

    def climb(self, rungs: Sequence[Rung]) -> tuple[list[Rung], LadderRow]:
        """Climb from the baseline; return the rungs that were kept and the last row."""
        described = _describe(*setting(self.best, ()))
        top = self.row(BASELINE, described, ())
        self.rows.append(top)
        self.measure(top)
        kept: list[Rung] = []
        for rung in rungs:
            row = self.row(rung.name, rung.what, (*kept, rung), top, rung)
            self.rows.append(row)
            missing = set(rung.needs) - {one.name for one in kept}
            if missing:
                row.kept, row.note = False, f"it needs {' and '.join(sorted(missing))}"
                continue
            self.measure(row)
            planned = rung.is_in(self.best)
            if not planned and not rung.trades and _is_slower(row):  # time it again
                self.measure(top)
                self.measure(row)
            row.kept, row.note = _verdict(rung, row, planned)
            if row.kept:
                kept.append(rung)
                top = row
        return kept, top

    def remove_each(self, kept: Sequence[Rung], top: LadderRow) -> None:
        """Measure the best without each rung, largest gain first, since time may run out."""
        gains = {row.name: gain.value for row in self.rows if (gain := row.gain()) is not None}

        def gave(rung: Rung) -> tuple[float, int]:
            return gains.get(rung.name, 1.0), kept.index(rung)

        for rung in sorted(kept, key=gave, reverse=True):
            if any(rung.name in one.replaces for one in kept):
                continue
            gone = [one for one in kept if one is rung or rung.name in one.needs]
            left = [one for one in kept if one not in gone]
            names = " and ".join(one.name for one in gone)
            self.without.append(self.row(rung.name, f"without {names}", left, top, rung))
            self.measure(self.without[-1])

    def another_round(self) -> None:
        """Measure every successful row again."""
        if self.ended != "finished":
            return
        self.rounds += 1
        for row in (*self.rows, *self.without, self.rows[0]):
            if row.good:
                self.measure(row)

    def measure(self, row: LadderRow) -> None:
        """Time a row once more; one about the start of epochs after its twin without the change."""
        if row.twin is not None:
            self.try_once(row.twin)
        if self.try_once(row):
            self.watch(row.step(self.baseline(), self.best))

    def try_once(self, row: LadderRow) -> bool:
        """Run a trial if it would end in time; tell if the row has a new result."""
        mode, started = mode_of(row.plan), time.monotonic()
        left = self.began + self.seconds - started
        guess = self.costs.get(mode, max(self.costs.values(), default=0.0))
        trial = self.run(row, left) if left > guess else None
        spent = time.monotonic() - started
        if trial is None or (trial.status == "hung" and spent >= left):
            self.ended = "time is up"
            if row.trials:
                return False
            note = "there was no time left for it"
            trial = Trial(settings={}, status="skipped", note=note, seconds=spent)
        elif trial.status == "ok":
            self.costs[mode] = min(spent, self.costs.get(mode, spent))
        row.trials.append(trial)
        return True

    def row(
        self,
        name: str,
        what: str,
        rungs: Sequence[Rung],
        before: LadderRow | None = None,
        changed: Rung | None = None,
    ) -> LadderRow:
        """Make the row of the baseline with these rungs, to be compared with `before`."""
        plan, naive = setting(self.best, rungs)
        row = LadderRow(name=name, what=what, plan=plan, naive=naive, before=before)
        if before is not None and changed is not None and changed.between_epochs:
            row.naive = replace(naive, epoch_steps=1)
            short = replace(before.naive, epoch_steps=1)
            row.twin = LadderRow(name=before.name, what="", plan=before.plan, naive=short)
            sequences = self.best.workload.sequences
            row.epoch_steps = max(1, math.ceil(sequences / self.best.effective_batch_size))
        return row

    def baseline(self) -> list[list[float]]:
        """Rates to compare with: those of the first row that could be measured."""
        if self.rows[0].name != BASELINE:
            return []
        return next((found for row in self.rows if (found := row.rates())), [])

    def fill(self, facts: Ladder) -> Ladder:
        """Record of all rows so far."""
        rates = self.baseline()
        for row in self.rows:
            if row.kept and len(row.good) > 1 and _is_slower(row):  # once may be chance
                row.note = "slower on its own, and what follows builds on it"
        return replace(
            facts,
            steps=tuple(row.step(rates, self.best) for row in self.rows),
            without=tuple(row.step(rates, self.best) for row in self.without),
            drift=_drift(self.rows[0]),
            rounds=self.rounds,
            seconds=time.monotonic() - self.began,
            ended=self.ended,
        )


def _describe(plan: Plan, naive: Naive) -> str:
    """Describe the baseline, given its plan and habits."""
    parts = [
        "fp32 without TF32",
        "eager attention" if naive.eager else "the model's own attention",
        "AdamW weight by weight",
        "gradients zeroed",
        f"{plan.batch_size} of {plan.effective_batch_size} sequences at a time",
        *(["in random order, padded to the longest of them"] if naive.shuffled else []),
        "no loader process",
        "unpinned",
    ]
    return ", ".join(parts)


def _modes(best: Plan, rungs: Sequence[Rung]) -> list[str]:
    """Compile modes of the rows, whose processes can start together."""
    alone = [mode_of(setting(best, (rung,))[0]) for rung in rungs]
    return list(dict.fromkeys([mode_of(setting(best, ())[0]), *alone]))


def _warm_up(plan: Plan) -> int:
    if not plan.compile and plan.gradient_accumulation_steps >= _MANY_PARTS:
        return 1
    return _WARM_UP[plan.compile]


def _verdict(rung: Rung, row: LadderRow, planned: bool) -> tuple[bool, str]:
    """Tell if later rows include the rung, and the note where they do not."""
    if rung.trades:
        return False, "nothing is built on it"
    if row.status == "skipped":
        return False, ""
    if not row.good:
        # Where no row has run yet, a later rung may make it fit.
        return row.before is not None and not row.before.good, ""
    # A rung that is slower alone may be needed by others: packing needs half precision.
    if planned or not _is_slower(row):
        return True, ""
    return False, "slower here, so it is left out of what follows"


def _is_slower(row: LadderRow) -> bool:
    """Tell if the whole interval of its gain is below 1."""
    gain = row.gain()
    return gain is not None and gain.high < 1


def _drift(baseline: LadderRow) -> Interval | None:
    """Rate of the baseline's last trial relative to its first."""
    if len(baseline.good) < 2:
        return None
    rates = baseline.rates()
    return ratio_interval(rates[-1:], rates[:1])
