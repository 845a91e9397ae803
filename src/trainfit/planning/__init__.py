"""From what the machine is to what to set, each with a reason; and what a step would take."""

from trainfit.planning.estimator.estimate import estimate
from trainfit.planning.question import preset_for, preset_for_memory, workers

__all__ = ["estimate", "preset_for", "preset_for_memory", "workers"]
