"""Measure candidate settings with the engine's own loop, and choose by what was measured.

tuner.py runs a whole search: candidates.py proposes plans, trial.py times one, children.py runs it
in a process of its own, search.py chooses within a time budget, tuned_cache.py stores the result.
finder.py finds the largest batch that fits, climb.py measures the gain of each optimization.
"""
