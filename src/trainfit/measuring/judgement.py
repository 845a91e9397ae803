"""The judgement of a receipt's verdict."""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.core.records import Scalar


@dataclass(frozen=True, slots=True)
class Judgement:
    """Observed value of a setting, with its evidence and the fix where it is not as requested."""

    observed: Scalar
    evidence: str
    fix: str = ""
    right: bool | None = None
    """False if the observation is not as requested; None: compare the values."""
    on: bool | None = None
    """True if the optimization is on; None: the observed value says so."""
