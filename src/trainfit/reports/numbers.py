"""Numbers as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from trainfit.records import Scalar
from trainfit.reports.figures import Form
from trainfit.reports.plan import duration

MISSING = "–"


def shown(value: float | None, form: Form) -> str:
    """A number of a plot, with its unit."""
    if value is None or not math.isfinite(value):
        return MISSING
    return _FORMS[form](value)


def cell(value: Scalar) -> str:
    """A value of a table."""
    if value is None or isinstance(value, bool):
        return {None: MISSING, True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return plain(value) if isinstance(value, float) else value


def plain(value: float) -> str:
    """Four digits, without an exponent where one can read it without."""
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}" if size < 1e7 else _short(value)
    if size < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-")
    digits = max(0, 3 - math.floor(math.log10(size)))
    return f"{value:.{min(digits, 4)}f}"


def tick(value: float, form: Form) -> str:
    """A number beside an axis, as short as can be."""
    if form == "percent":
        return f"{value * 100:.4g}%"
    if form == "duration":
        return duration(value) if value else "0"
    suffix = {"gib": "", "celsius": "°", "watts": " W"}.get(form, "")
    if value == 0:
        return f"0{suffix}"
    if abs(value) >= 10_000:
        return _short(value) + suffix
    if abs(value) < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-") + suffix
    return f"{value:,.6g}" + suffix


def _short(value: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{name}"
    return f"{value:.4g}"


_FORMS: Mapping[Form, Callable[[float], str]] = {
    "number": plain,
    "percent": lambda value: f"{value:.1%}",
    "count": lambda value: f"{value:,.0f}",
    "gib": lambda value: f"{value:.2f} GiB" if value >= 0.1 else f"{value * 1024:.1f} MiB",
    "duration": duration,
    "celsius": lambda value: f"{value:.0f} °C",
    "watts": lambda value: f"{value:.0f} W",
}
