"""Memory against batch size as a picture: a bar per batch size, and the line of the capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from trainfit.errors import BadInput
from trainfit.files import check_output, write_output
from trainfit.records import MemoryEstimate
from trainfit.reports.drawing import axis_top, picture, text_at, ticks

Point = tuple[int, MemoryEstimate]

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 84, 52
_LABEL = 30  # the width that a number needs
_PARTS = ("weights", "optimizer", "gradients", "activations", "rest")
_STYLE = """
.capacity { stroke: #cf222e; stroke-width: 2; stroke-dasharray: 6 4; }
.chosen { fill: none; stroke: #1f2328; stroke-width: 2; }
.weights { fill: #2f6fb5; }
.optimizer { fill: #8a63c9; }
.gradients { fill: #d98324; }
.activations { fill: #2e9461; }
.rest { fill: #8b949e; }
.over { opacity: 0.4; }
@media (prefers-color-scheme: dark) {
  .capacity { stroke: #ff7b72; }
  .chosen { stroke: #e6edf3; }
}
"""


def memory_plot(
    points: Sequence[Point], capacity_gib: float, chosen: int | None, title: str
) -> str:
    """The picture as SVG; `chosen` is the batch size that the plan has, one of the points'."""
    points = sorted(points, key=lambda point: point[0])
    sizes = [size for size, _ in points]
    if not points or (chosen is not None and chosen not in sizes):
        raise ValueError(f"the points are at {sizes}, and the chosen one at {chosen}")
    top = axis_top(max(capacity_gib, *(memory.peak_reserved_gib for _, memory in points)) * 1.05)
    pitch = (WIDTH - LEFT - RIGHT) / len(points)
    every = math.ceil(_LABEL / pitch)
    body = [text_at(LEFT, 26, title, "title"), *_legend(capacity_gib), *_grid(top)]
    for index, (size, memory) in enumerate(points):
        middle, peak = LEFT + pitch * (index + 0.5), memory.peak_reserved_gib
        width = min(pitch * 0.7, 64)
        body += _bar(memory, middle, width, top)
        if size == chosen:
            body += _frame(middle, width, _y(peak, top))
        if size == chosen or index % every == 0:
            body.append(text_at(middle, _y(peak, top) - 6, f"{peak:.1f}", "small middle"))
            body.append(text_at(middle, HEIGHT - BOTTOM + 18, str(size), "middle"))
    body.append(_line(_y(capacity_gib, top), "capacity"))
    body.append(text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "batch size", "middle"))
    return picture(WIDTH, HEIGHT, title, _STYLE, body)


def write_plot(path: Path, svg: str) -> None:
    """Write the picture whole; a PNG needs the optional package cairosvg."""
    check_plot(path)
    content = svg if path.suffix.lower() == ".svg" else _png(svg)
    write_output(path, content, "give another --plot")


def check_plot(path: Path) -> None:
    """Raise BadInput where no picture can be written, before anything is planned."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise BadInput(f"cannot draw into {path}", "give a file that ends in .svg or .png")
    check_output(path, "give another --plot")


def parts_at_peak(memory: MemoryEstimate) -> dict[str, float]:
    """What peak reserved memory is made of, in the order of the bars; the parts add up to it.

    Gradients come as activations go, so only those count that are there at the peak.
    """
    weights = memory.weights_gib + memory.adapters_gib
    lasting = weights + memory.optimizer_gib + memory.workspace_gib
    room = memory.peak_allocated_gib - lasting - memory.activations_gib
    parts = {
        "weights": weights,
        "optimizer": memory.optimizer_gib,
        "gradients": min(max(room, 0.0), memory.gradients_gib),
        "activations": memory.activations_gib,
    }
    left = memory.peak_reserved_gib
    for name, size in parts.items():
        parts[name] = min(size, left)
        left -= parts[name]
    return {**parts, "rest": left}


def _png(svg: str) -> bytes:
    try:
        import cairosvg
    except (ImportError, OSError):  # OSError: the package is there, the cairo library is not
        raise BadInput(
            "a PNG needs cairosvg, which is not here",
            "pip install cairosvg, or give a file that ends in .svg",
        ) from None
    picture: bytes = cairosvg.svg2png(bytestring=svg.encode(), scale=2)
    return picture


def _y(gib: float, top: float) -> float:
    return HEIGHT - BOTTOM - gib / top * (HEIGHT - TOP - BOTTOM)


def _bar(memory: MemoryEstimate, middle: float, width: float, top: float) -> list[str]:
    base, drawn = 0.0, []
    faded = "" if memory.fits else " over"
    for name, gib in parts_at_peak(memory).items():
        y, height = _y(base + gib, top), _y(base, top) - _y(base + gib, top)
        drawn.append(
            f'<rect class="{name}{faded}" x="{middle - width / 2:.2f}" y="{y:.2f}" '
            f'width="{width:.2f}" height="{height:.2f}"><title>{name} {gib:.2f} GiB</title></rect>'
        )
        base += gib
    return drawn


def _frame(middle: float, width: float, y: float) -> list[str]:
    frame = (
        f'<rect class="chosen" x="{middle - width / 2 - 3:.2f}" y="{y - 3:.2f}" '
        f'width="{width + 6:.2f}" height="{HEIGHT - BOTTOM - y + 3:.2f}"/>'
    )
    return [frame, text_at(middle, y - 20, "chosen", "small middle")]


def _grid(top: float) -> list[str]:
    drawn = []
    for value in ticks(top):
        drawn.append(_line(_y(value, top), "grid"))
        drawn.append(text_at(LEFT - 8, _y(value, top) + 4, f"{value:g}", "small end"))
    return [*drawn, text_at(LEFT - 8, TOP - 12, "GiB", "small end")]


def _legend(capacity_gib: float) -> list[str]:
    drawn = []
    for index, name in enumerate(_PARTS):
        x = LEFT + index * 104
        drawn.append(f'<rect class="{name}" x="{x}" y="42" width="12" height="12"/>')
        drawn.append(text_at(x + 18, 52, name, "small"))
    x = LEFT + len(_PARTS) * 104 - 30
    drawn.append(f'<path class="capacity" d="M{x} 48h22"/>')
    return [*drawn, text_at(x + 28, 52, f"capacity {capacity_gib:.1f} GiB", "small")]


def _line(y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{LEFT}" y1="{y:.2f}" x2="{WIDTH - RIGHT}" y2="{y:.2f}"/>'
