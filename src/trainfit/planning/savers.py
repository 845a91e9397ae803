"""Settings that save memory, taken where a step does not fit otherwise, the cheapest first.

A finer cut and checkpointing come before all of them (cuts.py). Then those that leave what is
learned as it is are taken, and those that change it only where nothing else fits. The method is
never changed: full fine-tuning does not become LoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import isfinite
from typing import Literal, TypeAlias

from trainfit.core.plan_records import MemoryEstimate, Plan, shown
from trainfit.core.records import HardwareProfile, Scalar
from trainfit.core.settings import BY_NAME
from trainfit.planning.decide import OFFLOADED, optimizer
from trainfit.planning.question import Pin, Question
from trainfit.planning.sharding import is_asked, is_shared

_HOST_SHARE = 0.8
"""Share of the host's free memory that may be used for what the GPU has no room for."""
WORTH_TRYING = 0.03
"""Share of the capacity from which on a part of the memory is worth making smaller."""
WORTH_SAYING = 0.05
"""Share of the capacity from which on a saving is named beside a setting."""


@dataclass(frozen=True, slots=True)
class Saver:
    """A value of a setting that saves memory, and its price."""

    setting: str
    value: Scalar
    part: Literal["weights", "optimizer", "activations"]
    """Part of the memory that it makes smaller."""
    share: float
    """Share of that part that it saves at most."""
    price: str
    """Its cost in words."""
    learns: bool = False
    """It changes what is learned; False: it costs time alone."""
    adapters_only: bool = False
    """It is for weights that are not trained."""
    beside: str = ""
    """Setting beside which it is named where it was not asked for."""
    on_host: bool = False
    """The host's memory holds what it saves."""

    @property
    def word(self) -> str:
        """The setting as a word of a command."""
        return f"{self.setting}={shown(self.value)}"


SAVERS = (
    Saver(
        "offload_activations", True, "activations", 1.0, on_host=True,
        price="activations wait for the backward pass in the host's memory",
    ),
    Saver(
        "offload_optimizer", True, "optimizer", 1.0, on_host=True, beside="optimizer",
        price="the states are kept in the host's memory",
    ),
    Saver(
        "optimizer", "adamw_bf16", "optimizer", 0.5, learns=True,
        price="moments are rounded stochastically to bf16",
    ),
    Saver(
        "optimizer", "adamw_8bit", "optimizer", 0.75, learns=True,
        price="moments are rounded to 8 bits, block by block",
    ),
    Saver(
        "quantization", "int8", "weights", 0.5, learns=True, adapters_only=True,
        price="weights that are not trained are rounded to 8 bits",
    ),
    Saver(
        "quantization", "nf4", "weights", 0.75, learns=True, adapters_only=True,
        price="weights that are not trained are rounded to 4 bits",
    ),
)  # fmt: skip
"""Savers in the order in which they are tried."""


def saver_settings(*, adapters: bool) -> tuple[str, ...]:
    """Settings of the savers; `adapters`: weights that are not trained may be rounded."""
    names = (saver.setting for saver in SAVERS if adapters or not saver.adapters_only)
    return tuple(dict.fromkeys(names))


Combination: TypeAlias = tuple[Saver, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A combination of savers, and the plan with it."""

    taken: Combination
    plan: Plan

    @property
    def seconds(self) -> float:
        """Time of a step; infinite where it is not known."""
        time = self.plan.time
        return float("inf") if time is None or time.step_seconds is None else time.step_seconds


def cheapest(
    question: Question,
    profile: HardwareProfile,
    plan: Callable[[Question], Plan],
    ranks: int = 1,
) -> Plan:
    """Plan without savers, or else with those that cost the least.

    Of combinations that change learning alike and have as many savers, the fastest is taken.
    `ranks` of this machine share its memory.
    """
    base = plan(question)
    if base.fits or base.memory is None or base.device != "cuda":
        return base
    tried: list[Attempt] = []
    chosen: Attempt | None = None
    open_ = able(question, profile, base.memory, ranks)
    host = _host_gib(profile, ranks)

    def attempt(taken: Combination) -> Attempt:
        return Attempt(taken=taken, plan=plan(_pinned(question, taken)))

    for together in groups(open_, base.memory):
        group = [one for one in together if _held_there(one, base.memory) <= host]
        if not group:
            continue
        learns = any(saver.learns for saver in group[0])
        if chosen is not None and not learns:
            continue
        made = [attempt(one) for one in group]
        tried += made
        if chosen is None:
            fitting = (one for one in made if one.plan.fits)
            chosen = min(fitting, key=lambda one: one.seconds, default=None)
        if chosen is not None and learns:  # perhaps tried for its time alone
            break
    if chosen is None:
        return base
    tried += [attempt((saver,)) for saver in _next_values(chosen, open_)]
    return _explained(chosen, base, tried)


def _next_values(chosen: Attempt, savers: Sequence[Saver]) -> list[Saver]:
    """Values of the weights' setting that save more: their time is worth knowing."""
    names = {saver.setting for saver in chosen.taken if saver.part == "weights"}
    values = [saver for saver in savers if saver.setting in names]
    return [saver for saver in values if all(saver.share > one.share for one in chosen.taken)]


def able(
    question: Question, profile: HardwareProfile, memory: MemoryEstimate, ranks: int = 1
) -> tuple[Saver, ...]:
    """Savers that the job, the machine with its `ranks` and the user leave open."""
    host = _host_gib(profile, ranks)
    return tuple(
        saver
        for saver in SAVERS
        if _is_open(question, saver)
        and _part(memory, saver) >= WORTH_TRYING * memory.capacity_gib
        and _held_there((saver,), memory) <= host
    )


def _host_gib(profile: HardwareProfile, ranks: int) -> float:
    """GiB of the host's memory for each rank; of a machine elsewhere nothing is known."""
    free = float("inf") if profile.simulated else profile.memory_available_gib
    return _HOST_SHARE * free / ranks


def _held_there(taken: Combination, memory: MemoryEstimate) -> float:
    """GiB that a rank's savers keep in the host's memory."""
    return sum(_part(memory, saver) for saver in taken if saver.on_host)


def _is_open(question: Question, saver: Saver) -> bool:
    pin = question.pins.get(saver.setting)
    if pin is not None and pin.origin != "default":
        return False
    if saver.setting == "offload_optimizer" and optimizer(question).value not in OFFLOADED:
        return False
    if is_asked(question) and not is_shared(saver.setting, saver.value):
        return False
    frozen = question.workload.method != "full"
    return saver.setting in question.savers and (frozen or not saver.adapters_only)


def groups(savers: Sequence[Saver], memory: MemoryEstimate) -> Iterator[tuple[Combination, ...]]:
    """Yield combinations that may save enough, in the order in which they are tried.

    Those of one group change what is learned alike and are weighed by their time.
    """
    missing = memory.peak_allocated_gib - memory.capacity_gib
    plain = [saver for saver in savers if not saver.learns]
    for changed in _changes(savers):
        for count in range(len(plain) + 1):
            group = tuple(
                (*others, *changed)
                for others in combinations(plain, count)
                if _adds_up((*others, *changed), memory, missing)
            )
            if group:
                yield group


def _changes(savers: Sequence[Saver]) -> list[Combination]:
    """Sets of savers that change the training's result, the mildest first."""
    learned = [saver for saver in savers if saver.learns]
    names = dict.fromkeys(saver.setting for saver in learned)
    options = [[None, *(s for s in learned if s.setting == name)] for name in reversed(names)]
    return [tuple(s for s in reversed(one) if s is not None) for one in product(*options)]


def _adds_up(taken: Combination, memory: MemoryEstimate, missing: float) -> bool:
    """Tell if savers of different parts can together save the missing memory.

    An update has the weights, all gradients and the states at once, whatever activations take.
    """
    parts = [saver.part for saver in taken]
    if not taken or len(set(parts)) < len(parts):
        return False
    saved = {saver.part: _part(memory, saver) * saver.share for saver in taken}
    held = memory.weights_gib + memory.adapters_gib + memory.gradients_gib + memory.optimizer_gib
    held -= sum(saved.values()) - saved.get("activations", 0.0)
    return sum(saved.values()) >= missing and held <= memory.capacity_gib


def _part(memory: MemoryEstimate, saver: Saver) -> float:
    return float(getattr(memory, f"{saver.part}_gib"))


def _pinned(question: Question, taken: Combination) -> Question:
    pins = {s.setting: Pin(value=s.value, origin=s.price) for s in taken}
    return replace(question, pins=question.pins | pins)


def savers_of(plan: Plan) -> tuple[Saver, ...]:
    """Savers that a plan has, whoever chose them."""
    return tuple(saver for saver in SAVERS if BY_NAME[saver.setting].of(plan) == saver.value)


def count_savers(plan: Plan) -> int:
    """Number of savers that a plan has, whoever chose them."""
    return len(savers_of(plan))


# ── words ─────────────────────────────────────────────────────────────────────────────────────


def _explained(chosen: Attempt, base: Plan, tried: Sequence[Attempt]) -> Plan:
    """Word for each saver that was taken how much it saves, and how the others did."""
    taken = {saver.setting: saver for saver in chosen.taken}
    reasons = tuple(
        replace(
            reason,
            why=_why(taken[reason.setting], chosen.plan, base, reason.why),
            alternatives=_others(taken[reason.setting], chosen, base, tried),
        )
        if reason.setting in taken
        else reason
        for reason in chosen.plan.reasons
    )
    return replace(chosen.plan, reasons=reasons)


def _why(saver: Saver, made: Plan, base: Plan, cost: str) -> str:
    assert made.memory is not None
    assert base.memory is not None
    saved = _part(base.memory, saver) - _part(made.memory, saver)
    # A plan that fits may have larger micro-batches, with more activations.
    figure = f": saves {saved:.1f} GiB" if saved >= 0.05 else ""
    return f"does not fit otherwise{figure}; {cost}"


def _others(saver: Saver, chosen: Attempt, base: Plan, tried: Sequence[Attempt]) -> tuple[str, ...]:
    """Say what the setting's former value needs, how others did, and what untried ones save."""
    memory = base.memory
    assert memory is not None
    former = shown(BY_NAME[saver.setting].of(base))
    rivals = [one for one in tried if one is not chosen]
    seen = {other for one in tried for other in one.taken}
    return (
        f"{former}: needs {_need(memory):.1f} GiB",
        *(_compared(one, chosen, saver.setting) for one in rivals),
        *(
            f"{shown(other.value)}: would save about {_part(memory, other) * other.share:.1f} GiB"
            for other in SAVERS
            if other.setting == saver.setting and other not in seen
        ),
    )


def _need(memory: MemoryEstimate) -> float:
    """Missing memory: allocated, or reserved where gaps between segments decide."""
    allocated = memory.peak_allocated_gib
    return allocated if allocated > memory.capacity_gib else memory.peak_reserved_gib


def _compared(other: Attempt, chosen: Attempt, setting: str) -> str:
    memory = other.plan.memory
    assert memory is not None
    alone = len(other.taken) == 1 and other.taken[0].setting == setting
    words = " ".join(shown(s.value) if alone else s.word for s in other.taken)
    if not other.plan.fits:
        return f"{words}: needs {_need(memory):.1f} GiB"
    known = isfinite(other.seconds) and isfinite(chosen.seconds)
    change = f"{other.seconds / chosen.seconds - 1:+.0%} time" if known else "fits too"
    prices = [saver.price for saver in other.taken if saver.learns]
    return ", ".join([f"{words}: {memory.peak_allocated_gib:.1f} GiB", change, *prices])


def savings(question: Question, setting: str, memory: MemoryEstimate) -> tuple[str, ...]:
    """Word how much other values of a setting would save, by the bytes that they take alone."""
    if memory.bound:
        return ()
    return tuple(
        f"{shown(saver.value) if saver.setting == setting else saver.word}: "
        f"would save about {saved:.1f} GiB; {saver.price}"
        for saver in SAVERS
        if setting in (saver.setting, saver.beside)
        and _is_open(question, saver)
        and (saved := _part(memory, saver) * saver.share) >= WORTH_SAYING * memory.capacity_gib
    )
