"""Whether torch.compile pays: what it costs once against what it saves every step."""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.planning import decisions
from trainfit.planning.question import Choice, Question
from trainfit.records import Gpu, HardwareProfile, TimeEstimate

COMPILE_SECONDS = 60.0
"""What compiling an encoder cost on the recorded GPU, warm-up included."""
SPEEDUP = 1.25
"""The least that it gained there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiling:
    """The choice, and the time of the run with it."""

    choice: Choice
    time: TimeEstimate | None


def decide_compile(
    question: Question, profile: HardwareProfile, gpu: Gpu | None, time: TimeEstimate | None
) -> Compiling:
    """Compile where the machine can and the run is long enough to pay it back."""
    choice = decisions.pinned(question, "compile") or _choice(profile, gpu, time)
    return Compiling(choice=choice, time=time)


def _choice(profile: HardwareProfile, gpu: Gpu | None, time: TimeEstimate | None) -> Choice:
    if gpu is None or gpu.vendor == "apple":
        return Choice(value=False, why="compiling pays on CUDA and ROCm GPUs")
    missing = profile.compile.missing(gpu=True)
    if missing and not profile.simulated:
        return Choice(value=False, why=f"it would fail here: {' and '.join(missing)} missing")
    if time is None or time.total_seconds is None:
        return Choice(value=False, why="how long the run takes is not known; try it with tune")
    saved = time.total_seconds * (1 - 1 / SPEEDUP)
    if saved <= COMPILE_SECONDS:
        return Choice(
            value=False,
            why=f"it would save about {saved:.0f} s and cost about {COMPILE_SECONDS:.0f} s",
            alternatives=("true",),
        )
    return Choice(
        value=True,
        why=f"it saves at least {saved:.0f} s of the run and costs about {COMPILE_SECONDS:.0f} s",
        alternatives=("false",),
    )
