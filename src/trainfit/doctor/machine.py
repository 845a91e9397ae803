"""Every check of the machine, in the order a person would go through them."""

from __future__ import annotations

from trainfit.doctor import gpu_checks, host_checks, noted
from trainfit.doctor.facts import Facts
from trainfit.doctor.finding import Check, Finding, worst_first

CHECKS: tuple[Check[Facts], ...] = (*noted.CHECKS, *gpu_checks.CHECKS, *host_checks.CHECKS)


def examine(facts: Facts) -> tuple[Finding, ...]:
    """What is wrong with the machine, worst first."""
    return worst_first(finding for check in CHECKS for finding in check(facts))
