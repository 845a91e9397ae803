"""`trainfit` with plans that are made at once: python hpo_quickly.py hpo nli …

BESIDE in the environment is the number of trials side by side, as if there were a GPU for them.
PAUSE is the number of seconds that each micro-batch takes longer, so that a signal meets a trial.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from job_tiny import be_quick
from trainfit.cli.main import run
from trainfit.hpo import side_by_side, workers
from trainfit.hpo.objective import GpuShare
from trainfit.jobs.classification import ClassifierTask

_loss = ClassifierTask.loss


def slow_loss(*arguments: Any) -> Any:
    time.sleep(float(os.environ["PAUSE"]))
    return _loss(*arguments)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        be_quick(patch)
        patch.setattr(workers, "COMMAND", (sys.executable, str(Path(__file__))))
        count = int(os.environ.get("BESIDE", "1"))
        patch.setattr(side_by_side, "plan_workers", lambda *_: (count, GpuShare(share=1 / count)))
        if "PAUSE" in os.environ:
            patch.setattr(ClassifierTask, "loss", slow_loss)
        code = run(sys.argv[1:])
    sys.exit(code)
