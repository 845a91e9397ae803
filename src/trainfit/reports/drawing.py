"""What every picture is drawn with: text, a round axis, the frame and the colours of both modes.

The SVG is written here, so that a picture needs no further package and asks nobody for anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-size: 16px; font-weight: 600; }
.small { font-size: 11px; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.back { fill: #ffffff; }
.grid { stroke: #d0d7de; stroke-width: 1; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .back { fill: #0d1117; }
  .grid { stroke: #30363d; }
}
"""


def picture(width: int, height: int, title: str, style: str, body: Iterable[str]) -> str:
    """The SVG; its colours follow the reader's light or dark setting."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escaped(title)}">',
            f"<style>{_STYLE.strip()}\n{style.strip()}\n</style>",
            f'<rect class="back" width="{width}" height="{height}"/>',
            *body,
            "</svg>\n",
        ]
    )


def text_at(x: float, y: float, content: str, kind: str) -> str:
    """A text of the classes `kind`."""
    return f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}">{escaped(content)}</text>'


def escaped(text: str) -> str:
    """Text for XML, which knows no control characters, not even escaped ones."""
    return escape("".join(c if c.isprintable() else " " for c in text))


def axis_top(value: float) -> float:
    """The next round number that leaves about five lines under it."""
    step = _tick(value)
    return math.ceil(value / step) * step


def ticks(top: float) -> list[float]:
    """From 0 to the top of an axis."""
    step = _tick(top)
    return [n * step for n in range(round(top / step) + 1)]


def _tick(value: float) -> float:
    rough = value / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
