"""Helpers of other folders, by their names."""

import sys
from pathlib import Path

for folder in ("tuning", "tasks"):
    sys.path.append(str(Path(__file__).parent.parent / folder))
