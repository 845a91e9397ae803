"""trainfit fits a training run to the hardware it is on.

The public names are loaded when they are first used: `import trainfit` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.conf import compose as compose
    from trainfit.hardware import as_if as as_if
    from trainfit.hardware import detect as detect
    from trainfit.hardware.catalogue import lookup as lookup
    from trainfit.jobs.batch_size import find_batch_size as find_batch_size
    from trainfit.jobs.job import Job as Job
    from trainfit.jobs.job import tunable as tunable
    from trainfit.jobs.job_plan import plan as plan
    from trainfit.jobs.recommended import recommend as recommend
    from trainfit.measuring import measure as measure
    from trainfit.measuring.observe import observe as observe
    from trainfit.planning import estimate as estimate
    from trainfit.runtime import applied as applied
    from trainfit.runtime import apply as apply
    from trainfit.runtime import undo as undo

__version__ = "0.1.0"

_HOMES = {
    "applied": "trainfit.runtime",
    "apply": "trainfit.runtime",
    "as_if": "trainfit.hardware",
    "compose": "trainfit.conf",
    "detect": "trainfit.hardware",
    "estimate": "trainfit.planning",
    "Job": "trainfit.jobs.job",
    "find_batch_size": "trainfit.jobs.batch_size",
    "tunable": "trainfit.jobs.job",
    "lookup": "trainfit.hardware.catalogue",
    "measure": "trainfit.measuring",
    "observe": "trainfit.measuring.observe",
    "plan": "trainfit.jobs.job_plan",
    "recommend": "trainfit.jobs.recommended",
    "report": "trainfit.reports.run_report",
    "undo": "trainfit.runtime",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainfit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
