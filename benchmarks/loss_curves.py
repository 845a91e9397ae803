"""Are two contenders' loss curves the same but for luck? In figures, and as a picture.

Several seeds of each are the measure: the contenders' means may differ by no more than seeds do
among themselves. Ranges of a few seeds are wide, so this finds large differences alone; the mean
loss of each seed, side by side, shows smaller ones.

python benchmarks/loss_curves.py RESULT [--picture FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainfit.core.files import write_whole
from trainfit.reports.geometry import linear
from trainfit.reports.plots import picture, text_at

WHO = ("trainfit", "trainer")
WINDOW = 10
LAST = 30
Curves = Sequence[dict[str, Any]]
"""A seed each, with the losses of both contenders."""

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 72, 44
_STYLE = """
.curve { fill: none; stroke-width: 1.5; }
.trainfit { stroke: #2f6fb5; }
.trainer { stroke: #d98324; stroke-dasharray: 5 3; }
"""


def smoothed(losses: Sequence[float], window: int) -> np.ndarray:
    """At each step the mean of its loss and of those before it, at most `window` in all."""
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def compare(curves: Curves, window: int) -> dict[str, Any]:
    """At how many steps the means differ by no more than the ranges of the seeds."""
    ours, theirs = (np.stack([smoothed(seed[who], window) for seed in curves]) for who in WHO)
    apart = np.abs(ours.mean(0) - theirs.mean(0))
    ranges = np.ptp(ours, axis=0), np.ptp(theirs, axis=0)
    found: dict[str, Any] = {"window": window, "steps": len(apart)}
    for name, spread in (
        *zip(WHO, ranges, strict=True),
        ("wider", np.maximum(*ranges)),
    ):
        excess = apart - spread
        worst = int(excess.argmax())
        found[f"within_{name}"] = int((excess <= 0).sum())
        if excess[worst] > 0:
            found[f"beyond_{name}"] = {"step": worst + 1, "by": round(float(excess[worst]), 4)}
    return found


def summary(curves: Curves) -> dict[str, Any]:
    """The comparison step by step and smoothed, and each seed's mean losses."""
    shown: dict[str, Any] = {"spreads": [compare(curves, window) for window in (1, WINDOW)]}
    for who in WHO:
        shown[who] = {
            "mean_losses": [round(float(np.mean(seed[who])), 4) for seed in curves],
            f"last_{LAST}": [round(float(np.mean(seed[who][-LAST:])), 4) for seed in curves],
        }
    return shown


def draw(curves: Curves, title: str) -> str:
    """Every seed's smoothed curves, one colour for each contender."""
    lines = [(who, smoothed(seed[who], WINDOW)) for seed in curves for who in WHO]
    axis = linear(0.0, max(float(losses.max()) for _, losses in lines), 5)
    steps = len(lines[0][1])

    def place(step: int, loss: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * step / steps
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * axis.place(loss)

    def path(kind: str, losses: np.ndarray) -> str:
        points = (place(step, float(loss)) for step, loss in enumerate(losses, 1))
        joined = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        return f'<path class="curve {kind}" d="M{joined}"/>'

    def frame() -> Iterator[str]:
        for value in axis.ticks:
            y = place(0, value)[1]
            yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            yield text_at(LEFT - 8, y + 4, f"{value:g}", "small end")
        for step in linear(0.0, steps, 5).ticks:
            yield text_at(place(int(step), 0)[0], HEIGHT - BOTTOM + 16, f"{step:g}", "small middle")
        yield text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "step", "small middle")
        for at, (who, name) in enumerate(zip(WHO, ("trainfit", "Trainer"), strict=True)):
            x = LEFT + 120 * at
            yield f'<path class="curve {who}" d="M{x} 48h28"/>'
            yield text_at(x + 36, 52, name, "small")

    body = [text_at(LEFT, 26, title, "title"), *frame(), *(path(*line) for line in lines)]
    return picture(WIDTH, HEIGHT, title, _STYLE, body)


def draw_record(record: dict[str, Any]) -> str:
    """The picture of a whole record."""
    curves = record["curves"]
    return draw(curves, f"Loss of {len(curves)} seeds, the mean of {WINDOW} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--picture", type=Path, help="an SVG")
    asked = parser.parse_args()
    record = json.loads(asked.result.read_text())
    print(json.dumps(summary(record["curves"]), indent=1))
    if asked.picture:
        write_whole(asked.picture, draw_record(record))


if __name__ == "__main__":
    main()
