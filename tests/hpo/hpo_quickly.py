"""`trainfit` with plans that are made at once: python hpo_quickly.py hpo nli …

BESIDE in the environment is the number of trials side by side, as if there were a GPU for them.
"""

import os
import sys
from pathlib import Path

import pytest

from job_tiny import be_quick
from trainfit.cli.main import run
from trainfit.hpo import fleet, side_by_side
from trainfit.hpo.objective import GpuShare

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        be_quick(patch)
        patch.setattr(fleet, "COMMAND", (sys.executable, str(Path(__file__))))
        count = int(os.environ.get("BESIDE", "1"))
        patch.setattr(side_by_side, "plan_workers", lambda *_: (count, GpuShare(share=1 / count)))
        code = run(sys.argv[1:])
    sys.exit(code)
