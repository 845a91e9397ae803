"""Hyperparameter search: trials over folds under one memory plan, by one worker or many.

The only package that imports Optuna. A study lives in a database (storage.py). A worker claims a
trial (trial_queue.py), trains its folds (workers.py) and records how it ended; a worker that dies
leaves the trial to the next. The way through a command: studies.py, workers.py or side_by_side.py,
outcome.py.
"""

import sys
from types import ModuleType
from typing import Any


class _Search(ModuleType):
    """The package itself can be called: `trainfit.hpo("nli", "hpo.trials=20")`."""

    def __call__(self, task: Any, *overrides: str) -> Any:
        """Search the settings of a job with one worker; return a StudyResult with the best trial.

        The same call continues a study where it was left.
        """
        from trainfit.core.libraries import HPO, need

        need("hpo", *HPO)
        from trainfit.hpo.outcome import search

        return search(task, *overrides)


sys.modules[__name__].__class__ = _Search
