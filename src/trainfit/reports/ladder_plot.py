"""The ladder as a picture: a bar of the speed-up for each row, and one of its memory beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainfit.reports.drawing import axis_top, escaped, picture, text_at, ticks
from trainfit.reports.numbers import shown
from trainfit.tuning.ladder_records import Ladder, LadderStep

WIDTH = 860
_ROW, _BAR = 26, 14
_TOP = 76
_SPEED = (176, 520)
"""From where to where the bars of the speed-up go; behind them is room for their numbers."""
_MEMORY = (640, 780)
_STYLE = """
.one { stroke: #8b949e; stroke-width: 1; stroke-dasharray: 4 3; }
.whisker { stroke: #1f2328; stroke-width: 1.5; fill: none; }
.speed { fill: #2f6fb5; }
.aside { fill: #8b949e; }
.without { fill: #d98324; }
.memory { fill: #2e9461; }
@media (prefers-color-scheme: dark) {
  .whisker { stroke: #e6edf3; }
}
"""


def ladder_plot(ladder: Ladder) -> str:
    """The picture as SVG; what could not be measured has its status in place of a bar."""
    rows = [*ladder.steps, *ladder.without]
    gap = 2 if ladder.without else 0
    height = _TOP + _ROW * (len(rows) + gap) + 34
    highs = [step.speedup.high for step in rows if step.speedup is not None]
    fastest = axis_top(max(highs, default=1.0))
    largest = axis_top(max((step.peak_memory_gib or 0.0 for step in rows), default=0.0) or 1.0)
    name = f"{ladder.title}: " if ladder.title else ""
    title = f"{name}one optimization after another, {ladder.device}"
    bottom = height - 30
    body = [
        text_at(16, 26, title, "title"),
        text_at(_SPEED[0], 50, "speed-up over the baseline, with 95% intervals", "small"),
        text_at(_MEMORY[0], 50, "peak memory, GiB", "small"),
        *_grid(_SPEED, fastest, bottom),
        *_grid(_MEMORY, largest, bottom),
        f'<path class="one" d="M{_x(1.0, fastest, _SPEED):.1f} {_TOP - 14}V{bottom}"/>',
    ]
    body += _rows(ladder.steps, _TOP, "speed", fastest, largest)
    if ladder.without:
        start = _TOP + _ROW * (len(ladder.steps) + gap)
        body.append(text_at(16, start - 12, "The best without one of them", "small"))
        body += _rows(ladder.without, start, "without", fastest, largest)
    return picture(WIDTH, height, title, _STYLE, body)


def _rows(
    steps: Sequence[LadderStep], top: float, kind: str, fastest: float, largest: float
) -> Iterator[str]:
    for at, step in enumerate(steps):
        y = top + at * _ROW
        yield text_at(_SPEED[0] - 10, y + 11, step.name, "end")
        if step.speedup is None:
            yield text_at(_SPEED[0] + 6, y + 11, step.status, "small")
        else:
            tone = kind if step.kept else "aside"
            value, low, high = step.speedup.value, step.speedup.low, step.speedup.high
            label = f"{value:.2f}×"
            yield _bar(tone, y, value, fastest, _SPEED, f"{step.name}: {label}")
            ends = [_x(end, fastest, _SPEED) for end in (low, high)]
            yield (
                f'<path class="whisker" d="M{ends[0]:.1f} {y + 7}H{ends[1]:.1f}'
                f'M{ends[0]:.1f} {y + 3}v8M{ends[1]:.1f} {y + 3}v8"/>'
            )
            yield text_at(max(ends[1], _x(value, fastest, _SPEED)) + 6, y + 11, label, "small")
        if step.peak_memory_gib is not None:
            label = shown(step.peak_memory_gib, "gib")
            yield _bar("memory", y, step.peak_memory_gib, largest, _MEMORY, label)
            end = _x(step.peak_memory_gib, largest, _MEMORY)
            yield text_at(end + 6, y + 11, label.removesuffix(" GiB"), "small")


def _bar(kind: str, y: float, value: float, top: float, place: tuple[int, int], label: str) -> str:
    width = _x(value, top, place) - place[0]
    return (
        f'<rect class="{kind}" x="{place[0]}" y="{y}" width="{width:.1f}" height="{_BAR}">'
        f"<title>{escaped(label)}</title></rect>"
    )


def _grid(place: tuple[int, int], top: float, bottom: float) -> Iterator[str]:
    for value in ticks(top):
        x = _x(value, top, place)
        yield f'<path class="grid" d="M{x:.1f} {_TOP - 14}V{bottom}"/>'
        yield text_at(x, bottom + 16, f"{value:g}", "small middle")


def _x(value: float, top: float, place: tuple[int, int]) -> float:
    return place[0] + value / top * (place[1] - place[0])
