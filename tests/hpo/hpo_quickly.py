"""`trainfit` with plans that are made at once: python hpo_quickly.py hpo nli …"""

import sys
from pathlib import Path

import pytest

from job_tiny import be_quick
from trainfit.cli.main import run
from trainfit.hpo import fleet

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        be_quick(patch)
        patch.setattr(fleet, "COMMAND", (sys.executable, str(Path(__file__))))
        code = run(sys.argv[1:])
    sys.exit(code)
