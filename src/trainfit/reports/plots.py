"""Pictures as SVG files: memory against batch size, and the ladder of optimizations.

Axes are those of the report's plots (geometry.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from trainfit.core.errors import BadInput
from trainfit.core.files import check_output, write_output
from trainfit.core.plan_records import MemoryEstimate
from trainfit.reports.geometry import PlotAxis, linear
from trainfit.reports.model import shown
from trainfit.tuning.rungs import Ladder, LadderStep

_LINES = 5
"""Approximate number of grid lines of an axis."""


def picture(width: int, height: int, title: str, style: str, body: Iterable[str]) -> str:
    """A whole SVG; its colours follow the reader's light or dark setting."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escaped(title)}">',
            f"<style>{css('picture')}\n{style.strip()}\n</style>",
            f'<rect class="back" width="{width}" height="{height}"/>',
            *body,
            "</svg>\n",
        ]
    )


def css(name: str) -> str:
    """Style sheet of a kind of picture."""
    place = resources.files(__package__).joinpath("html", f"{name}.css")
    return place.read_text(encoding="utf-8").strip()


def text_at(x: float, y: float, content: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}">{escaped(content)}</text>'


def escaped(text: str) -> str:
    """Text for XML, which allows no control characters, not even escaped ones."""
    return escape("".join(c if c.isprintable() else " " for c in text))


def _rect(kind: str, x: float, y: float, width: float, height: float, title: str = "") -> str:
    hover = f"<title>{escaped(title)}</title>" if title else ""
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}">'
        f"{hover}</rect>"
    )


Point = tuple[int, MemoryEstimate]

PLAN_WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 84, 52
_LABEL = 30  # the width that a number needs
_PARTS = ("weights", "optimizer", "gradients", "activations", "rest")


def memory_plot(
    points: Sequence[Point], capacity_gib: float, chosen: int | None, title: str
) -> str:
    """A bar per batch size and the line of the capacity; `chosen` is the plan's batch size."""
    points = sorted(points, key=lambda point: point[0])
    sizes = [size for size, _ in points]
    if not points or (chosen is not None and chosen not in sizes):
        raise ValueError(f"the points are at {sizes}, and the chosen one at {chosen}")
    most = max(capacity_gib, *(memory.peak_reserved_gib for _, memory in points))
    axis = linear(0.0, most * 1.05, _LINES)
    pitch = (PLAN_WIDTH - LEFT - RIGHT) / len(points)
    width, every = min(pitch * 0.7, 64), math.ceil(_LABEL / pitch)
    body = [text_at(LEFT, 26, title, "title"), *_legend(capacity_gib), *_plan_grid(axis)]
    for index, (size, memory) in enumerate(points):
        middle, y = LEFT + pitch * (index + 0.5), _y(memory.peak_reserved_gib, axis)
        body += _plan_bar(memory, middle - width / 2, width, axis)
        if size == chosen:
            frame = (middle - width / 2 - 3, y - 3, width + 6, HEIGHT - BOTTOM - y + 3)
            body += [_rect("chosen", *frame), text_at(middle, y - 20, "chosen", "small middle")]
        if size == chosen or index % every == 0:
            peak = f"{memory.peak_reserved_gib:.1f}"
            body.append(text_at(middle, y - 6, peak, "small middle"))
            body.append(text_at(middle, HEIGHT - BOTTOM + 18, str(size), "middle"))
    body.append(_line(_y(capacity_gib, axis), "capacity"))
    body.append(text_at((LEFT + PLAN_WIDTH - RIGHT) / 2, HEIGHT - 10, "batch size", "middle"))
    return picture(PLAN_WIDTH, HEIGHT, title, css("memory"), body)


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
    """Parts of the peak reserved memory, in the order of the bars; they add up to it.

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


def _y(gib: float, axis: PlotAxis) -> float:
    return HEIGHT - BOTTOM - axis.place(gib) * (HEIGHT - TOP - BOTTOM)


def _plan_bar(memory: MemoryEstimate, x: float, width: float, axis: PlotAxis) -> Iterator[str]:
    base = 0.0
    faded = "" if memory.fits else " over"
    for name, gib in parts_at_peak(memory).items():
        top, bottom = _y(base + gib, axis), _y(base, axis)
        yield _rect(f"{name}{faded}", x, top, width, bottom - top, f"{name} {gib:.2f} GiB")
        base += gib


def _plan_grid(axis: PlotAxis) -> Iterator[str]:
    for value in axis.ticks:
        yield _line(_y(value, axis), "grid")
        yield text_at(LEFT - 8, _y(value, axis) + 4, f"{value:g}", "small end")
    yield text_at(LEFT - 8, TOP - 12, "GiB", "small end")


def _legend(capacity_gib: float) -> Iterator[str]:
    for index, name in enumerate(_PARTS):
        x = LEFT + index * 104
        yield _rect(name, x, 42, 12, 12)
        yield text_at(x + 18, 52, name, "small")
    x = LEFT + len(_PARTS) * 104 - 30
    yield f'<path class="capacity" d="M{x} 48h22"/>'
    yield text_at(x + 28, 52, f"capacity {capacity_gib:.1f} GiB", "small")


def _line(y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{LEFT}" y1="{y:.2f}" x2="{PLAN_WIDTH - RIGHT}" y2="{y:.2f}"/>'


LADDER_WIDTH = 860
_ROW, _BAR = 26, 14
_TOP = 76
_SPEED = (176, 520)
"""Left and right end of the speed-up's axis; behind it is room for the numbers."""
_MEMORY = (640, 780)


def ladder_plot(ladder: Ladder) -> str:
    """Speed-up and memory of each optimization; one that was not measured shows its status."""
    rows = [*ladder.steps, *ladder.without]
    gap = 2 if ladder.without else 0
    height = _TOP + _ROW * (len(rows) + gap) + 34
    speed = linear(0.0, max((s.speedup.high for s in rows if s.speedup), default=1.0), _LINES)
    memory = linear(0.0, max((s.peak_memory_gib or 0.0 for s in rows), default=0.0) or 1.0, _LINES)
    name = f"{ladder.title}: " if ladder.title else ""
    title = f"{name}one optimization after another, {ladder.device}"
    bottom = height - 30
    body = [
        text_at(16, 26, title, "title"),
        text_at(_SPEED[0], 50, "speed-up over the baseline, with 95% intervals", "small"),
        text_at(_MEMORY[0], 50, "peak memory, GiB", "small"),
        *_ladder_grid(_SPEED, speed, bottom),
        *_ladder_grid(_MEMORY, memory, bottom),
        f'<path class="one" d="M{_x(1.0, speed, _SPEED):.1f} {_TOP - 14}V{bottom}"/>',
    ]
    body += _rows(ladder.steps, _TOP, "speed", speed, memory)
    if ladder.without:
        start = _TOP + _ROW * (len(ladder.steps) + gap)
        body.append(text_at(16, start - 12, "The best without one of them", "small"))
        body += _rows(ladder.without, start, "without", speed, memory)
    return picture(LADDER_WIDTH, height, title, css("ladder"), body)


def _rows(
    steps: Sequence[LadderStep], top: float, kind: str, speed: PlotAxis, memory: PlotAxis
) -> Iterator[str]:
    for at, step in enumerate(steps):
        y = top + at * _ROW
        yield text_at(_SPEED[0] - 10, y + 11, step.name, "end")
        if step.speedup is None:
            yield text_at(_SPEED[0] + 6, y + 11, step.status, "small")
        else:
            value, label = step.speedup.value, f"{step.speedup.value:.2f}×"
            low, high = (_x(end, speed, _SPEED) for end in (step.speedup.low, step.speedup.high))
            end = _x(value, speed, _SPEED)
            tone = kind if step.kept else "aside"
            yield _rect(tone, _SPEED[0], y, end - _SPEED[0], _BAR, f"{step.name}: {label}")
            yield (
                f'<path class="whisker" d="M{low:.1f} {y + 7}H{high:.1f}'
                f'M{low:.1f} {y + 3}v8M{high:.1f} {y + 3}v8"/>'
            )
            yield text_at(max(high, end) + 6, y + 11, label, "small")
        if step.peak_memory_gib is not None:
            label = shown(step.peak_memory_gib, "gib")
            end = _x(step.peak_memory_gib, memory, _MEMORY)
            yield _rect("memory", _MEMORY[0], y, end - _MEMORY[0], _BAR, label)
            yield text_at(end + 6, y + 11, label.removesuffix(" GiB"), "small")


def _ladder_grid(place: tuple[int, int], axis: PlotAxis, bottom: float) -> Iterator[str]:
    for value in axis.ticks:
        x = _x(value, axis, place)
        yield f'<path class="grid" d="M{x:.1f} {_TOP - 14}V{bottom}"/>'
        yield text_at(x, bottom + 16, f"{value:g}", "small middle")


def _x(value: float, axis: PlotAxis, place: tuple[int, int]) -> float:
    return place[0] + axis.place(value) * (place[1] - place[0])
