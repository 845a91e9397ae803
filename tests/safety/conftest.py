"""Helpers of other folders, by their names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tuning"))
