"""Records of a verdict: a judgement, and the rule of the receipt that makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from trainfit.core.records import Scalar
from trainfit.measuring.trace import Evidence


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


class ReceiptRule(NamedTuple):
    """An item of the receipt."""

    title: str
    judge: Callable[[Scalar, Evidence], Judgement | str]
    elsewhere: str = ""
    """Reason why it does not apply without a GPU."""
