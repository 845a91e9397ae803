"""The doctor: finds faults of a machine, a log or a run, and the steps that fix them.

    examine(gather())                 the machine, as it is now
    read_log(Path("train.log"))       a log, of trainfit or anything else on torch
    examine_run(Path("runs/…"))       a run folder: what was planned against what happened

signs.yaml has all faults with their texts and the signs in logs. A check is a small pure function
over facts gathered beforehand. docs/troubleshooting.md is made from both.
"""

import sys
from pathlib import Path
from types import ModuleType

from trainfit.core.errors import BadInput
from trainfit.doctor.finding import Finding, MachineFacts, gather, is_healthy
from trainfit.doctor.machine_checks import examine
from trainfit.doctor.run_checks import examine_run
from trainfit.doctor.signs import diagnose_text, read_log

__all__ = [
    "Finding",
    "MachineFacts",
    "diagnose_text",
    "examine",
    "examine_run",
    "gather",
    "is_healthy",
    "read_log",
]


class _Doctor(ModuleType):
    """The package itself can be called: `trainfit.doctor()`."""

    def __call__(
        self, *, log: str | Path | None = None, run: str | Path | type | None = None
    ) -> tuple[Finding, ...]:
        """Find the faults of this machine, of a log or of a run, the worst first."""
        from trainfit.runs import run_folder

        if not isinstance(log, str | Path | None):
            raise BadInput(f"the log is {log!r}", "give the path of a text file")
        if log is not None:
            return read_log(Path(log))
        if run is not None:
            return examine_run(run_folder.find(run, Path("runs")))
        return examine(gather())


sys.modules[__name__].__class__ = _Doctor
