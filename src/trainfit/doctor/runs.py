"""Every check of a run, and its log beside them."""

from __future__ import annotations

from pathlib import Path

from trainfit.doctor import run_events, run_memory, run_speed
from trainfit.doctor.finding import Check, Finding, worst_first
from trainfit.doctor.logs import read_log
from trainfit.doctor.run_facts import RunFacts, parts, read_run

CHECKS: tuple[Check[RunFacts], ...] = (
    *run_events.CHECKS,
    *run_speed.CHECKS,
    *run_memory.CHECKS,
)
_IN_NUMBERS = frozenset({"trainfit_oom", "nan_loss", "low_mfu"})
"""What the run's own numbers and events tell better than its log."""


def examine_run(folder: Path) -> tuple[Finding, ...]:
    """What went wrong, or could go better, in a run; what several folds share is said once."""
    findings: dict[tuple[str, str], Finding] = {}
    for part in parts(folder):
        facts = read_run(part, folder)
        found = [finding for check in CHECKS for finding in check(facts)]
        found += [f for f in read_log(part / "train.log") if f.id not in _IN_NUMBERS]
        for finding in found:
            findings.setdefault((finding.id, finding.title), finding)
    return worst_first(findings.values())
