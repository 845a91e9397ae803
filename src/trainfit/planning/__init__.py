"""From what the machine is to what to set, each with a reason."""

from trainfit.planning.recommendation import preset_for_memory, recommend, workers

__all__ = ["preset_for_memory", "recommend", "workers"]
