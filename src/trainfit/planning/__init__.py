"""Plans: every setting for a machine, each with a reason, and estimates of memory and time."""

from trainfit.planning.estimator.estimate import estimate
from trainfit.planning.question import preset_for, preset_for_memory, workers

__all__ = ["estimate", "preset_for", "preset_for_memory", "workers"]
