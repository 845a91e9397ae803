"""Faults of signs.yaml, findings that are shown, and checks that find them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from trainfit.core.records import Record

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""Worst first. An info is worth knowing, and nothing is wrong."""
BUSY = 80
"""Percent of the time that a GPU should work, and of its memory that training should use."""
IDLE = 70
"""Percent of the time below which the guides call for a change."""
GUIDE_MFU = 15.0
"""Percent: the tuning guide calls an MFU good from here on in most setups."""

F = TypeVar("F")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(Record):
    """A fault that was found: title, evidence, reason and steps."""

    id: str
    severity: Severity
    title: str
    evidence: str
    why: str
    mend: str
    """The steps in the order to try them, numbered where there are several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Evidence of a fault; a field that is None is as the fault says."""

    evidence: str
    severity: Severity | None = None
    title: str | None = None
    fix: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Title, reason and steps of a fault, whether or not it was found."""

    id: str
    severity: Severity
    title: str
    why: str
    fix: tuple[str, ...]

    def finding(self, seen: Seen) -> Finding:
        """Combine the fault with the evidence."""
        return Finding(
            id=self.id,
            severity=seen.severity or self.severity,
            title=seen.title or self.title,
            evidence=seen.evidence,
            why=self.why,
            mend=numbered(self.fix if seen.fix is None else seen.fix),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Check(Generic[F]):
    """A fault, and the pure function over facts that finds it."""

    fault: Fault
    look: Callable[[F], Iterable[Seen]]

    def __call__(self, facts: F) -> Iterator[Finding]:
        """Yield a finding for each piece of evidence in the facts."""
        return (self.fault.finding(seen) for seen in self.look(facts))


@cache
def tables() -> Mapping[str, Any]:
    """The contents of signs.yaml."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it is built
    text = Path(__file__).with_name("signs.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = yaml.load(text, loader)
    return found


def fault(row: Mapping[str, Any]) -> Fault:
    """The fault of a row of signs.yaml."""
    names = ("id", "severity", "title", "why")
    return Fault(fix=tuple(_flat(row["fix"])), **{name: row[name] for name in names})


def steps(name: str) -> tuple[str, ...]:
    """A shared step, or shared list of steps, of signs.yaml."""
    return tuple(_flat([tables()["shared"][name]]))


def _flat(steps: Iterable[Any]) -> Iterator[str]:
    for step in steps:
        if isinstance(step, str):
            yield step
        else:
            yield from _flat(step)


def checks(
    section: str,
    looks: Mapping[str, Any],
    otherwise: Callable[[Fault, F], Iterable[Seen]] | None = None,
) -> tuple[Check[F], ...]:
    """One check for each fault of a section: the function of its name, or else `otherwise`."""
    made = []
    for one in map(fault, tables()[section]):
        look = looks.get(one.id)
        if look is None:
            assert otherwise is not None, f"no function looks for {one.id}"
            look = lambda facts, one=one: otherwise(one, facts)  # noqa: E731  it has no docstring
        made.append(Check(fault=one, look=look))
    return tuple(made)


def numbered(steps: Sequence[str]) -> str:
    """The steps as one text."""
    if len(steps) == 1:
        return steps[0]
    return "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort by severity, worst first; findings of one severity keep their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def is_healthy(findings: Iterable[Finding]) -> bool:
    """True where nothing is wrong."""
    return all(finding.severity == "info" for finding in findings)
