"""Choice of torch.compile: its cost at the start against the time saved in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainfit.core.records import Gpu, HardwareProfile
from trainfit.planning import decide
from trainfit.planning.estimator.estimate import GIB
from trainfit.planning.fit import Candidate
from trainfit.planning.question import Choice, Question

COMPILE_SECONDS = 25.0
"""Cost of the first steps on the recorded GPU: 2 to 24 s per model, with a cold cache."""
_WORTH = 1.02
"""Least gain in speed; a smaller one is within the noise of the estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiling:
    """The choice, and the resulting candidate."""

    choice: Choice
    candidate: Candidate
    fits: bool


def decide_compile(
    question: Question,
    profile: HardwareProfile,
    gpu: Gpu | None,
    eager: Candidate,
    fits: bool,
    compiled: Callable[[], Candidate] | None,
    steps: float,
) -> Compiling:
    """Compile where the machine can, the step still fits, and the run is long enough."""
    off = Compiling(choice=Choice(value=False, why=""), candidate=eager, fits=fits)
    pin = decide.pinned(question, "compile")
    reason = _obstacle(profile, gpu)
    if pin is not None and not pin.value:
        return Compiling(choice=pin, candidate=eager, fits=fits)
    if compiled is None:
        return _because(off, "GPUs are compared without it")
    if pin is None and reason is None and eager.seconds is not None:
        most = steps * eager.seconds / 2  # no recorded step became twice as fast
        if most < COMPILE_SECONDS:
            reason = f"the run is too short to pay it back (about {COMPILE_SECONDS:.0f} s)"
    if pin is None and reason is not None:
        return _because(off, reason)
    if gpu is None:  # pinned: the estimator knows CUDA's compiled code alone
        return Compiling(choice=pin or Choice(value=True, why=""), candidate=eager, fits=fits)
    candidate = compiled()
    still = bool(candidate.taken.fits)
    if pin is not None:
        return Compiling(choice=pin, candidate=candidate, fits=still)
    if fits and not still:
        need = candidate.taken.peak_allocated / GIB
        return _because(off, f"compiled, the step would need {need:.1f} GiB")
    return _weighed(off, candidate, still, steps)


def _weighed(off: Compiling, candidate: Candidate, fits: bool, steps: float) -> Compiling:
    eager = off.candidate
    if eager.seconds is None or candidate.seconds is None:
        return _because(off, "how fast it would be is not known; measure it")
    gain = eager.seconds / candidate.seconds
    saved = steps * (eager.seconds - candidate.seconds)
    if saved <= COMPILE_SECONDS or gain < _WORTH:
        return _because(
            off, f"it would save {max(saved, 0):.0f} s and cost {COMPILE_SECONDS:.0f} s"
        )
    choice = Choice(
        value=True,
        why=f"{gain:.2f} times as fast; saves {saved:,.0f} s of the run",
        alternatives=(f"false: {eager.taken.peak_allocated / GIB:.1f} GiB",),
    )
    return Compiling(choice=choice, candidate=candidate, fits=fits)


def may_compile(question: Question, profile: HardwareProfile, gpu: Gpu | None) -> bool:
    """Tell if `decide_compile` will consider compiling."""
    pin = decide.pinned(question, "compile")
    return gpu is not None and (
        bool(pin.value) if pin is not None else _obstacle(profile, gpu) is None
    )


def _obstacle(profile: HardwareProfile, gpu: Gpu | None) -> str | None:
    if gpu is None or gpu.vendor == "apple":
        return "compiling pays on CUDA and ROCm GPUs"
    missing = profile.compile.missing(gpu=True)
    if missing and not profile.simulated:
        return f"it would fail here: {' and '.join(missing)} missing"
    return None


def _because(off: Compiling, why: str) -> Compiling:
    return Compiling(
        choice=Choice(value=False, why=why, alternatives=("true",)),
        candidate=off.candidate,
        fits=off.fits,
    )
