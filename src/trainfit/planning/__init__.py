"""From what the machine is to what to set, each with a reason; and what a step would take."""

from trainfit.planning.memory import estimate
from trainfit.planning.rules import preset_for, preset_for_memory, workers

__all__ = ["estimate", "preset_for", "preset_for_memory", "workers"]
