"""trainfit fits a training run to the hardware it is on.

The public names are loaded when they are first used: `import trainfit` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit import doctor as doctor
    from trainfit import hpo as hpo
    from trainfit.api import check as check
    from trainfit.api import predict as predict
    from trainfit.api import train as train
    from trainfit.api import tune as tune
    from trainfit.api import verify as verify
    from trainfit.conf import compose as compose
    from trainfit.core.errors import BadConfig as BadConfig
    from trainfit.core.errors import BadInput as BadInput
    from trainfit.core.errors import OutOfMemory as OutOfMemory
    from trainfit.core.errors import RunFailed as RunFailed
    from trainfit.core.errors import TrainfitError as TrainfitError
    from trainfit.core.errors import TrainfitWarning as TrainfitWarning
    from trainfit.hardware import as_if as as_if
    from trainfit.hardware import detect as detect
    from trainfit.hardware.catalogue import lookup as lookup
    from trainfit.integrations.speeding import padded as padded
    from trainfit.integrations.speeding import speed_up as speed_up
    from trainfit.integrations.speeding import unpadded as unpadded
    from trainfit.jobs.job_plan import plan as plan
    from trainfit.jobs.registry import Job as Job
    from trainfit.jobs.registry import tunable as tunable
    from trainfit.jobs.tuned_plans import find_batch_size as find_batch_size
    from trainfit.jobs.tuned_plans import recommend as recommend
    from trainfit.measuring import measure as measure
    from trainfit.measuring.observe import observe as observe
    from trainfit.planning import estimate as estimate
    from trainfit.reports.run_report import report as report
    from trainfit.runtime import applied as applied
    from trainfit.runtime import apply as apply
    from trainfit.runtime import undo as undo

__version__ = "0.1.0"

_HOMES = {
    "BadConfig": "trainfit.core.errors",
    "BadInput": "trainfit.core.errors",
    "Job": "trainfit.jobs.registry",
    "OutOfMemory": "trainfit.core.errors",
    "RunFailed": "trainfit.core.errors",
    "TrainfitError": "trainfit.core.errors",
    "TrainfitWarning": "trainfit.core.errors",
    "applied": "trainfit.runtime",
    "apply": "trainfit.runtime",
    "as_if": "trainfit.hardware",
    "check": "trainfit.api",
    "compose": "trainfit.conf",
    "detect": "trainfit.hardware",
    "estimate": "trainfit.planning",
    "find_batch_size": "trainfit.jobs.tuned_plans",
    "lookup": "trainfit.hardware.catalogue",
    "measure": "trainfit.measuring",
    "observe": "trainfit.measuring.observe",
    "padded": "trainfit.integrations.speeding",
    "plan": "trainfit.jobs.job_plan",
    "predict": "trainfit.api",
    "recommend": "trainfit.jobs.tuned_plans",
    "report": "trainfit.reports.run_report",
    "speed_up": "trainfit.integrations.speeding",
    "train": "trainfit.api",
    "tunable": "trainfit.jobs.registry",
    "tune": "trainfit.api",
    "undo": "trainfit.runtime",
    "unpadded": "trainfit.integrations.speeding",
    "verify": "trainfit.api",
}
_PACKAGES = ("doctor", "hpo")
"""Packages that can be called."""
__all__ = ["__version__", *_HOMES, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"trainfit.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'trainfit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
