"""The ladder of optimizations in a terminal, and its files: ladder.json and ladder.svg."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from trainfit.core.files import write_output
from trainfit.reports import terminal
from trainfit.reports.model import MISSING, plain, shown
from trainfit.reports.plots import ladder_plot
from trainfit.tuning.ladder.rungs import BASELINE, Ladder, LadderStep
from trainfit.tuning.tuned_cache import Interval


def ladder_page(ladder: Ladder) -> RenderableType:
    """Tables of each optimization, of the best without each, and of those not applicable."""
    name = f"{ladder.title}: " if ladder.title else ""
    title = f"{name}one optimization after another, on {ladder.device}"
    parts: list[RenderableType] = [Text(title, "bold")]
    parts += _table("optimization", "over the last", ladder.steps)
    if ladder.without:
        parts += ["", *_table("the best without", "of the best", ladder.without)]
    if ladder.not_applicable:
        parts += ["", Text("Not applicable here", "bold")]
        parts += [Text(f"  {one.name}: {one.reason}") for one in ladder.not_applicable]
    parts += ["", *(Text(line) for line in closing_lines(ladder))]
    return Group(*parts)


def write_ladder(ladder: Ladder, place: Path) -> tuple[Path, Path]:
    """Write the JSON and the picture beside it; into a folder, where a report finds ladder.json."""
    data = place if place.suffix == ".json" else place / "ladder.json"
    picture = data.with_suffix(".svg")
    write_output(data, ladder.to_json() + "\n")
    write_output(picture, ladder_plot(ladder))
    return data, picture


def step_line(step: LadderStep) -> str:
    """One line about a step, printed while the ladder runs."""
    if step.samples_per_second is None:
        return f"{step.name}: {step.status}" + (f" ({step.note})" if step.note else "")
    compared = f", {times(step.gain)} what it is compared with" if step.gain else ""
    if step.speedup:
        compared = f", {times(step.speedup)} the baseline"
    return f"{step.name}: {rate(step)} samples/s{compared}"


def closing_lines(ladder: Ladder) -> list[str]:
    """Sentences on how the ladder was measured."""
    lines = [
        f"Medians with 95% intervals over {ladder.rounds} "
        f"{'round' if ladder.rounds == 1 else 'rounds'} in {ladder.seconds:.0f} s, "
        f"{ladder.samples_per_step} sequences a step in every row."
    ]
    if ladder.rounds == 1:
        lines.append("After one round they do not show how a trial differs from the next.")
    if ladder.drift is not None:
        lines.append(f"The baseline at the end was {times(ladder.drift)} as fast as at first.")
    if ladder.ended != "finished":
        lines.append(f"It ended early: {ladder.ended}.")
    return lines


def times(interval: Interval | None) -> str:
    """A ratio with its interval."""
    if interval is None:
        return MISSING
    if interval.low == interval.high:
        return f"{interval.value:.2f}×"
    return f"{interval.value:.2f}× ({interval.low:.2f}–{interval.high:.2f})"


def rate(step: LadderStep) -> str:
    """Samples per second with their interval, or the status of a step without."""
    found = step.samples_per_second
    if found is None:
        return step.status
    return f"{plain(found.value)} ({plain(found.low)}–{plain(found.high)})"


def _table(first: str, against: str, steps: tuple[LadderStep, ...]) -> list[RenderableType]:
    """The table of steps, with their notes below."""
    figures = ("samples/s", "speed-up", against, "peak memory")
    table = terminal.table("", (first,), figures, header_style="bold")
    for step in steps:
        table.add_row(
            Text(step.name, "" if step.kept else "dim"),
            rate(step),
            times(step.speedup),
            times(step.gain),
            shown(step.peak_memory_gib, "gib"),
        )
    said = [f"  {step.name}: {step.note}" for step in steps if step.note]
    if steps[0].name == BASELINE:
        said.insert(0, f"  {BASELINE}: {steps[0].what}")
    return [table, *(Text(line, "dim") for line in said)]
