"""Measure candidate settings with the engine's own loop, and choose by what was measured.

tuner.py does it all for a task: candidates.py says what to try (by plans of space.py), trial.py
runs a candidate, children.py runs it in a process of its own, search.py chooses under a time
budget, conclusion.py makes a plan of it, and cache.py keeps it. finder.py finds the largest batch
that fits, ladder.py measures what each optimization gives.
"""
