"""Text of docs/troubleshooting.md, from the doctor's signs.yaml and checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainfit.doctor import machine_checks, run_checks
from trainfit.doctor.finding import Check, Fault
from trainfit.doctor.signs import patterns

_HEAD = """\
# Troubleshooting

Made from the checks of [`trainfit doctor`](doctor.md); do not edit. `trainfit doctor` looks for the
faults of the machine, `trainfit doctor --log FILE` for those in a log, `trainfit doctor --run RUN`
for those of a run. The steps are in the order to try them; `key=value` words go after
`trainfit train TASK`.
"""
_OWN = ("The finding has the command for the machine.",)
"""Steps of a fault that detection notes with the machine's own command."""


def troubleshooting() -> str:
    """The page."""
    parts = [_HEAD]
    parts.append(_section("The machine", _with_looks(machine_checks.CHECKS)))
    parts.append(
        _section("A log", ((pattern.fault, f"Like: `{pattern.like}`") for pattern in patterns()))
    )
    parts.append(_section("A run", _with_looks(run_checks.CHECKS)))
    return "\n".join(parts)


def _with_looks(checks: Iterable[Check[Any]]) -> Iterable[tuple[Fault, str]]:
    for check in checks:
        text = (getattr(check.look, "__doc__", None) or "").split("\n")[0]
        yield check.fault, f"Looked at: {text[0].lower()}{text[1:]}" if text else ""


def _section(title: str, faults: Iterable[tuple[Fault, str]]) -> str:
    return f"## {title}\n\n" + "\n".join(_fault(fault, look) for fault, look in faults)


def _fault(fault: Fault, look: str) -> str:
    lines = [f"### {fault.title}", "", f"`{fault.id}`, {fault.severity}. {fault.why}", ""]
    if look:
        lines += [look, ""]
    lines += [f"{number}. {step}" for number, step in enumerate(fault.fix or _OWN, 1)]
    return "\n".join(lines) + "\n"
