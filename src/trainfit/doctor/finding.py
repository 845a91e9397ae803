"""What the doctor says of one fault, and what a check is: both are data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from trainfit.core.records import Record

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""Worst first. An info is worth knowing, and nothing is wrong."""

F = TypeVar("F")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(Record):
    """One fault: what, how it shows, why it matters, and what to do."""

    id: str
    severity: Severity
    title: str
    evidence: str
    why: str
    mend: str
    """The steps in the order to try them, numbered where there are several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A fault as it was found; what is None is as the check says."""

    evidence: str
    severity: Severity | None = None
    title: str | None = None
    mend: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is known of a fault before anything is looked at: the page is made from this."""

    id: str
    severity: Severity
    title: str
    why: str
    mend: tuple[str, ...]

    def finding(self, seen: Seen) -> Finding:
        """The fault as it was seen."""
        return Finding(
            id=self.id,
            severity=seen.severity or self.severity,
            title=seen.title or self.title,
            evidence=seen.evidence,
            why=self.why,
            mend=numbered(self.mend if seen.mend is None else seen.mend),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Check(Generic[F]):
    """A fault, and the pure function over the facts that finds it."""

    fault: Fault
    look: Callable[[F], Iterable[Seen]]

    def __call__(self, facts: F) -> Iterator[Finding]:
        """What is found in these facts."""
        return (self.fault.finding(seen) for seen in self.look(facts))


def check(
    fault: Fault,
) -> Callable[[Callable[[F], Iterable[Seen]]], Check[F]]:
    """Make a function that looks for `fault` a check."""
    return lambda look: Check(fault=fault, look=look)


def numbered(steps: Sequence[str]) -> str:
    """The steps as one text."""
    if len(steps) == 1:
        return steps[0]
    return "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors, then warnings, then what is only worth knowing; else in their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether nothing is wrong."""
    return all(finding.severity == "info" for finding in findings)
