"""Numbers given as options: finite, and within bounds that the work can keep to."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A finite number within bounds; click's own range takes nan."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number, or an error that names the option and the bounds."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


SEED = click.IntRange(0, 2**32 - 1)
MANY = click.IntRange(1, 10**6)
ABOVE_0 = Number(0, 10**6, min_open=True)
