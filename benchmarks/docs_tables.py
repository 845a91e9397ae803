"""Write the measured tables and pictures of README.md and docs/ from benchmarks/results.

    python benchmarks/docs_tables.py            # after a new record: writes the pages
    python benchmarks/docs_tables.py --outputs  # also runs the commands whose output is shown

A page marks the place of a table with `<!-- table NAME -->` and `<!-- end of table -->`, and the
place of a command's output with `<!-- output COMMAND -->` and `<!-- end of output -->`;
`<!-- output 16 + 8 of COMMAND -->` shows the first 16 and the last 8 lines. A test compares every
table with its record.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import compat
import head_tables
import job_tables
import ladder_docs
import loss_curves
import memory_tables
import real_data
import settings_tables
import speed_tables
from result_files import RESULTS, ROOT
from trainfit.core.files import write_whole
from trainfit.reports.plots import ladder_plot
from troubleshooting import troubleshooting

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
TABLES = (
    job_tables.TABLES
    | speed_tables.TABLES
    | settings_tables.TABLES
    | compat.TABLES
    | head_tables.TABLES
    | memory_tables.TABLES
    | real_data.TABLES
)
_TABLE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_OUTPUT = re.compile(
    r"(<!-- output (?:(\d+) \+ (\d+) of )?(.+?) -->\n).*?(<!-- end of output -->)", re.DOTALL
)


def with_tables(text: str) -> str:
    """Text of a page with every marked table made anew."""

    def filled(match: re.Match[str]) -> str:
        made = TABLES[match[2]]()
        return f"{match[1]}\n{made}\n{match[3]}" if made else f"{match[1]}{match[3]}"

    return _TABLE.sub(filled, text)


def with_outputs(text: str) -> str:
    """Text of a page with every marked command run and its output shown."""

    def shown(match: re.Match[str]) -> str:
        start, first, last, command, end = match.groups()
        words = shlex.split(command)[1:]
        done = subprocess.run(
            [sys.executable, "-m", "trainfit", *words], capture_output=True, text=True, check=True
        )
        lines = [line.rstrip() for line in done.stdout.splitlines()]
        if first is not None:
            lines = [*lines[: int(first)], "…", *lines[-int(last) :]]
        body = "\n".join(lines)
        return f"{start}\n```text\n$ {command}\n{body}\n```\n\n{end}"

    return _OUTPUT.sub(shown, text)


def pictures() -> dict[Path, str]:
    """Every picture that is drawn from a record, by its path."""
    folder = ROOT / "docs"
    drawn = {
        folder / name: ladder_plot(ladder) for name, ladder in ladder_docs.recorded(RESULTS).items()
    }
    for path in RESULTS.glob("*-curves-h200.json"):
        found = json.loads(path.read_text())
        drawn[folder / f"{path.stem}.svg"] = loss_curves.draw_record(found)
    return drawn | job_tables.pictures()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--outputs", action="store_true", help="run the commands shown with output")
    outputs = parser.parse_args().outputs
    for path, text in (pictures() | {TROUBLESHOOTING: troubleshooting()}).items():
        write_whole(path, text)
    for page in PAGES:
        text = with_tables(page.read_text())
        text = with_outputs(text) if outputs else text
        if text != page.read_text():
            write_whole(page, text)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
