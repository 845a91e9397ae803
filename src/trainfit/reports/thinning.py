"""Fewer points that look the same: of each stretch of a line, its lowest and its highest point.

A plot is some hundred pixels wide, and a run may log a hundred thousand steps. A mean over a
stretch would hide the one spike that a person looks for.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STRETCHES = 300
"""Two points each, which is more than a plot has pixels to tell apart."""


def thin(x: Floats, y: Floats, stretches: int = STRETCHES) -> tuple[Floats, Floats]:
    """At most `2 * stretches + 2` points of a line, with its ends and all of its extremes."""
    if len(x) <= 2 * stretches:
        return x, y
    kept = {0, len(x) - 1}
    bounds = np.linspace(0, len(x), stretches + 1).astype(int)
    for start, end in pairwise(bounds):
        part = y[start:end]
        finite = np.flatnonzero(np.isfinite(part))
        if not finite.size:
            kept.add(int(start))  # a gap stays one
            continue
        kept.add(int(start + finite[part[finite].argmin()]))
        kept.add(int(start + finite[part[finite].argmax()]))
    chosen = np.array(sorted(kept))
    return x[chosen], y[chosen]
