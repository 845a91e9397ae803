"""Put the recorded ladders into docs/ladder.md: a table and a picture for each.

    python benchmarks/tune.py --stage ladder --output benchmarks/results/DATE-NAME-h200.json
    trainfit tune nli --ladder --output benchmarks/results/DATE-NAME-ladder-h200.json …
    python benchmarks/ladder_docs.py

The page has a place for them between two marks, and a test sees that what stands there is what the
files say.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from trainfit import codec
from trainfit.files import write_whole
from trainfit.reports.ladder_page import closing_lines, rate, times
from trainfit.reports.ladder_plot import ladder_plot
from trainfit.reports.numbers import shown
from trainfit.tuning.ladder_records import Ladder, LadderStep

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "ladder.md"
BEGIN, END = "<!-- recorded ladders -->\n", "<!-- end of the recorded ladders -->\n"


def recorded(results: Path = ROOT / "benchmarks" / "results") -> dict[str, Ladder]:
    """The ladders of the files, by the names of their pictures."""
    found: dict[str, Ladder] = {}
    for path in sorted(results.glob("*-h200.json")):
        if path.stem.endswith("-ladder-h200"):
            found[f"{path.stem}.svg"] = _measured(Ladder.load(path))
            continue
        for name, work in json.loads(path.read_text()).get("workloads", {}).items():
            if "ladder" in work:
                ladder = codec.decode(Ladder, work["ladder"], str(path))
                if "removals" in work:  # measured by themselves, and so more of them
                    removals = codec.decode(Ladder, work["removals"], str(path))
                    ladder = replace(ladder, without=removals.without)
                found[f"{path.stem}-{name}-ladder.svg"] = replace(_measured(ladder), title=name)
    return found


def _measured(ladder: Ladder) -> Ladder:
    """Without the rows that there was no time for."""
    steps, without = (
        tuple(step for step in part if step.status != "skipped")
        for part in (ladder.steps, ladder.without)
    )
    return replace(ladder, steps=steps, without=without)


def page(text: str, ladders: dict[str, Ladder]) -> str:
    """The page with these ladders in their place."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    chapters = [_chapter(picture, ladder) for picture, ladder in ladders.items()]
    body = "\n".join(chapters) or "None has been recorded on a GPU yet.\n"
    return f"{head}{BEGIN}{body}{END}{tail}"


def _chapter(picture: str, ladder: Ladder) -> str:
    lines = [
        f"### {ladder.title}, {ladder.device}",
        "",
        f"![{ladder.title}: speed-up and memory of each step]({picture})",
        "",
        *_table(ladder.steps, "over the last"),
        "",
        *(_table(ladder.without, "of the best", "the best without") or [_NOT_REMOVED]),
        "",
        f"torch {ladder.torch}, {ladder.taken}. {' '.join(closing_lines(ladder))}",
        "",
    ]
    return "\n".join(lines)


_NOT_REMOVED = "There was no time to remove them from the best again."


def _table(steps: tuple[LadderStep, ...], against: str, first: str = "optimization") -> list[str]:
    if not steps:
        return []
    heads = (first, "samples/s", "speed-up", against, "peak memory", "")
    rows = [
        (
            step.name,
            rate(step),
            times(step.speedup),
            times(step.gain),
            shown(step.peak_memory_gib, "gib"),
            step.note,
        )
        for step in steps
    ]
    return ["| " + " | ".join(row).rstrip() + " |" for row in (heads, ("---",) * 6, *rows)]


def main() -> None:
    ladders = recorded()
    for name, ladder in ladders.items():
        write_whole(PAGE.parent / name, ladder_plot(ladder))
    write_whole(PAGE, page(PAGE.read_text(), ladders))
    print(f"{len(ladders)} ladders in {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
