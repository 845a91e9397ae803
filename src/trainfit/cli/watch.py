"""`trainfit watch`: a running job in the terminal, from another terminal."""

from __future__ import annotations

from pathlib import Path

import click

from trainfit.cli.main import Number


@click.command()
@click.argument("run", required=False)
@click.option(
    "--once", is_flag=True, help="Draw once and end; so it is where there is no terminal."
)
@click.option(
    "--every",
    type=Number(0.1, 86_400),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--json", "as_json", is_flag=True, help="Where the run stands, as one JSON object.")
def command(run: str | None, once: bool, every: float, as_json: bool) -> int:
    """A running job in the terminal, from another terminal.

    RUN is the folder of a run, or its name under runs/; without it, the newest there. It ends with
    the run, or on Ctrl-C, which leaves the run alone.
    """
    from trainfit.reports import terminal
    from trainfit.reports.live import Watcher, follow, frame

    watcher = Watcher(_find(run))
    if as_json:
        click.echo(watcher.look().to_json())
        return 0
    console = terminal.console()
    if once or not console.is_terminal:
        console.print(frame(watcher.look()))
        return 0
    try:
        standing = follow(watcher, console, every)
    except KeyboardInterrupt:
        return 0
    return 1 if standing.status == "failed" else 0


def _find(run: str | None) -> Path:
    from trainfit.core.errors import BadInput
    from trainfit.runs import run_folder

    root = Path("runs")
    if run is not None:
        return run_folder.find(run, root)
    found = [path.parent for path in root.glob("*/run.json")]
    if not found:
        raise BadInput(f"there is no run in {root}", "say which one: trainfit watch RUN")
    return max(found, key=lambda folder: folder.stat().st_mtime)
